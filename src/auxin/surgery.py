"""Changes to a model, all or nothing: its tensors, the attributes that count them, and its optimizers' state.

The model, its Parameters and the optimizers stay the same objects. Everything is computed first; what is left are
assignments, and a stack of their undoings takes them back if one of them is interrupted.
"""

import copy
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from auxin import optimizers as optim
from auxin.edits import GRADIENT, Draft
from auxin.errors import InputError, ModelChangedError, StaleGraphError, WrapperError
from auxin.structure import Change, Count, Site

Drafts = dict[int, Draft]
Counts = dict[tuple[int, str], tuple[nn.Module, str, int]]

_FIXED = {
    "DataParallel",
    "DeepSpeedEngine",
    "DistributedDataParallel",
    "FSDPModule",
    "FullyShardedDataParallel",
    "ScriptModule",
}


@dataclass
class Plan:
    """Everything that is going to be assigned. `gradients`: by the identity of their parameter."""

    model: nn.Module
    drafts: list[Draft]
    gradients: dict[int, Tensor]
    counts: list[tuple[nn.Module, str, int]]
    moves: list[optim.Move]


def plain(model: nn.Module) -> nn.Module:
    """The module inside of what `torch.compile` returned; wrappers that keep the old shapes are refused."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {model!r}; accepted: a torch.nn.Module, the object itself and not its class")
    inner = getattr(model, "_orig_mod", None)
    if inner is not None:
        return plain(inner)
    for name, module in model.named_modules():
        wrappers = _FIXED.intersection(base.__name__ for base in type(module).__mro__)
        if wrappers:
            where = f"the submodule {name!r}" if name else "the model"
            raise WrapperError(
                f"{where} is a {wrappers.pop()}, which keeps the old shapes; pass the plain module inside of it "
                "(model.module, or what was scripted) and wrap that anew after it has grown"
            )
    return model


def scratch(model: nn.Module) -> nn.Module:
    """A deep copy to try things on, without gradients; the model is left as it is.

    Non-leaf tensors that modules keep as attributes, which `deepcopy` refuses, are copied detached.
    """
    model = plain(model)
    kept = (value for module in model.modules() for value in vars(module).values())
    try:
        return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in _non_leaves(kept)})
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and growth is tried on a copy "
            "first; make copy.deepcopy(model) work: keep open files, locks and the like out of the module, or give "
            "their class a __deepcopy__"
        ) from error


def apply(
    model: nn.Module, changes: Sequence[Change], optimizers: Optimizer | Sequence[Optimizer] | None = None
) -> None:
    """Carry out `changes` on the tensors of `model` and the state of `optimizers`, all of it or nothing.

    For each change, on every tensor that it names: `updates` are added, `keep` selects the old neurons, `new` ones
    are appended, and `factors` multiply. A later change may be made for the shapes before the call: its entries are
    zero where an earlier one added neurons.
    """
    model = plain(model)
    with torch.inference_mode(False), torch.no_grad():
        commit(planned(model, changes, optim.as_optimizers(optimizers)))


def changed(model: nn.Module, changes: Sequence[Change]) -> nn.Module:
    """A throw-away copy with `changes` carried out; what is compiled stays compiled."""
    copied = scratch(model)
    with torch.inference_mode(False), torch.no_grad():
        commit(planned(copied, changes), lasting=False)
    return copied


def replay(model: nn.Module, changes: Sequence[Change], values: Mapping[str, Tensor]) -> None:
    """Carry out `changes`, and put `values`, by name and in their memory format, in the place of what they say."""
    model = plain(model)
    with torch.inference_mode(False), torch.no_grad():
        commit(planned(model, changes, values=values))


def planned(
    model: nn.Module,
    changes: Sequence[Change],
    optimizers: Sequence[Optimizer] = (),
    values: Mapping[str, Tensor] = MappingProxyType({}),
) -> Plan:
    """All new values; nothing is changed yet."""
    drafts: Drafts = {}
    counts: Counts = {}
    for change in changes:
        width = _width(model, change.site, drafts)
        _check(change, width)
        _draft(model, change, drafts)
        _count(model, change, width, counts)
    for name, value in values.items():
        _draft_of(model, name, drafts).become(value)
    optim.check(model, [change for change in changes if _resizes(change)], optimizers)
    touched = [draft for draft in drafts.values() if draft.touched]
    gradients = {id(draft.tensor): _gradient(draft) for draft in touched if draft.tensor.grad is not None}
    return Plan(model, touched, gradients, list(counts.values()), optim.moves(optimizers, touched))


def commit(plan: Plan, lasting: bool = True) -> None:
    """Assign everything in a plan; an exception in between, whichever it is, takes all of it back."""
    with ExitStack() as undo:
        _assign(plan, undo, lasting)


def _assign(plan: Plan, undo: ExitStack, lasting: bool) -> None:
    """Each assignment puts its undoing on the stack first; once all are made, the stack is emptied."""
    alarm = _Alarm()
    undo.callback(alarm.silence)
    for draft in plan.drafts:
        _install(plan, draft, alarm, undo)
    for module, attribute, value in plan.counts:
        _set_count(module, attribute, value, undo)
    for move in plan.moves:
        _set_state(move, undo)
    if lasting:
        _forget_compiled()
    _outdate([draft.tensor for draft in plan.drafts], alarm)
    undo.pop_all()


def _draft_of(model: nn.Module, name: str, drafts: Drafts) -> Draft:
    """The draft of a tensor, by the tensor's identity: tied tensors have one."""
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ModelChangedError(f"the model has no module {path!r} (any more); call find_sites again") from None
    tensor = {**module._buffers, **module._parameters}.get(attribute)
    if tensor is None or is_lazy(tensor):
        raise ModelChangedError(
            f"{name} is not a parameter or buffer with a shape (any more); growth changes registered, initialised "
            "tensors only: call find_sites again"
        )
    if tensor.is_inference():
        raise InputError(
            f"{name} was made under torch.inference_mode and can never be trained; build the model outside of it"
        )
    return drafts.setdefault(id(tensor), Draft(name, tensor, tensor))


