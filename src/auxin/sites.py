"""Where a model can grow: analysis of a copy of an untouched model, and a proof for every site that is offered."""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from auxin.errors import InputError, ModelChangedError
from auxin.isolation import same_random_state
from auxin.layers.operations_base import tensors_in
from auxin.proving import Proof, brief, light_copy
from auxin.structure import Count, Refusal, Site, Sites, Slot, slot_tensor
from auxin.surgery import plain, scratch
from auxin.tracing import Group, Layers, Trace, trace

FEW = 7
"""The analysis runs on this many samples of the example, where the model takes so few."""

SEVERAL = 3
"""A single sample is repeated so often, so that the axis of the samples can be told from others."""

_MODES = {False: "evaluation", True: "training"}


def find_sites(model: nn.Module, example: Any) -> Sites:
    """Every hidden width of `model` that can grow, and why the others cannot.

    `example` is one batch's input: a tensor, a tuple for `model(*example)` or a dict for `model(**example)`. The
    model is analysed on copies and stays as it is. A site is offered only after widening a copy by neurons that
    nothing reads has kept the output.
    """
    model = plain(model)
    _check(model, example)
    with _quietly(model):
        example, traces = _traces(model, example)
        groups = _merged(traces, model.training)
        candidates = [_site(model, g, traces, _samples(example)) for g in groups.values() if g.refusal is None]
        proof = Proof.of(model, partial(_run, example))
        offered, unproved = proof.settle(candidates)
    refused = {name: group.refusal for name, group in groups.items() if group.refusal}
    reasons = refused | unproved | _unseen(model, groups)
    order = dict.fromkeys(name for name in (*groups, *reasons) if name in reasons)
    return Sites(tuple(offered), tuple(Refusal(name, reasons[name]) for name in order))


def prove(sites: Sites, example: Any) -> None:
    """Raise `ModelChangedError` unless widening a copy at sites found before still keeps the output."""
    if not sites:
        return
    model = sites[0].model
    with _quietly(model):
        proof = Proof.of(model, partial(_run, _few(example)[0]))
        reason = proof.failure(list(sites)) if proof.base else None
    if reason is not None:
        raise ModelChangedError(f"the sites no longer hold ({reason}); the model was changed: call find_sites again")


def verify(site: Site) -> None:
    """Raise `ModelChangedError` unless the model's modules, tensors and attributes still fit `site`."""
    kinds = _kinds(site.model)
    other = [name for name in {**site.kinds, **kinds} if site.kinds.get(name) is not kinds.get(name)]
    if site.kinds and other:
        raise _changed(site, f"{', '.join(other)} came, went or is of another class")
    try:
        wrong = [slot.name for slot in site.slots if not _slot_fits(site, slot)]
        wrong += [f"{c.module}.{c.attribute}" for c in site.counts if not _count_fits(site, c)]
    except (AttributeError, TypeError, IndexError) as error:
        raise _changed(site, brief(error)) from error
    if wrong:
        raise _changed(site, f"{', '.join(wrong)} do not fit a width of {site.width}")


