"""The orchestrator: measure all sites together, propose, scale on copies, apply once, record."""

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from auxin.collect import Fold, Measurement, Stream, one_fold, split_folds, with_held_out
from auxin.costs import parameters
from auxin.errors import InputError, check_number
from auxin.history import Growth, Record
from auxin.isolation import isolated
from auxin.layers.base import has_bias, weight_of
from auxin.limits import affordable
from auxin.linalg import best_update, bottleneck, new_neurons
from auxin.methods import Method, SiteView, resolve
from auxin.methods.base import Proposal
from auxin.moments import consumer_sums, output_variance, site_means
from auxin.objectives import Task, as_task
from auxin.optimizers import check as check_optimizers
from auxin.scale import Entry, enter
from auxin.select import Budget, Candidates, asked_numbers, chosen_sites
from auxin.sites import find_sites, prove, verify
from auxin.statistics import Sums, clamped_samples, estimation_samples
from auxin.structure import Change, Site, Sites
from auxin.surgery import apply, changed, plain

ROWS_PER_FEATURE = 10.0


def grow(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Any,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    neurons: Any = "auto",
    sites: Sites | Sequence[str] | None = None,
    method: str | Method = "sprout",
    amplitude: float | None = None,
    samples: int | None = None,
    held_out: Iterable[Any] | None = None,
) -> Growth:
    """Add neurons to a model in place; the model, its parameters and the optimizer stay the same objects.

    Args:
        model: any `nn.Module`; it is measured in the mode that it is in.
        batches: an iterable of `(input, target)`, iterated once and only as far as the sample rule asks.
        loss: `loss(output, target)`, mean-reduced, or an `auxin.Objective`.
        optimizer: the optimizer (or several) whose state is to follow; None if none has been made yet.
        neurons: a number for every site, `{site name: number}`, `auxin.Budget(...)`, or "auto": the directions that
            also gain on held-out samples.
        sites: what `find_sites` gave, names, or None for every site.
        method: a name or an instance: "sprout" (the default), "tiny", "gradmax", "random".
        amplitude: None searches on held-out samples; a number fixes it; 0.0 leaves the output as it is.
        samples: how many samples to draw, in the place of the sample rule.
        held_out: batches for everything that is chosen (amplitudes, dampings, numbers), all of them; best such that
            the model was not trained on. None holds out half of the rows of `batches`.

    Returns:
        A record for every site: what was asked and added, predicted and measured.

    Raises:
        AuxinError: for anything that cannot be done; model and optimizer are then as they were.
    """
    check_amplitude(amplitude)
    if samples is not None:
        check_number("samples", samples, 1, whole=True)
    request = Request(resolve(method), neurons, sites, amplitude, samples, held_out, neurons != "auto")
    target, optimizers = plain(model), as_list(optimizer)
    growth, changes = planned_growth(target, batches, as_task(loss), request, optimizers)
    for record in growth:
        if record.added < record.asked:  # said before anything is changed: a warning may be turned into an error
            warnings.warn(f"{record.site}: {'; '.join(record.notes)}", stacklevel=2)
    apply(target, changes, optimizers)
    return growth


def planned_growth(
    target: nn.Module, batches: Iterable[Any], task: Task, request: "Request", optimizers: list[Optimizer]
) -> tuple[Growth, list[Change]]:
    """One growth, measured and tried on copies: its record, and the changes that are left to apply at once."""
    started = time.perf_counter()
    with isolated(target):
        stage = prepare(target, batches, task, request, optimizers)
        entries = propose_all(stage)
        changes = [entry.change for _, _, entry in entries]
        records = [make_record(stage, index, entries) for index in range(len(entries))]
        before, after = outer_losses(stage, changes)
    counts = [stage.measurement.count(fold) for fold in stage.folds]
    growth = Growth(
        tuple(records), request.method.name, time.perf_counter() - started,
        samples=counts[0], samples_held_out=sum(counts[1:]), loss_before=before, loss_after=after, notes=stage.notes,
    )  # fmt: skip
    return growth, changes


