"""What neurons do on real data: a throw-away copy of the model carries them, with no way out, to their readers.

Nothing is linearised here. Activations, pooling and norms act as they are, except that a batch norm which will be
made the identity on new channels lets them through unchanged (`norms_passing`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from auxin.collect import Fold, Measurement, Part
from auxin.isolation import reseed
from auxin.layers import rule_for
from auxin.layers.base import CHUNK, Rule
from auxin.moments import block, desired
from auxin.statistics import Sums, cross_sum, gram_sum
from auxin.structure import Change, Reading, Site, Slot, slot_tensor
from auxin.surgery import changed


class _Stop(BaseException):
    """Ends a forward pass after the last reader; no handler of the model's own catches it."""


def blank_change(site: Site, alpha: Tensor) -> Change:
    """New neurons with fan-ins `alpha` (k, F0) and no way out; norms on the way start as the identity."""
    producer = site.model.get_submodule(site.producers[0])
    fan_in = rule_for(producer).fan_in(producer, alpha)
    new: dict[Slot, Tensor] = {}
    for slot in site.slots:
        if slot.role == "fan_in":
            new[slot] = fan_in[slot.tensor]
        else:
            new[slot] = _neutral(site, slot, len(alpha))
    return Change(site, len(alpha), new)


def _neutral(site: Site, slot: Slot, count: int) -> Tensor:
    """Zeros for a fan-out; what leaves a carrier's new channels as much alone as it can be."""
    tensor = slot_tensor(site.model, slot).detach()
    shape = list(tensor.shape)
    axis = slot.axis % tensor.dim()
    shape[axis : axis + 1] = [slot.outer, count, slot.inner]
    if slot.role == "fan_out" or slot.tensor in ("bias", "running_mean"):
        return tensor.new_zeros(shape)
    module = site.model.get_submodule(slot.module)
    if slot.tensor == "weight" and any(c.module == slot.module and c.kind == "elementwise" for c in site.carriers):
        return tensor.mean().expand(shape) if tensor.numel() else tensor.new_full(shape, 0.25)
    if slot.tensor == "weight" and getattr(module, "running_var", None) is not None:
        return tensor.new_full(shape, (1.0 + float(getattr(module, "eps", 0.0))) ** 0.5)
    return tensor.new_ones(shape)


