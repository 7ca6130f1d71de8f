"""Proof that a site can grow: a throw-away copy, widened by neurons that nothing reads, gives the same output."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from auxin.layers.operations_base import named, tensors_in
from auxin.structure import Site, Slot, slot_tensor, widened
from auxin.surgery import scratch

NEURONS = 3
"""How many neurons a copy is widened by, rounded up to whole groups."""

DOUBLE_LIMIT = 2**28
"""Models of more entries than this are not copied in float64."""

_TOLERANCE = {torch.float64: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_FLOAT32_TOLERANCE = 1e-4
_DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout"

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
            copy = scratch(model)
            copy = copy if dtype is None else copy.to(dtype)
            make_uneven(copy)
            base = {mode: outputs(copy, run, dtype, mode) for mode in (False, True)}
            base = {mode: result for mode, result in base.items() if not result.error}
            if base:
                break
        fixed = {m: r for m, r in base.items() if not m or not r.difference(outputs(copy, run, dtype, m, seed=1))}
        return cls(copy, run, dtype, fixed or base)

    def failure(self, sites: Sequence[Site]) -> str | None:
        """What goes wrong when these sites are widened together; None if nothing does."""
        copy = scratch(self.model)
        try:
            for site in sites:
                widen(copy, site)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            return f"a copy could not be widened: {brief(error)}"
        for mode, before in self.base.items():
            after = outputs(copy, self.run, self.dtype, mode)
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
            return [], {site.name: "the model runs on the example once only, so that nothing can be proved" for site in sites}
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
    """Entries (..., outer, count, inner, ...) of new neurons: zero fan-out, the others between 0.5 and 1.5."""
    axis = slot.axis % tensor.dim()
    shape = [*tensor.shape[:axis], slot.outer, count, slot.inner, *tensor.shape[axis + 1 :]]
    if slot.role == "fan_out":
        return tensor.new_zeros(shape)
    scale = max(1, tensor[:1].numel()) ** -0.5
    return (torch.rand(shape, device=tensor.device) + 0.5).to(tensor) * scale


def outputs(model: nn.Module, run: Run, dtype: torch.dtype | None, training: bool, seed: int = 0) -> Outputs:
    """The outputs of a copy of `model` in one mode, from a fixed random state."""
    copy = scratch(model).train(training)
    torch.manual_seed(seed)
    try:
        with torch.no_grad(), _NoDropout():
            result = run(copy, dtype)
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
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) if a.numel() else 0.0


def _comparable(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()
