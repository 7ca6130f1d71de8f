"""One forward pass of a throw-away copy, followed width by width from the layers that produce it to all its readers."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from auxin.layers.operations import follow, name_of, only_asks
from auxin.layers.operations_base import Call, Carried, Flow, Refused, tensors_in
from auxin.structure import Reading

_CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_UNSUPPORTED = (nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Bilinear)


@dataclass
class Group:
    """A width under way: what reads it, what it passes through, and why it is refused, if it is."""

    name: str
    readings: list[Reading] = field(default_factory=list)
    carried: dict[Carried, None] = field(default_factory=dict)
    refusal: str | None = None

    def refuse(self, reason: str) -> None:
        """Keep the first reason."""
        self.refusal = self.refusal or reason

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module that would grow with it."""
        return (self.name, *(r.consumer for r in self.readings), *(c.carrier.module for c in self.carried))


@dataclass(frozen=True)
class Trace:
    """What one forward pass showed: every width, and how many rows each layer worked on."""

    groups: dict[str, Group]
    rows: dict[str, int]


class Layers:
    """The modules of a model under their names, and who owns which tensor."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.owners: dict[int, list[tuple[str, str]]] = {}
        self._kept: list[Tensor] = []
        for module, name in self.names.items():
            for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._kept.append(tensor)
                    self.owners.setdefault(id(tensor), []).append((name, attribute))
        known = {m: self.refusal(m) for m in self.names if isinstance(m, (nn.Linear, *_UNSUPPORTED))}
        self.supported = {module for module, reason in known.items() if reason is None}
        self.refused = {self.names[module]: reason for module, reason in known.items() if reason is not None}

    def owner(self, tensor: Tensor) -> tuple[str, str] | None:
        """Module and attribute that alone hold a tensor."""
        owners = self.owners.get(id(tensor), [])
        return owners[0] if len(owners) == 1 else None

    def refusal(self, module: nn.Module) -> str | None:
        """Why a layer can neither produce nor read a width that grows; None if it can."""
        kind = type(module)
        families: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVOLUTIONS)
        family = next((f for f in families if isinstance(module, f)), None)
        if family is None:
            return f"a {kind.__name__} is not supported"
        if "weight" not in module._parameters or hasattr(module, "parametrizations"):
            return f"its weight is computed from other tensors (a {kind.__name__} with weight norm or the like)"
        own = any(getattr(kind, f, None) is not getattr(family, f, None) for f in ("forward", "_conv_forward"))
        if own or "forward" in vars(module):
            return f"a {kind.__name__} with a forward of its own is not supported"
        if getattr(module, "groups", 1) != 1:
            return f"a convolution with groups={module.groups} is not supported"
        return self._shared(module)

    def _shared(self, module: nn.Module) -> str | None:
        for tensor in (module._parameters["weight"], module._parameters.get("bias")):
            holders = [] if tensor is None else self.owners[id(tensor)]
            if len(holders) > 1:
                return "its weights are tied: " + " is ".join(repr(".".join(filter(None, h))) for h in holders)
        return None


class Usage:
    """How often each module ran, who else used its tensors, and what read each layer's output first."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.calls: Counter[str] = Counter()
        self._foreign: dict[str, str] = {}
        self._outputs: Any = WeakIdKeyDictionary()
        self._readers: dict[str, list[str | None]] = {}

    def produced(self, output: Tensor, layer: str) -> None:
        """A layer's very output."""
        self._outputs[output] = layer

    def read(self, tensors: Iterable[Tensor], norm: str | None = None) -> None:
        """Tensors that were read, by a batch norm or by something else."""
        for tensor in tensors:
            if tensor in self._outputs:
                self._readers.setdefault(self._outputs[tensor], []).append(norm)

    def norm_behind(self, layer: str) -> str | None:
        """The batch norm that alone read a layer's output."""
        readers = self._readers.get(layer, [])
        return readers[0] if len(readers) == 1 else None

    def note_foreign(self, tensors: Iterable[Tensor], here: str, what: str) -> None:
        """A tensor that another module's forward uses as well cannot grow with its own module."""
        for tensor in tensors:
            owners = self.layers.owners.get(id(tensor), [])
            if here not in (module for module, _ in owners):
                for module, attribute in owners:
                    self._foreign.setdefault(module, f"its {attribute} is used by {what}")

    def oddity(self, module: str) -> str | None:
        """What makes a module's use other than one plain call."""
        if self.calls[module] > 1:
            return f"{module!r} is called {self.calls[module]} times in one forward pass"
        return f"{module!r} does not work alone: {self._foreign[module]}" if module in self._foreign else None