@contextmanager
def norms_passing(model: nn.Module, site: Site, count: int, seen: dict[str, Sums] | None = None) -> Iterator[None]:
    """Batch norms on the way let the last `count` channels through; what came in is summed up in `seen`."""
    handles = []

    def hook_for(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            entering = args[0][:, -count:]
            if seen is not None:
                rows = entering.movedim(1, -1).flatten(0, -2).double()
                seen[name].update(samples=len(rows), total=rows.sum(0), square=rows.square().sum(0))
            return torch.cat([output[:, :-count], entering.to(output)], dim=1)

        return hook

    try:
        for carrier in site.carriers:
            if carrier.kind == "batch_norm" and count:
                handles.append(model.get_submodule(carrier.module).register_forward_hook(hook_for(carrier.module)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def reader_inputs(measurement: Measurement, site: Site, alpha: Tensor) -> Iterator[dict[str, Tensor]]:
    """For every kept batch, what each consumer reads of neurons with fan-ins `alpha`, in its input's layout.

    Neurons of fan-in 0 behind them make the last group whole.
    """
    spare = alpha.new_zeros(-len(alpha) % site.group, alpha.shape[1])
    copy = changed(measurement.model, [blank_change(site, torch.cat([alpha, spare]))])
    names = list(site.consumers)
    for kept in measurement.kept:
        found: dict[str, Tensor] = {}
        with _captured(copy, site, len(alpha), len(spare), found), torch.no_grad():
            reseed(kept.seed)
            with suppress(_Stop):
                measurement.task.run(copy, kept.batch)
        yield {name: found[name] for name in names}


@contextmanager
def _captured(copy: nn.Module, site: Site, count: int, spare: int, found: dict[str, Tensor]) -> Iterator[None]:
    """Keep what `count` new neurons bring to the readers; `spare` ones stand behind them."""
    handles = []

    def hook_for(reading: Reading) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = args[0] if args else kwargs["input"]
            axis = reading_axis(module, inputs)
            split = inputs.unflatten(axis, (reading.outer, -1, reading.inner))
            start = split.shape[axis + 1] - count - spare
            found[reading.consumer] = split.narrow(axis + 1, start, count).flatten(axis, axis + 2)
            if len(found) == len(site.readings):
                raise _Stop

        return hook

    try:
        for reading in site.readings:
            module = copy.get_submodule(reading.consumer)
            handles.append(module.register_forward_pre_hook(hook_for(reading), with_kwargs=True))
        with norms_passing(copy, site, count + spare):
            yield
    finally:
        for handle in handles:
            handle.remove()


def reading_axis(module: nn.Module, inputs: Tensor) -> int:
    """The feature axis of a layer's input: the last of a linear layer, the second of a convolution."""
    return inputs.dim() - 1 if isinstance(module, nn.Linear) else 1


@dataclass(frozen=True)
class FeatureMoments:
    """Means over a fold for one consumer, with a last feature 1 and phi in order (k, o).

    Of phi phi^T, of v phi^T with v less the moves of the old weights, and of v phi^T with the raw v.
    """

    f_f: Tensor
    v_f: Tensor
    raw_f: Tensor


def feature_moments(
    measurement: Measurement, site: Site, alpha: Tensor, updates: dict[str, Tensor] | None, folds: Sequence[Fold]
) -> dict[tuple[str, Fold], FeatureMoments]:
    """Moments of the real features of neurons with fan-ins `alpha`, for the refit of their fan-out."""
    found = {(name, fold): Sums() for name in site.consumers for fold in folds}
    for fold, part, inputs in _joined(measurement, site, alpha, folds):
        for reading in site.readings:
            for term in _feature_terms(measurement.model, reading, updates or {}, part, inputs[reading.consumer]):
                found[reading.consumer, fold].update(**term)
            found[reading.consumer, fold].update(samples=part.samples)
    return {key: FeatureMoments(sums.mean("f_f"), sums.mean("v_f"), sums.mean("raw_f")) for key, sums in found.items()}


def _joined(
    measurement: Measurement, site: Site, alpha: Tensor, folds: Sequence[Fold]
) -> Iterator[tuple[Fold, Part, dict[str, Tensor]]]:
    passes = zip(measurement.passes(), reader_inputs(measurement, site, alpha), strict=True)
    for (kept, found), inputs in passes:
        for fold in folds:
            if kept.count(fold):
                yield fold, Part(kept, found, kept.rows[fold]), inputs


def _feature_terms(
    model: nn.Module, reading: Reading, updates: dict[str, Tensor], part: Part, inputs: Tensor
) -> Iterator[dict[str, Tensor]]:
    name, module = reading.consumer, model.get_submodule(reading.consumer)
    rule = rule_for(module)
    raw, left = part.v(name), desired(model, name, updates.get(name), part)
    inputs = part.cut(inputs)
    step = chunk_samples(rule, module, reading, inputs, part.samples)
    for start in range(0, part.samples, step):
        phi = rule.neuron_rows(module, reading, block(inputs, start, step, part.samples)).flatten(1)
        phi = torch.cat([phi, phi.new_ones(len(phi), 1)], dim=1)
        crosses = [cross_sum(phi, rule.output_rows(block(v, start, step, part.samples))).T for v in (left, raw)]
        yield {"f_f": gram_sum(phi), "v_f": crosses[0], "raw_f": crosses[1]}


def chunk_samples(rule: Rule, module: nn.Module, reading: Reading, inputs: Tensor, samples: int) -> int:
    """How many samples' features fit in one temporary."""
    entries = inputs.numel() // max(1, samples) * rule.offsets(module, reading)
    return max(1, CHUNK // max(1, entries))


@dataclass(frozen=True)
class Slopes:
    """One-sided derivatives at zero fan-in, a consumer: E[v phi'(0; +-alpha b0)^T] as (k, M, O).

    `offset`: what the readers see of a neuron of zero fan-in, (O,), or None where that differs between rows.
    """

    plus: dict[str, Tensor]
    minus: dict[str, Tensor]
    offset: dict[str, Tensor | None]


def one_sided_slopes(
    measurement: Measurement, site: Site, alpha: Tensor, updates: dict[str, Tensor] | None = None
) -> Slopes:
    """Directional derivatives of the features, by Richardson's extrapolation of two small steps on each side.

    For positively homogeneous activations (ReLU, max pooling) any step is exact. The error is of second order in
    the step: 1e-8 for float64 models, 1e-4 for float32, relative to the curvature. On the estimate
    fold; v less the moves `updates` of the old weights.
    """
    step = probe_step(measurement, site, alpha)
    scales = torch.tensor([1.0, 0.5, -1.0, -0.5], device=alpha.device, dtype=alpha.dtype)
    probes = (alpha[None] * step[None, :, None] * scales[:, None, None]).flatten(0, 1)
    probes = torch.cat([probes, torch.zeros_like(alpha[:1])])
    sums, offset = _probe_sums(measurement, site, probes, updates or {})
    plus, minus = {}, {}
    for name, mean in sums.items():
        values = mean[:-1].unflatten(0, (4, len(alpha))) - mean[-1]
        rates = values / step[None, :, None, None] / scales.abs()[:, None, None, None]
        plus[name], minus[name] = 2 * rates[1] - rates[0], 2 * rates[3] - rates[2]
    return Slopes(plus, minus, offset)


def probe_step(measurement: Measurement, site: Site, alpha: Tensor) -> Tensor:
    """A step for each neuron at which its largest pre-activation is small but far above rounding, (k,)."""
    producer = measurement.model.get_submodule(site.producers[0])
    rule, largest = rule_for(producer), torch.full_like(alpha[:, 0], 1e-30)
    dtype = torch.float32
    for _, found in measurement.passes():
        inputs = found.inputs[site.producers[0]]
        dtype = inputs.dtype
        activity = rule.response(producer, alpha.to(torch.promote_types(dtype, torch.float32)), inputs)
        largest = torch.maximum(largest, rule.output_rows(activity).abs().amax(0).to(largest))
    size = {torch.float64: 1e-4, torch.float32: 1e-2}.get(dtype, 0.25)
    # behind dead layers pre-activations are 0 or next to it: any step is as good, but for one that overflows
    return torch.where(largest > 1e-12 * alpha.norm(dim=1), size / largest, torch.ones_like(largest))


def _probe_sums(
    measurement: Measurement, site: Site, probes: Tensor, updates: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    found = {name: Sums() for name in site.consumers}
    offset: dict[str, Tensor | None] = {}
    alone = probes.repeat_interleave(site.group, dim=0)  # a probe fills a group: others would be normalised with it
    for _, part, inputs in _joined(measurement, site, alone, ["estimate"]):
        for reading in site.readings:
            name, module = reading.consumer, measurement.model.get_submodule(reading.consumer)
            rule, cut = rule_for(module), part.cut(inputs[reading.consumer])
            v = desired(measurement.model, name, updates.get(name), part)
            step = chunk_samples(rule, module, reading, cut, part.samples)
            for start in range(0, part.samples, step):
                phi = rule.neuron_rows(module, reading, block(cut, start, step, part.samples))[:, :: site.group]
                rows = rule.output_rows(block(v, start, step, part.samples))
                cross = phi.double().flatten(1).T @ rows.double()
                found[name].update(f_v=cross.unflatten(0, phi.shape[1:]).transpose(1, 2))
                offset[name] = _common(phi[:, -1], offset.get(name, phi[0, -1]))
            found[name].update(samples=part.samples)
    return {name: sums.mean("f_v") for name, sums in found.items()}, offset


def _common(rows: Tensor, known: Tensor | None) -> Tensor | None:
    if known is None or not torch.allclose(rows, known.expand_as(rows), atol=1e-12):
        return None
    return known