@dataclass(frozen=True)
class Request:
    """What the caller of `grow` asked for."""

    method: Method
    neurons: Any
    sites: Sites | Sequence[str] | None
    amplitude: float | None
    samples: int | None
    held_out: Iterable[Any] | None
    insists: bool = True
    """Whether neurons enter even where no amplitude lowers the held-out loss, then with zero fan-out."""

    @property
    def chooses(self) -> bool:
        """Whether something must be chosen on samples that the estimate has not seen."""
        searched = self.amplitude is None and self.method.searches
        return searched or self.method.chooses or self.neurons == "auto"


@dataclass(frozen=True)
class Stage:
    """Everything measured, before anything is proposed."""

    request: Request
    measurement: Measurement
    sites: Sites
    numbers: dict[str, Any]
    views: dict[str, SiteView]
    folds: tuple[Fold, ...]
    notes: tuple[str, ...]


def prepare(
    model: nn.Module, batches: Iterable[Any], task: Task, request: Request, optimizers: list[Optimizer]
) -> Stage:
    """Draw batches, find sites, measure them together."""
    seed = fresh_seed(model)
    stream = Stream(batches, task, model, seed)
    kept = [stream.first()]
    sites = resolve_sites(model, task.inputs(kept[0].batch), request.sites, proven=True)
    numbers = asked_numbers(sites, request.neurons)
    sites = Sites(tuple(site for site in sites if site.name in numbers), sites.refused)
    check_zero(request, numbers)
    sites = trainable(model, sites, request.sites is not None or isinstance(request.neurons, dict))
    numbers = {site.name: numbers[site.name] for site in sites}
    check_optimizers(model, list(sites), optimizers)
    halved = request.chooses and request.held_out is None
    stream.more(kept, request.samples or samples_wanted(model, sites) * (2 if halved else 1))
    measurement = Measurement(model, task, sites, kept)
    generator = torch.Generator().manual_seed(seed)
    notes: tuple[str, ...] = ()
    if request.chooses and request.held_out is not None:
        with_held_out(measurement, request.held_out)
    elif request.chooses:
        note = split_folds(measurement, generator)
        notes = (note,) if note else ()
    else:
        one_fold(kept)
    folds: tuple[Fold, ...] = ("estimate", "held_out") if request.chooses else ("estimate",)
    views = measure(measurement, request.method, generator, folds)
    if isinstance(request.neurons, Budget):
        numbers = dict(affordable(measurement, [candidates(view) for view in views.values()], request.neurons))
    return Stage(request, measurement, sites, numbers, views, folds, (*notes, *few_rows(measurement, sites)))


def fresh_seed(model: nn.Module) -> int:
    """A seed from torch's random state and the model's size.

    The random state is put back after a growth: from it alone, the next growth would draw the same neurons again.
    """
    return (int(torch.randint(2**31, ())) + 1_000_003 * parameters(model)) % 2**31


def resolve_sites(model: nn.Module, example: Any, wanted: Sites | Sequence[str] | None, proven: bool = False) -> Sites:
    """Sites found before, checked against the model as it is (and proven anew where asked); else found now."""
    if isinstance(wanted, Sites):
        for site in wanted:
            if site.model is not model:
                raise InputError(f"site {site.name!r} belongs to another model; call find_sites on this one")
            verify(site)
        if proven:
            prove(wanted, example)
        return chosen_sites(wanted, None)
    return chosen_sites(find_sites(model, example), wanted)


def samples_wanted(model: nn.Module, sites: Sites) -> int:
    """The paper's rule (sec:BatchsizeForEstimation) for the widest regression of any site, clamped from below.

    Its factor 2^k speaks of pixels in images, and so of convolutions alone: at P = 1 it is 2^32.
    """
    wanted = []
    for site in sites:
        for name in (*site.producers, *site.consumers):
            module = model.get_submodule(name)
            weight, positions = weight_of(module), max(1, site.uses[name])
            features = max(1, weight.shape[1:].numel() + has_bias(module))
            rule = estimation_samples if weight.dim() > 2 else partial(estimation_samples, image_positions=0)
            wanted.append(clamped_samples(features, positions, multiple=ROWS_PER_FEATURE, rule=rule))
    return max(wanted)


