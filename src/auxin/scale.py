"""How large neurons enter: from a proposal and an amplitude to a change of tensors, and the search between them.

Every trial runs on a throw-away copy; the model itself is not touched.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from auxin.collect import Fold, Measurement
from auxin.errors import NumericalError
from auxin.features import blank_change, norms_passing
from auxin.isolation import reseed
from auxin.layers import rule_for
from auxin.layers.base import has_bias, weight_of
from auxin.linalg import batch_norm_insertion
from auxin.methods.base import LARGEST, Proposal, SiteView
from auxin.statistics import Sums
from auxin.structure import Change, Reading, Slot, slot_tensor
from auxin.surgery import changed

SMALLEST = 4.0**-10
SEARCH_SAMPLES = 1000
"""Held-out samples that a line search runs: the paper's number, for all its experiments."""
ZERO_FAN_IN = 1e-3


@dataclass(frozen=True)
class Entry:
    """How a proposal enters: the change, its amplitudes, and falls of the held-out loss."""

    change: Change
    amplitude: float
    update_amplitude: float
    predicted: float | None
    measured: float
    lowers: bool
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Trial:
    """The stage on which amplitudes are tried: the changes so far, and the loss with them."""

    view: SiteView
    proposal: Proposal
    before: tuple[Change, ...]

    @property
    def fold(self) -> Fold:
        """The samples that the estimate has not seen, where any were held out."""
        return self.view.folds[-1]

    def loss(self, change: Change | None, passing: bool = True) -> float:
        """Held-out loss of a copy with the changes so far and this one; infinite where it is not finite."""
        measurement = self.view.measurement
        copy = changed(measurement.model, [*self.before, change] if change is not None else self.before)
        count = change.count if change is not None and passing else 0
        with norms_passing(copy, self.view.site, count):
            value = measurement.loss(copy, self.fold, SEARCH_SAMPLES)
        return value if math.isfinite(value) else math.inf

    def change(self, amplitude: float, update: float) -> Change:
        """The proposal at these amplitudes."""
        return change_at(self.view, self.proposal, amplitude, update)


def enter(view: SiteView, proposal: Proposal, before: Sequence[Change], amplitude: float | None) -> Entry:
    """The proposal at the amplitude given, or at the one that lowers the held-out loss most."""
    proposal, offset_note = shiftable(view, behind_norms(view, proposal))
    trial = Trial(view, proposal, tuple(before))
    base = trial.loss(None)
    notes = offset_note
    if amplitude is not None:
        gamma = update = float(amplitude)
    elif proposal.scaling == "fixed":
        gamma = update = 1.0
    elif proposal.scaling == "both":
        update = search(lambda g: trial.loss(trial.change(0.0, g)), base, True) if proposal.updates else 0.0
        floor = trial.loss(trial.change(0.0, update))
        gamma = search(lambda g: trial.loss(trial.change(g, update)), floor, True) if proposal.count else 0.0
    else:
        gamma = update = search(lambda g: trial.loss(trial.change(g, g)), base, proposal.signed, proposal.largest)
    change = with_norms(trial, trial.change(gamma, update))
    after = trial.loss(change, passing=False)
    if not math.isfinite(after):
        raise NumericalError(
            f"growing {view.site.name!r} at amplitude {gamma:g} makes the loss non-finite; nothing was changed. "
            "Pass amplitude=None to search one, or a smaller number"
        )
    lowers = amplitude is not None or proposal.scaling == "fixed" or bool(gamma or update)
    if not lowers and proposal.count:
        notes = (*notes, "no amplitude lowered the held-out loss: the neurons enter with zero fan-out")
    return Entry(change, gamma, update, predicted(proposal, gamma, update), base - after, lowers, notes)


def behind_norms(view: SiteView, proposal: Proposal) -> Proposal:
    """Behind a norm that brings the tiniest neuron to size 1 the amplitude is that of the fan-out alone.

    There is no linearisation at 0: fan-ins come to the usual norm, and the slope is that of their real features.
    """
    if not view.site.normalised or proposal.scaling not in ("sqrt", "both") or proposal.count == 0:
        return proposal
    weights = proposal.alpha[:, :-1] if view.constant else proposal.alpha
    norms = weights.norm(dim=1, keepdim=True)
    usual = view.producer_rule.usual_norm(view.producer)
    alpha = torch.where(norms > 0, proposal.alpha * (usual / norms), proposal.alpha)
    moments, rate = view.feature_moments(alpha), 0.0
    for name, omega in proposal.omega.items():
        cross = moments[name, "estimate"].raw_f[:, :-1].unflatten(1, (proposal.count, -1)).transpose(0, 1)
        rate += float((omega * cross).sum())
    signed = proposal.signed or rate + (proposal.rate_update or 0.0) <= 0
    return replace(proposal, alpha=alpha, scaling="fan_out", rate_neurons=rate, offset={}, signed=signed)