class Tracer(TorchFunctionMode):
    """Watches every torch function and every module call while it is active."""

    def __init__(self, layers: Layers, samples: int) -> None:
        super().__init__()
        self.layers = layers
        self._samples = samples
        self.groups: dict[str, Group] = {}
        self.rows: dict[str, int] = {}
        self._usage = Usage(layers)
        self._flows: Any = WeakIdKeyDictionary()
        self._stack: list[nn.Module] = []
        self._quiet = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, then follow every width that enters it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._quiet and not only_asks(func):
            self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        tensors = list(tensors_in((args, kwargs)))
        self._usage.note_foreign(tensors, self._here, f"{name_of(func)} in {self._where}")
        entering = [(tensor, self._flows[tensor]) for tensor in tensors if tensor in self._flows]
        after = [self._after(self._call(func, out, tensor, flow), args, kwargs) for tensor, flow in entering]
        if None in after:
            for _, flow in entering:
                self.groups[flow.group].refuse(f"it meets a width that is refused in {self._where}")
            self._usage.read(tensors)
        elif after and after[0] is not None:
            self._pass_on(entering[0][1], after[0], tensors, out)

    def _after(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow | None:
        try:
            return follow(call, args, kwargs)
        except Refused as reason:
            unsupported = self.layers.refused.get(self._here)
            text = f"it is read by {self._where}: {unsupported}" if unsupported else f"it is {reason}"
            self.groups[call.flow.group].refuse(text)
            return None

    def _pass_on(self, before: Flow, after: Flow, tensors: list[Tensor], out: Any) -> None:
        new = after.carried[len(before.carried) :]
        self._usage.read(tensors, next((c.carrier.module for c in new if c.carrier.kind == "batch_norm"), None))
        self.groups[after.group].carried.update(dict.fromkeys(new))
        for tensor in tensors_in(out):
            self._flows[tensor] = after

    def _call(self, func: Callable[..., Any], out: Any, tensor: Tensor, flow: Flow) -> Call:
        read, owner = self._flows.get, self.layers.owner
        return Call(func, name_of(func), tensor, flow, out, self._here, self._where, read, owner)

    @property
    def _here(self) -> str:
        """The module whose forward is running."""
        return self.layers.names[self._stack[-1]] if self._stack else ""

    @property
    def _where(self) -> str:
        """The same, for people to read."""
        return f"{self._here!r} ({type(self._stack[-1]).__name__})" if self._here else "the model's own forward"

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Pre-hook of every module; what happens inside of a supported layer is not followed."""
        self._stack.append(module)
        self._quiet += module in self.layers.supported

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Hook of every module, called when it failed as well."""
        self._stack.pop()
        name = self.layers.names[module]
        self._usage.calls[name] += 1
        if module not in self.layers.supported:
            return
        if torch.is_tensor(output):
            self._layer(name, module, args[0] if args else kwargs["input"], output)
        self._quiet -= 1

    def _layer(self, name: str, module: nn.Module, inputs: Tensor, output: Tensor) -> None:
        """A supported layer has run: it reads one width and produces another."""
        axis = -1 - next((d for kind, d in _CONVOLUTIONS.items() if isinstance(module, kind)), 0)
        group = self.groups.setdefault(name, Group(name))
        batched = output.dim() > max(1, -axis) and output.shape[0] % self._samples == 0
        if not batched:
            group.refuse("its layer does not have the samples on its first axis")
        if inputs in self._flows:
            self._read(name, module, self._flows[inputs], axis if batched else None)
        self._usage.read([inputs])
        self.rows[name] = prod(size for i, size in enumerate(output.shape) if i != axis % output.dim())
        self._flows[output] = Flow.from_output(name, output.shape, axis)
        self._usage.produced(output, name)

    def _read(self, name: str, module: nn.Module, flow: Flow, axis: int | None) -> None:
        group, reader = self.groups[flow.group], f"{name!r} ({type(module).__name__})"
        if axis is None:
            group.refuse(f"it is read by {reader}, which does not have the samples on its first axis")
        elif flow.axis != len(flow.axes) + axis:
            group.refuse(f"it is multiplied along another axis by {reader}")
        elif axis < -1 and (flow.split or not flow.alone(1)):
            group.refuse(f"it is mixed with positions before {reader} reads it")
        else:
            padded = flow.padded or (axis < -1 and _zero_padded(module))
            outer, inner = flow.sides
            group.readings.append(Reading(name, flow.push, outer, inner, padded=padded))

    def finish(self, output: Any) -> Trace:
        """Refuse what the end of the pass shows, and name the norms behind the consumers."""
        for tensor in tensors_in(output):
            self._usage.read([tensor])
            if tensor in self._flows:
                self.groups[self._flows[tensor].group].refuse("it is the width of the model's output")
        for group in self.groups.values():
            for reason in filter(None, map(self._usage.oddity, group.modules)):
                group.refuse(reason)
            if not group.readings:
                group.refuse("no supported layer is seen to read it")
            group.readings = [replace(r, norm=self._usage.norm_behind(r.consumer)) for r in group.readings]
        return Trace(self.groups, self.rows)


def _zero_padded(module: nn.Module) -> bool:
    borders = getattr(module, "_reversed_padding_repeated_twice", ())
    return getattr(module, "padding_mode", "") == "zeros" and any(borders)


@contextmanager
def _watched(tracer: Tracer) -> Iterator[None]:
    """The tracer's hooks on every module that takes hooks."""
    handles: list[RemovableHandle] = []
    try:
        for module in tracer.layers.names:
            if not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(tracer.enter, prepend=True))
                hook = module.register_forward_hook(tracer.leave, prepend=True, with_kwargs=True, always_call=True)
                handles.append(hook)
        yield
    finally:
        for handle in handles:
            handle.remove()


def trace(model: nn.Module, run: Callable[[nn.Module], Any], samples: int) -> Trace:
    """One forward pass `run(model)` on so many samples, followed; the model is a copy that may change."""
    tracer = Tracer(Layers(model), samples)
    with torch.no_grad(), _watched(tracer), tracer:
        output = run(model)
    return tracer.finish(output)
