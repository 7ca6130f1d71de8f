"""From passes over the kept batches to the moments of Prop. 3.1 and Prop. 3.2, a fold at a time."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from auxin.collect import Fold, Measurement, Part
from auxin.layers import rule_for
from auxin.layers.base import CHUNK, computing, has_bias
from auxin.statistics import Sums, gram_and_cross
from auxin.structure import Site


def consumer_sums(measurement: Measurement, folds: Sequence[Fold]) -> dict[tuple[str, Fold], Sums]:
    """Sums behind Prop. 3.1 for every consumer: |v|^2, v b1^T, b1 b1^T."""
    names = [name for site in measurement.sites for name in site.consumers]
    found = {(name, fold): Sums() for name in names for fold in folds}
    for fold, part in measurement.parts(folds):
        for name in names:
            found[name, fold].update(samples=part.samples, **_consumer_part(measurement.model, name, part))
    return found


def _consumer_part(model: nn.Module, name: str, part: Part) -> dict[str, Tensor]:
    module = model.get_submodule(name)
    rule = rule_for(module)
    rows, v = rule.rows(module, part.inputs(name)), rule.output_rows(part.v(name))
    gram, cross = gram_and_cross(rows, v)
    return {"v_square": torch.linalg.vector_norm(v, dtype=torch.float64).square(), "v_b1": cross.T, "b1_b1": gram}


def output_variance(measurement: Measurement, consumer: str) -> float:
    """Var(a): over samples and positions, a channel, averaged over channels."""
    count, total, square = torch.stack([found.spread[consumer] for _, found in measurement.passes()]).sum(0)
    return float((square / count - (total / count).square()).clamp(min=0).mean()) if len(count) else 0.0


def site_means(
    measurement: Measurement, updates: dict[str, Tensor] | None, folds: Sequence[Fold]
) -> dict[tuple[str, Fold], dict[str, Tensor]]:
    """Means behind Prop. 3.2 for every site: b0 b0^T and b0 v^T a consumer.

    v is taken less the move of the consumer's weight in `updates` (M, F1), or raw where that is None.
    """
    found = {(site.name, fold): Sums() for site in measurement.sites for fold in folds}
    for fold, part in measurement.parts(folds):
        for site in measurement.sites:
            sums = found[site.name, fold]
            for name, s, n in _site_part(measurement.model, site, updates or {}, part):
                sums.take(**{f"b0_b0:{name}": s, f"b0_v:{name}": n})
            sums.update(samples=part.samples)
    return {key: sums.give_means() for key, sums in found.items()}


def _site_part(
    model: nn.Module, site: Site, updates: dict[str, Tensor], part: Part
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(consumer, S, N) of every chunk of samples: no temporary is larger than a chunk of virtual channels."""
    producer = model.get_submodule(site.producers[0])
    source, rule = part.inputs(site.producers[0]), rule_for(producer)
    left = {name: desired(model, name, updates.get(name), part) for name in site.consumers}
    constant = constant_added_later(model, site)
    probe = rule.virtual(producer, block(source, 0, 1, part.samples))
    step = max(1, CHUNK // max(1, probe.numel()))
    for start in range(0, part.samples, step):
        inputs = block(source, start, step, part.samples)
        virtual = computing(inputs) if constant else rule.virtual(producer, inputs)
        for reading in site.readings:
            name, module = reading.consumer, model.get_submodule(reading.consumer)
            pushed, v = reading.push(virtual), block(left[name], start, step, part.samples)
            yield name, *rule_for(module).read(module, reading, pushed, v, constant)


def constant_added_later(model: nn.Module, site: Site) -> bool:
    """Whether b0's constant 1 need not be copied beside the inputs: rows go from layer to layer as they are."""
    producer = model.get_submodule(site.producers[0])
    if not (has_bias(producer) and rule_for(producer).adds_constant):
        return False
    straight = (
        reading.outer * reading.inner == 1 and not getattr(reading.push, "steps", True) for reading in site.readings
    )
    return all(straight) and all(rule_for(model.get_submodule(name)).adds_constant for name in site.consumers)


def desired(model: nn.Module, consumer: str, update: Tensor | None, part: Part) -> Tensor:
    """v at a consumer's output, less the move that `update` (M, F1) of its weight makes there."""
    v = part.v(consumer)
    if update is None:
        return v
    module = model.get_submodule(consumer)
    return v - rule_for(module).response(module, update.to(v.dtype), part.inputs(consumer))


def block(tensor: Tensor, start: int, step: int, samples: int) -> Tensor:
    """Samples `start` to `start + step` of a tensor whose first axis is samples, or samples times something."""
    rows = tensor.shape[0] // samples
    return tensor[start * rows : (start + step) * rows]