def predicted(proposal: Proposal, gamma: float, update: float) -> float | None:
    """The fall of the loss to first order at these amplitudes."""
    if proposal.rate_neurons is None:
        return None
    power = gamma * abs(gamma) if proposal.scaling == "both" else gamma
    return power * proposal.rate_neurons + update * (proposal.rate_update or 0.0)


def search(loss: Callable[[float], float], base: float, signed: bool, largest: float = LARGEST) -> float:
    """The amplitude with the least loss on a log-spaced ladder, refined twice; 0 where none is below `base`.

    The ladder starts at 1 and climbs by 4 while the loss falls, or descends until it is below `base`: convolutions
    want amplitudes of several hundred (r of `lemma:conv_quadratic_problem` makes their moves small).
    """
    signs = (1.0, -1.0) if signed else (1.0,)
    best = min((_ladder(loss, base, sign, largest) for sign in signs), key=lambda pair: pair[1])
    return best[0] if best[1] < base else 0.0


def _ladder(loss: Callable[[float], float], base: float, sign: float, largest: float) -> tuple[float, float]:
    step = min(1.0, largest)
    known = {step: loss(sign * step)}
    if known[step] < base:
        while 4 * step <= largest and known[step] < base and known[step] <= min(known.values()):
            step *= 4
            known[step] = loss(sign * step)
    else:
        while step > SMALLEST and known[step] >= base:
            step /= 4
            known[step] = loss(sign * step)
        known[step / 4] = loss(sign * step / 4)
    for factor in (2.0, 2.0**0.5):
        centre = min(known, key=known.__getitem__)
        for step in (centre / factor, centre * factor):
            if step <= largest and step not in known:
                known[step] = loss(sign * step)
    amplitude = min(known, key=known.__getitem__)
    return sign * amplitude, known[amplitude]


def shiftable(view: SiteView, proposal: Proposal) -> tuple[Proposal, tuple[str, ...]]:
    """A proposal whose activation is not 0 at 0 keeps its fan-out only where a bias can take up the shift."""
    if not any(offset is None or bool(offset.abs().max() > 0) for offset in proposal.offset.values()):
        return replace(proposal, offset={}), ()
    for reading in view.site.readings:
        module = view.measurement.model.get_submodule(reading.consumer)
        if reading.padded or not has_bias(module) or proposal.offset[reading.consumer] is None:
            why = "some of its pixels are padding" if has_bias(module) else "it has no bias"
            note = f"the activation is not 0 at 0 and {reading.consumer!r} cannot absorb that ({why}): zero fan-out"
            omega = {name: torch.zeros_like(part) for name, part in proposal.omega.items()}
            return replace(proposal, omega=omega, offset={}, rate_neurons=0.0), (note,)
    return proposal, ()


def change_at(view: SiteView, proposal: Proposal, gamma: float, update: float) -> Change:
    """Tensors of a proposal at amplitude `gamma` for the neurons and `update` for the old weights."""
    into, out = sides(proposal, gamma)
    change = blank_change(view.site, fan_ins(view, proposal.alpha * into, bool(out)))
    new, updates = dict(change.new), dict[str, Tensor]()
    for slot in view.site.slots:
        if slot.role != "fan_out":
            continue
        reading = view.site.readings[view.site.consumers.index(slot.module)]
        module = view.measurement.model.get_submodule(slot.module)
        rule = rule_for(module)
        new[slot] = rule.fan_out(module, reading, proposal.omega[slot.module] * out)
        delta = _delta(view, proposal, reading, out, update)
        if delta is not None:
            parts = rule.update(module, delta)
            updates.update({f"{slot.module}.{name}": part for name, part in parts.items()})
        if slot.module in proposal.intercepts and reading.norm is not None:
            updates[f"{reading.norm}.running_mean"] = -proposal.intercepts[slot.module] * update
    change = replace(change, new=new, updates=updates)
    return with_kept_norms(view, change) if proposal.rescale else change


def sides(proposal: Proposal, gamma: float) -> tuple[float, float]:
    """The factors of fan-in and fan-out at an amplitude."""
    if gamma == 0:
        return 1.0, 0.0
    if proposal.scaling == "fan_out":
        return 1.0, gamma
    root = abs(gamma) if proposal.scaling == "both" else math.sqrt(abs(gamma))
    return root, math.copysign(root, gamma)


def fan_ins(view: SiteView, alpha: Tensor, has_way_out: bool) -> Tensor:
    """Fan-ins as they are, but random ones of norm 1e-3 in the place of zeros where the fan-out is zero too."""
    dead = alpha.abs().amax(1) == 0 if alpha.shape[1] else torch.zeros(len(alpha), dtype=torch.bool)
    if has_way_out or not bool(dead.any()):
        return alpha
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(alpha.shape, generator=generator, dtype=torch.float64).to(alpha)
    draw *= ZERO_FAN_IN / draw.norm(dim=1, keepdim=True)
    return torch.where(dead[:, None], draw, alpha)