def call(model: nn.Module, example: Any) -> Any:
    """`model` on one batch's input: a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, (tuple, list)) else model(example)


def _changed(site: Site, what: str) -> ModelChangedError:
    return ModelChangedError(
        f"the model has changed since site {site.name!r} was found: {what}; call find_sites(model, example) again"
    )


def _kinds(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def _slot_fits(site: Site, slot: Slot) -> bool:
    tensor, module = slot_tensor(site.model, slot), site.model.get_submodule(slot.module)
    registered = slot.tensor in {**module._parameters, **module._buffers}
    return registered and tensor.shape[slot.axis] == site.width * slot.outer * slot.inner


def _count_fits(site: Site, count: Count) -> bool:
    number = getattr(site.model.get_submodule(count.module), count.attribute)
    return bool(number * count.per == site.width * count.times)


def _check(model: nn.Module, example: Any) -> None:
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise InputError("the model has lazy layers without shapes yet; run it once on a batch, then find its sites")
    if not any(tensor.dim() for tensor in tensors_in(example)):
        raise InputError(
            f"found no batch in `example`, a {type(example).__name__}; pass one batch's input: a tensor, a tuple for "
            "model(*example) or a dict for model(**example)"
        )


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """Random states are put back, warnings are silenced and compiled submodules run as they were written."""
    with ExitStack() as stack:
        stack.enter_context(same_random_state(model))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.inference_mode(False))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        warnings.simplefilter("ignore")
        yield


def _in_type(example: Any, dtype: torch.dtype | None) -> Any:
    """A copy of the example, floating-point tensors in `dtype`."""
    plain_example = dict(example) if isinstance(example, Mapping) else example
    return tree_map_only(Tensor, lambda t: _cloned(t, dtype), plain_example)


def _cloned(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().clone().to(wanted)


def _samples(example: Any) -> int:
    return next(tensor.shape[0] for tensor in tensors_in(example) if tensor.dim())


def _run(example: Any, model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    return call(model, _in_type(example, dtype))


def _few(example: Any) -> list[Any]:
    """A few samples of the example, if all its tensors have as many; then the example itself."""
    sizes = {tensor.shape[0] for tensor in tensors_in(example) if tensor.dim()}
    if len(sizes) != 1 or 1 < max(sizes) <= FEW:
        return [example]
    return [tree_map_only(Tensor, _resized, _in_type(example, None)), example]


def _resized(tensor: Tensor) -> Tensor:
    if not tensor.dim():
        return tensor
    return torch.cat([tensor] * SEVERAL) if tensor.shape[0] == 1 else tensor[:FEW]


def _traces(model: nn.Module, example: Any) -> tuple[Any, dict[bool, Trace]]:
    """The example that was used, and a trace in each mode (training or not) in which the model runs."""
    base = scratch(model)
    errors: list[Exception] = []
    for tried in _few(example):
        traces = {}
        for mode in (model.training, not model.training):
            copy = light_copy(base).train(mode) if mode != base.training else light_copy(base)
            try:
                traces[mode] = trace(copy, partial(_run, tried), _samples(tried))
            except Exception as error:
                errors.append(error)
        if traces:
            return tried, traces
    raise InputError(
        f"the model cannot be run on `example` ({brief(errors[-2])}); pass one batch's input: a tensor, a tuple for "
        "model(*example) or a dict for model(**example), on the model's device"
    ) from errors[-2]


def _merged(traces: dict[bool, Trace], training: bool) -> dict[str, Group]:
    """The groups of the mode that the model is in; what differs between the modes is refused."""
    mode = training if training in traces else not training
    groups = traces[mode].groups
    others = traces[not mode].groups if (not mode) in traces else {}
    for name, other in others.items():
        if name not in groups:
            groups[name] = other
            other.refuse(f"it exists in {_MODES[not mode]} mode only, and the model is in {_MODES[mode]} mode")
        elif other.refusal:
            groups[name].refuse(f"in {_MODES[not mode]} mode {other.refusal}")
        elif _structure(groups[name]) != _structure(other):
            groups[name].refuse("it has other readers or another path in training mode than in evaluation mode")
    return groups


def _structure(group: Group) -> tuple[list[Any], list[Any]]:
    return [(reading, reading.push) for reading in group.readings], list(group.carried)


def _unseen(model: nn.Module, groups: Mapping[str, Group]) -> dict[str, str]:
    """Layers that no trace can offer: of a kind that is not supported, or never called."""
    layers = Layers(model)
    supported = [layers.names[module] for module in model.modules() if module in layers.supported]
    idle = {name: "its forward is not called" for name in supported if name not in groups}
    return layers.refused | idle


def _site(model: nn.Module, group: Group, traces: Mapping[bool, Trace], samples: int) -> Site:
    """The site of a group that nothing has refused."""
    rows = {name: count for t in reversed(list(traces.values())) for name, count in t.rows.items()}
    layers = (group.name, *(reading.consumer for reading in group.readings))
    return Site(
        name=group.name,
        producers=(group.name,),
        readings=tuple(group.readings),
        carriers=tuple(carried.carrier for carried in group.carried),
        slots=tuple(_slots(model, group)),
        counts=tuple(_counts(model, group)),
        uses={name: max(1, rows[name] // samples) for name in layers},
        model=model,
        kinds=_kinds(model),
    )


def _slots(model: nn.Module, group: Group) -> Iterator[Slot]:
    yield Slot(group.name, "weight", 0, "fan_in")
    if model.get_submodule(group.name)._parameters.get("bias") is not None:
        yield Slot(group.name, "bias", 0, "fan_in")
    for carried in group.carried:
        yield from carried.slots
    for reading in group.readings:
        yield Slot(reading.consumer, "weight", 1, "fan_out", reading.outer, reading.inner)


def _counts(model: nn.Module, group: Group) -> Iterator[Count]:
    yield _count(model, group.name, "out", 1)
    for carried in group.carried:
        yield from carried.counts
    for reading in group.readings:
        yield _count(model, reading.consumer, "in", reading.outer * reading.inner)


def _count(model: nn.Module, name: str, side: str, times: int) -> Count:
    kind = "features" if hasattr(model.get_submodule(name), "in_features") else "channels"
    return Count(name, f"{side}_{kind}", times)