def _width(model: nn.Module, site: Site, drafts: Drafts) -> int:
    """The number of neurons of a site as drafted so far, on which all its tensors must agree."""
    widths: dict[str, float] = {}
    for slot in site.slots:
        value = _draft_of(model, slot.name, drafts).value
        size = value.shape[slot.axis] if -value.dim() <= slot.axis < value.dim() else math.nan
        widths[slot.name] = size / (slot.outer * slot.inner)
    if len(set(widths.values())) != 1 or not next(iter(widths.values())).is_integer():
        raise ModelChangedError(
            f"the tensors of site {site.name!r} disagree on its width: {widths}; the model was changed after it was "
            "analysed: call find_sites again"
        )
    return int(widths[site.slots[0].name])


def _resizes(change: Change) -> bool:
    return change.count > 0 or change.keep is not None


def _check(change: Change, width: int) -> None:
    name, slots = change.site.name, set(change.site.slots)
    if change.count < 0:
        raise InputError(f"site {name!r}: {change.count} new neurons; 0 or more are accepted")
    wrong = [slot.name for slot in slots.symmetric_difference(change.new) if change.count or slot in change.new]
    if wrong:
        raise InputError(f"site {name!r}: new entries must be given for its tensors, these differ: {sorted(wrong)}")
    keep = change.keep
    if keep is None:
        return
    chosen = keep.tolist()
    if keep.dim() != 1 or keep.dtype not in (torch.int32, torch.int64) or not set(chosen) <= set(range(width)):
        raise InputError(f"site {name!r}: keep must list indices from 0 to {width - 1}, got {chosen}")
    if len(set(chosen)) < len(chosen):
        raise InputError(f"site {name!r}: keep names a neuron twice: {chosen}")


def _draft(model: nn.Module, change: Change, drafts: Drafts) -> None:
    for name, update in change.updates.items():
        _draft_of(model, name, drafts).add(update)
    axes: dict[int, set[int]] = {}
    for slot in change.site.slots if _resizes(change) else ():
        draft = _draft_of(model, slot.name, drafts)
        done = axes.setdefault(id(draft.tensor), set())
        axis = slot.axis % draft.value.dim()
        if axis not in done:  # a tied tensor is named twice and grows once
            draft.resize(slot, change.count, change.new.get(slot), change.keep)
            done.add(axis)
    for name, factor in change.factors.items():
        draft = _draft_of(model, name, drafts)
        draft.scale(factor, axes.get(id(draft.tensor), ()))


def _count(model: nn.Module, change: Change, width: int, counts: Counts) -> None:
    kept = width if change.keep is None else len(change.keep)
    added = kept + change.count - width
    seen = set()
    for count in change.site.counts:
        module = model.get_submodule(count.module)
        key = (id(module), count.attribute)
        if key not in seen:
            seen.add(key)
            _, _, value = counts.get(key, (module, count.attribute, _attribute(module, count)))
            counts[key] = (module, count.attribute, value + count.times * _groups(added, count, change.site))


def _attribute(module: nn.Module, count: Count) -> int:
    value = getattr(module, count.attribute, None)
    if type(value) is not int:
        raise ModelChangedError(
            f"{count.module}.{count.attribute} is {value!r}, where a number that follows the width is expected; "
            "call find_sites again"
        )
    return value