def _delta(view: SiteView, proposal: Proposal, reading: Reading, out: float, update: float) -> Tensor | None:
    """The change (M, F1) of a consumer's old weights: the update, less what sigma(0) of the new neurons brings."""
    name = reading.consumer
    delta = proposal.updates[name] * update if name in proposal.updates and update else None
    offset = proposal.offset.get(name)
    if offset is None or not out:
        return delta
    module = view.measurement.model.get_submodule(name)
    if delta is None:
        delta = torch.zeros_like(rule_for(module).weight_rows(module), dtype=torch.float64)
    delta = delta.clone()
    delta[:, -1] -= out * (proposal.omega[name] @ offset.to(delta)).sum(0)
    return delta


def with_kept_norms(view: SiteView, change: Change) -> Change:
    """Filters of consumers behind a batch norm brought back to their norms; the function stays.

    W s with running mean s and running variance s^2 (exactly: s^2 (variance + eps) - eps).
    """
    updates, factors = dict(change.updates), dict(change.factors)
    for reading in view.site.readings:
        if reading.norm is None:
            continue
        model, name = view.measurement.model, reading.consumer
        module, norm = model.get_submodule(name), model.get_submodule(reading.norm)
        scale = filter_scale(module, reading, change)
        if norm.running_mean is None or not bool((scale != 1).any()):
            continue
        variance, eps = norm.get_buffer("running_var").double(), float(norm.eps)  # type: ignore[arg-type]
        wanted = (variance + eps) * scale.square() - eps
        possible = (variance > 0) & (wanted > 0)  # else the norm cannot make up for the scale
        scale = torch.where(possible, scale, 1.0)
        factors[f"{name}.weight"] = scale.reshape(-1, *[1] * (weight_of(module).dim() - 1))
        if has_bias(module):
            factors[f"{name}.bias"] = scale
        factors[f"{reading.norm}.running_mean"] = scale
        factors[f"{reading.norm}.running_var"] = torch.where(possible, wanted / variance, 1.0)
    return replace(change, updates=updates, factors=factors)


def filter_scale(module: nn.Module, reading: Reading, change: Change) -> Tensor:
    """Old norm over new norm of each filter, (M,); 1 where either is zero."""
    weight = weight_of(module).detach().double()
    old = weight.flatten(1).square().sum(1)
    slot = next(s for s in change.site.slots if s.module == reading.consumer and s.role == "fan_out")
    kept = weight + change.updates.get(slot.name, torch.zeros_like(weight))
    new = kept.flatten(1).square().sum(1) + change.new[slot].flatten(1).square().sum(1)
    return torch.where((old > 0) & (new > 0), (old / new).sqrt(), torch.ones_like(old))


def with_norms(trial: Trial, change: Change) -> Change:
    """Batch norms on the way made the identity on the new channels, from their statistics at this amplitude."""
    site, measurement = trial.view.site, trial.view.measurement
    names = [carrier.module for carrier in site.carriers if carrier.kind == "batch_norm"]
    if not names or change.count == 0:
        return change
    seen = channel_sums(measurement, trial.before, change, names)
    new = dict(change.new)
    for slot in site.slots:
        if slot.module in names and slot.role == "carried":
            mean, variance = _mean_variance(seen[slot.module])
            value = _inserted(measurement.model.get_submodule(slot.module), slot, mean, variance)
            new[slot] = value.reshape(slot_shape(slot, measurement.model, len(mean)))
    return replace(change, new=new)


def channel_sums(
    measurement: Measurement, before: Sequence[Change], change: Change, names: list[str]
) -> dict[str, Sums]:
    """Sums over all kept batches of what enters each batch norm on its new channels."""
    copy = changed(measurement.model, [*before, change])
    seen = {name: Sums() for name in names}
    with norms_passing(copy, change.site, change.count, seen), torch.no_grad():
        for kept in measurement.kept:
            reseed(kept.seed)
            measurement.task.run(copy, kept.batch)
    return seen


def _mean_variance(sums: Sums) -> tuple[Tensor, Tensor]:
    mean = sums.mean("total")
    return mean, (sums.mean("square") - mean.square()).clamp(min=0)


def _inserted(norm: nn.Module, slot: Slot, mean: Tensor, variance: Tensor) -> Tensor:
    """A batch norm's entries for channels that it is to leave alone (design: batch norm's insertion)."""
    weight, bias = batch_norm_insertion(mean, variance, float(norm.eps))  # type: ignore[arg-type]
    return {"weight": weight, "bias": bias, "running_mean": mean, "running_var": variance}[slot.tensor]


def slot_shape(slot: Slot, model: nn.Module, count: int) -> list[int]:
    """The shape of new entries along a slot: (..., outer, k, inner, ...)."""
    shape = list(slot_tensor(model, slot).shape)
    axis = slot.axis % len(shape)
    shape[axis : axis + 1] = [slot.outer, count, slot.inner]
    return shape