def few_rows(measurement: Measurement, sites: Sites) -> tuple[str, ...]:
    """Notes on estimates with fewer rows than features: their bottleneck is 0 and means nothing."""
    samples, notes = measurement.count("estimate"), []
    for site in sites:
        for name in (*site.producers, *site.consumers):
            module = measurement.model.get_submodule(name)
            features = weight_of(module).shape[1:].numel() + has_bias(module)
            rows = samples * site.uses[name]
            if rows < features:
                needed = -(-features // max(1, site.uses[name]))
                notes.append(
                    f"{name}: {rows} rows for {features} features; give at least {needed} samples to the estimate"
                )
    return tuple(dict.fromkeys(notes))


def measure(
    measurement: Measurement, method: Method, generator: torch.Generator, folds: Sequence[Fold]
) -> dict[str, SiteView]:
    """The moments that a method needs, of all sites in the same passes."""
    consumers: dict[tuple[str, Fold], Sums] = {}
    producers: dict[tuple[str, Fold], dict[str, Tensor]] = {}
    updates: dict[str, Tensor] = {}
    if method.statistics != "none":
        consumers = consumer_sums(measurement, folds)
        names = [name for site in measurement.sites for name in site.consumers]
        updates = {
            name: prop1(measurement.model, name, consumers[name, "estimate"], method.update_damping) for name in names
        }
        producers = site_means(measurement, updates if method.statistics == "projected" else None, folds)
    return {
        site.name: SiteView(
            site, measurement, generator, {name: updates[name] for name in site.consumers if name in updates},
            consumers, producers, rounding(measurement.model) if consumers else None,
        )
        for site in measurement.sites
    }  # fmt: skip


def prop1(model: nn.Module, name: str, sums: Sums, damping: float) -> Tensor:
    """Prop. 3.1 for one consumer, (M, F1)."""
    constant = has_bias(model.get_submodule(name))
    precision = rounding(model)
    return best_update(sums.mean("v_b1"), sums.mean("b1_b1"), damping, constant, precision=precision)


def rounding(model: nn.Module) -> float | None:
    """The relative error of products in the model's type, where it is above that of float64."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return None if dtypes <= {torch.float64} else 1e-7


def candidates(view: SiteView) -> Candidates:
    """What a site has to offer to a budget."""
    if not view.site_means:
        raise InputError("a Budget ranks singular values, and this method has none; pass numbers, or another method")
    values = new_neurons(view.s(), view.n(), None, 0.0, view.constant, precision=view.precision).singular_values
    variances = [output_variance(view.measurement, name) for name in view.site.consumers]
    return Candidates(view.site, values.tolist(), sum(variances) / len(variances))


def propose_all(stage: Stage) -> list[tuple[SiteView, Proposal, Entry]]:
    """Proposals in forward order, each line search seeing the sites before it; what is not worth it is left out."""
    entries: list[tuple[SiteView, Proposal, Entry]] = []
    for name, number in stage.numbers.items():
        view, started = stage.views[name], time.perf_counter()
        with torch.no_grad():
            proposal = in_groups(stage.request.method.propose(view, number), view.site)
            before = [entry.change for _, _, entry in entries]
            entry = enter(view, proposal, before, stage.request.amplitude)
            if not entry.lowers and not stage.request.insists:
                proposal = without_neurons(proposal)
                entry = replace(enter(view, proposal, before, 0.0), notes=("no amplitude lowered the held-out loss",))
        entries.append((view, proposal, replace(entry, seconds=time.perf_counter() - started)))
    return entries


def in_groups(proposal: Proposal, site: Site) -> Proposal:
    """As many whole groups as the proposal fills."""
    left_out = proposal.count % site.group
    if not left_out:
        return proposal
    notes = (*proposal.notes, f"left {left_out} out: new neurons come in groups of {site.group} here")
    return replace(first_neurons(proposal, proposal.count - left_out), notes=notes)


def first_neurons(proposal: Proposal, count: int) -> Proposal:
    """The strongest `count` neurons of a proposal."""
    omega = {name: part[:count] for name, part in proposal.omega.items()}
    return replace(proposal, alpha=proposal.alpha[:count], omega=omega)


def without_neurons(proposal: Proposal) -> Proposal:
    """A proposal to do nothing, its figures kept for the record."""
    return replace(first_neurons(proposal, 0), updates={}, intercepts={}, rate_neurons=0.0, rate_update=0.0, offset={})


def make_record(stage: Stage, index: int, entries: list[tuple[SiteView, Proposal, Entry]]) -> Record:
    """What happened at one site."""
    view, proposal, entry = entries[index]
    changes = [entry.change for _, _, entry in entries]
    site, asked = view.site, stage.numbers[view.site.name]
    notes = (*proposal.notes, *entry.notes)
    details = {"amplitude_update": entry.update_amplitude} if proposal.scaling == "both" else {}
    return Record(
        site=site.name, asked=entry.change.count if asked == "auto" else asked, added=entry.change.count,
        width_before=site.width, width_after=site.width + entry.change.count,
        singular_values=tuple(proposal.singular_values.tolist()), bottleneck=psi(view),
        rate_neurons=proposal.rate_neurons, rate_update=proposal.rate_update,
        predicted=entry.predicted, measured=entry.measured, amplitude=entry.amplitude,
        parameters_before=parameters_after(view.measurement.model, changes[:index]),
        parameters_after=parameters_after(view.measurement.model, changes[: index + 1]),
        seconds=entry.seconds, notes=notes, details=details,
        slots=tuple(asdict(slot) for slot in site.slots), counts=tuple(asdict(count) for count in site.counts),
    )  # fmt: skip


def psi(view: SiteView) -> float | None:
    """The site's bottleneck, summed over consumers, where it was measured."""
    if not view.consumer_sums:
        return None
    total = 0.0
    for name in view.site.consumers:
        sums = view.consumer_sums[name, "estimate"]
        moments = sums.mean("v_square"), sums.mean("v_b1"), sums.mean("b1_b1")
        total += float(bottleneck(*moments, view.updates[name]))
    return total


def parameters_after(model: nn.Module, changes: Sequence[Change]) -> int:
    """The number of parameters of the model with some changes."""
    if not changes:
        return sum(p.numel() for p in model.parameters())
    copy = changed(model, changes)
    return sum(p.numel() for p in copy.parameters())


def outer_losses(stage: Stage, changes: Sequence[Change]) -> tuple[float, float]:
    """The loss before and after all changes, on the samples that nothing was estimated on, where there are such."""
    measurement, fold = stage.measurement, stage.folds[-1]
    copy = changed(measurement.model, changes)
    return measurement.loss(measurement.model, fold), measurement.loss(copy, fold)


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """No, one or several optimizers as a list."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]  # type: ignore[list-item]


def check_amplitude(amplitude: Any) -> None:
    """None or a finite number."""
    if amplitude is None:
        return
    if isinstance(amplitude, bool) or not isinstance(amplitude, (int, float)) or amplitude - amplitude != 0:
        raise InputError(f"amplitude is {amplitude!r}; accepted: None to search one, or a finite number")


def check_zero(request: Request, numbers: dict[str, Any]) -> None:
    """No neurons and no update is nothing to do."""
    idle = numbers and all(number == 0 for number in numbers.values())
    if idle and not request.method.updates_weights:
        raise InputError(
            f"neurons=0 with {request.method.name!r}, which moves no old weights, does nothing; "
            "accepted with a best update, such as auxin.Tiny()"
        )


def trainable(model: nn.Module, sites: Sites, named: bool) -> Sites:
    """The sites whose weights can learn; a frozen one that the caller named is an error."""
    kept = []
    for site in sites:
        modules = (*site.producers, *site.consumers)
        frozen = [name for name in modules if not weight_of(model.get_submodule(name)).requires_grad]
        if not frozen:
            kept.append(site)
        elif named or len(sites) == 1:
            raise InputError(
                f"{frozen[0]}.weight requires no gradient, and site {site.name!r} would grow it; unfreeze it, or "
                "leave the site out with sites=[...]"
            )
    if not kept:
        raise InputError("no site can learn: every one has a weight with requires_grad=False; unfreeze some")
    return Sites(tuple(kept), sites.refused)