def _groups(added: int, count: Count, site: Site) -> int:
    if added % count.per:
        raise InputError(
            f"site {site.name!r} changes by {added} neurons; {count.module}.{count.attribute} takes multiples of "
            f"{count.per}"
        )
    return added // count.per


def _gradient(draft: Draft) -> Tensor:
    """The gradient of a parameter, carried along; as it is where no shape and no scale changes."""
    gradient = draft.tensor.grad
    if gradient is None or gradient.layout is not torch.strided:
        raise InputError(f"{draft.name} holds a sparse gradient; call optimizer.zero_grad() before growing")
    return draft.follow(gradient, GRADIENT)


def _install(plan: Plan, draft: Draft, alarm: "_Alarm", undo: ExitStack) -> None:
    if not draft.replaced:
        _write(draft, undo)
    elif isinstance(draft.tensor, nn.Parameter):
        _swap(draft, alarm, undo)
    else:
        _rebind(plan.model, draft, undo)
    if id(draft.tensor) in plan.gradients:
        _set_gradient(draft.tensor, plan.gradients[id(draft.tensor)], undo)


def _write(draft: Draft, undo: ExitStack) -> None:
    """New entries in the old storage, so that whoever shares it sees them."""
    tensor, old = draft.tensor, draft.tensor.detach().clone()
    undo.callback(tensor.data.copy_, old)
    tensor.data.copy_(draft.value)


def _swap(draft: Draft, alarm: "_Alarm", undo: ExitStack) -> None:
    """New storage for the same Parameter, which a graph that is alive may still refer to.

    Autograd keeps one gradient accumulator a parameter as long as a graph needs it, with the shape of that time; it
    drops it when the parameter's type changes, so the type changes twice.
    """
    parameter = draft.tensor
    undo.callback(_restore, parameter, parameter.data, parameter.grad)
    alarm.watch(parameter, draft.name)
    parameter.grad = None
    parameter.data = _other_type(parameter)
    parameter.data = draft.value


def _restore(parameter: Tensor, data: Tensor, gradient: Tensor | None) -> None:
    parameter.grad = None
    parameter.data = data
    parameter.grad = gradient


def _other_type(tensor: Tensor) -> Tensor:
    return tensor.data.new_empty(0, dtype=torch.float32 if tensor.dtype is torch.bfloat16 else torch.bfloat16)


def _rebind(model: nn.Module, draft: Draft, undo: ExitStack) -> None:
    """A new tensor for a buffer, under every name; an old graph keeps the old one."""
    for module in model.modules():
        for name in [name for name, buffer in module._buffers.items() if buffer is draft.tensor]:
            undo.callback(module._buffers.__setitem__, name, draft.tensor)
            module._buffers[name] = draft.value


def _set_gradient(parameter: Tensor, gradient: Tensor, undo: ExitStack) -> None:
    undo.callback(setattr, parameter, "grad", parameter.grad)
    parameter.grad = gradient


def _set_count(module: nn.Module, attribute: str, value: int, undo: ExitStack) -> None:
    undo.callback(setattr, module, attribute, getattr(module, attribute))
    setattr(module, attribute, value)


def _set_state(move: optim.Move, undo: ExitStack) -> None:
    undo.callback(move.state.__setitem__, move.key, move.state[move.key])
    move.state[move.key] = move.value


def _forget_compiled() -> None:
    """Compiled code has the old shapes; left alone, `torch.compile` gives up after eight of them."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _outdate(tensors: list[Tensor], alarm: "_Alarm") -> None:
    """From here on, graphs that were built before are refused."""
    torch.autograd.graph.increment_version(tensors)
    alarm.live = True


class _Alarm:
    """Turns a backward pass that reaches a grown parameter through an old graph into an error that says so.

    The hooks sit on the old graphs' gradient accumulators and are gone with them; nothing is left on the parameter.
    """

    def __init__(self) -> None:
        self.live = False

    def silence(self) -> None:
        """Let old graphs be used: the growth was taken back."""
        self.live = False

    def watch(self, parameter: Tensor, name: str) -> None:
        """Be told when the accumulator that `parameter` has now is reached."""
        if parameter.requires_grad:
            torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(partial(self._raise, name))

    def _raise(self, name: str, _gradients: tuple[Tensor, ...]) -> None:
        if self.live:
            raise StaleGraphError(
                f"backward pass through a graph that was built before the model grew: {name} has another shape now; "
                "run the forward pass again, or call backward before growing"
            )


def _non_leaves(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors with a history among `values` and in the containers among them."""
    for value in values:
        if torch.is_tensor(value):
            yield from (value,) if not value.is_leaf else ()
        elif isinstance(value, Mapping):
            yield from _non_leaves(value.values())
        elif isinstance(value, list | tuple | set):
            yield from _non_leaves(value)
