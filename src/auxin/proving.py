"""Proof that a site can grow: a throw-away copy, widened by neurons that nothing reads, gives the same output."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from auxin.isolation import reseed
from auxin.layers.operations_base import named, tensors_in
from auxin.structure import Site, Slot, slot_tensor, widened
from auxin.surgery import scratch

NEURONS = 3
"""How many neurons a copy is widened by, rounded up to whole groups."""

DOUBLE_LIMIT = 2**28
"""Models of more entries than this are not copied in float64."""

FAINTEST = 1e-8
"""Changes of an output that is smaller than this are seen beside this: such outputs may be rounding and no more."""

_TOLERANCE = {torch.float64: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_FLOAT32_TOLERANCE = 1e-4
_DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout"

_NOTHING = "a copy of the model gives no finite floating-point output on the example that could be compared"

Run = Callable[[nn.Module, torch.dtype | None], Any]
"""Runs a model on the example, its floating-point tensors in a given type (None: as they are)."""


class _NoDropout(TorchFunctionMode):
    """Dropout as the identity: masks of a wider layer would change the random numbers of all that follow."""

    functions = frozenset(named(*_DROPOUTS.split()))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass the input of a dropout on."""
        kwargs = kwargs or {}
        if func in self.functions:
            return args[0] if args else kwargs["input"]
        if func is F.rrelu:
            return F.leaky_relu(args[0] if args else kwargs["input"], 0.2)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Outputs:
    """Every output tensor of a model in one mode, or why it could not run."""

    tensors: tuple[Tensor, ...] = ()
    error: str = ""

    @property
    def comparable(self) -> bool:
        """Whether there is anything that a change could show in."""
        numbers = (t for t in self.tensors if t.is_floating_point() or t.is_complex())
        return any(bool(t.isfinite().any()) for t in numbers)

    def difference(self, other: "Outputs") -> float:
        """The largest change, relative to the tensor's largest entry; infinite where shapes or finiteness differ."""
        if len(self.tensors) != len(other.tensors):
            return float("inf")
        return max((_relative(a, b) for a, b in zip(self.tensors, other.tensors, strict=True)), default=0.0)


@dataclass(frozen=True)
class Proof:
    """A base model whose outputs are known in each of `modes` (training or not) in which it runs."""

    model: nn.Module
    run: Run
    dtype: torch.dtype | None
    base: dict[bool, Outputs]

    @classmethod
    def of(cls, model: nn.Module, run: Run) -> "Proof":
        """In float64 where the model runs in it, else in its own type; constant tensors are made uneven."""
        size = sum(p.numel() for p in model.parameters())
        for dtype in (torch.float64, None) if size < DOUBLE_LIMIT else (None,):
            base = scratch(model) if dtype is None else scratch(model).to(dtype)
            make_uneven(base)
            found = {mode: outputs(base, run, dtype, mode) for mode in (False, True)}
            found = {mode: result for mode, result in found.items() if result.comparable}
            if found:
                break
        fixed = {m: r for m, r in found.items() if not m or not r.difference(outputs(base, run, dtype, m, seed=1))}
        return cls(base, run, dtype, fixed or found)

    def failure(self, sites: Sequence[Site]) -> str | None:
        """What goes wrong when these sites are widened together; None if nothing does."""
        wider = light_copy(self.model)
        try:
            for site in sites:
                widen(wider, site)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            return f"a copy could not be widened: {brief(error)}"
        for mode, before in self.base.items():
            after = outputs(wider, self.run, self.dtype, mode)
            if after.error:
                return f"a widened copy cannot run ({after.error}): a size is written into its forward"
            difference = before.difference(after)
            if not difference <= tolerance(before):
                return f"widening a copy changed the output by {difference:.2g}: something else reads this width"
        return None

    def settle(self, sites: Sequence[Site], accepted: Sequence[Site] = ()) -> tuple[list[Site], dict[str, str]]:
        """Those of `sites` that keep the output together with all of `accepted`, and why the others do not."""
        if not sites:
            return [], {}
        if not self.base:
            return [], dict.fromkeys((site.name for site in sites), _NOTHING)
        reason = self.failure([*accepted, *sites])
        if reason is None:
            return list(sites), {}
        if len(sites) == 1:
            return [], {sites[0].name: reason}
        half = len(sites) // 2
        good, bad = self.settle(sites[:half], accepted)
        more, worse = self.settle(sites[half:], [*accepted, *good])
        return [*good, *more], {**bad, **worse}


def tolerance(result: Outputs) -> float:
    """How far rounding may move these outputs."""
    return max((_TOLERANCE.get(t.dtype, _FLOAT32_TOLERANCE) for t in result.tensors), default=0.0)


def widen(model: nn.Module, site: Site) -> None:
    """Give `model`, a throw-away copy, random neurons in `site` that no consumer reads."""
    count = -(-NEURONS // site.group) * site.group
    for slot in site.slots:
        tensor = slot_tensor(model, slot)
        new = widened(tensor.detach(), slot, entries(tensor, slot, count))
        module = model.get_submodule(slot.module)
        if slot.tensor in module._parameters:
            module._parameters[slot.tensor] = nn.Parameter(new, requires_grad=False)
        else:
            module._buffers[slot.tensor] = new
    for number in site.counts:
        module = model.get_submodule(number.module)
        setattr(module, number.attribute, getattr(module, number.attribute) + number.times * (count // number.per))


def entries(tensor: Tensor, slot: Slot, count: int) -> Tensor:
    """Entries (..., outer, count, inner, ...) of new neurons: zero fan-out, the others between 0.5 and 1.5 in size.

    Half of the fan-ins are negative, so that no rectifier silences all of them.
    """
    axis = slot.axis % tensor.dim()
    shape = [*tensor.shape[:axis], slot.outer, count, slot.inner, *tensor.shape[axis + 1 :]]
    if slot.role == "fan_out":
        return tensor.new_zeros(shape)
    scale = max(1, tensor[:1].numel()) ** -0.5
    new = (torch.rand(shape, device=tensor.device) + 0.5).to(tensor) * scale
    if slot.role == "fan_in":
        new.narrow(axis + 1, count // 2, count - count // 2).neg_()
    return new


def light_copy(model: nn.Module) -> nn.Module:
    """A deep copy that shares the parameters, which no pass changes."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def outputs(model: nn.Module, run: Run, dtype: torch.dtype | None, training: bool, seed: int = 0) -> Outputs:
    """The outputs of a copy of `model` in one mode, from a fixed random state."""
    tried = light_copy(model).train(training)
    reseed(seed)
    try:
        with torch.no_grad(), _NoDropout():
            result = run(tried, dtype)
    except Exception as error:
        return Outputs(error=brief(error))
    return Outputs(tuple(tensors_in(result)))


def brief(error: Exception) -> str:
    """An error's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def make_uneven(model: nn.Module) -> None:
    """Noise on tensors whose entries are all equal: a branch at zero would hide what it reads."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
            parameter.data += 0.1 * torch.randn(parameter.shape, device=parameter.device).to(parameter)


def _relative(before: Tensor, after: Tensor) -> float:
    if before.shape != after.shape:
        return float("inf")
    a, b = _comparable(before), _comparable(after)
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).abs().max() / a.abs().max().clamp(min=FAINTEST)) if a.numel() else 0.0


def _comparable(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()
