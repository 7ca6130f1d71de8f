"""Where is a model too narrow? A table of bottlenecks; nothing is changed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from torch import Tensor, nn

from auxin.collect import Measurement, Stream, one_fold
from auxin.errors import check_number, unknown
from auxin.growth import few_rows, fresh_seed, measure, psi, resolve_sites
from auxin.isolation import isolated
from auxin.layers import rule_for
from auxin.linalg import new_neurons
from auxin.methods import SiteView, Tiny
from auxin.moments import output_variance
from auxin.objectives import as_task
from auxin.structure import Sites
from auxin.surgery import plain
from auxin.tables import as_text, figure, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One site. `bottleneck` is Psi after the best update, a sample; `desired` is E|v|^2 before it."""

    site: str
    width: int
    consumers: tuple[str, ...]
    bottleneck: float
    desired: float
    singular_values: Tensor
    best_update: Tensor | dict[str, Tensor]
    best_update_bias: Tensor | dict[str, Tensor] | None
    output_variance: float
    parameters_per_neuron: int
    multiply_adds_per_neuron: int

    @property
    def share(self) -> float:
        """The share of the desired update that no move of the old weights can follow."""
        return self.bottleneck / self.desired if self.desired > 0 else 0.0

    @property
    def first_gain(self) -> float:
        """lambda_1^2: what the best neuron takes off the bottleneck."""
        return float(self.singular_values[0] ** 2) if len(self.singular_values) else 0.0

    @property
    def worth(self) -> float:
        """lambda_1^2 Var(a) a parameter: the unit in which sites are ranked."""
        return self.first_gain * self.output_variance / max(1, self.parameters_per_neuron)

    def to_dict(self) -> dict[str, Any]:
        """Numbers and strings; the best update by its norm alone."""
        updates = self.best_update if isinstance(self.best_update, dict) else {self.consumers[0]: self.best_update}
        return {
            "site": self.site,
            "width": self.width,
            "consumers": list(self.consumers),
            "bottleneck": self.bottleneck,
            "desired": self.desired,
            "share": self.share,
            "singular_values": self.singular_values.tolist(),
            "best_update_norm": {name: float(update.norm()) for name, update in updates.items()},
            "output_variance": self.output_variance,
            "worth": self.worth,
            "parameters_per_neuron": self.parameters_per_neuron,
            "multiply_adds_per_neuron": self.multiply_adds_per_neuron,
        }


@dataclass(frozen=True)
class Diagnosis:
    """Bottlenecks of all sites, in the order of the forward pass; prints as a table."""

    rows: tuple[Row, ...]
    samples: int
    loss: float
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, site: str) -> Row:
        for row in self.rows:
            if row.site == site:
                return row
        raise unknown("site", site, [row.site for row in self.rows])

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tightest(self) -> Row:
        """The site where a parameter buys most."""
        return max(self.rows, key=lambda row: row.worth)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "samples": self.samples,
            "loss": self.loss,
            "rows": [row.to_dict() for row in self.rows],
            "refused": list(self.refused),
            "notes": list(self.notes),
        }

    def plot(self) -> "Figure":
        """Bottleneck and singular values a site, as a matplotlib figure (extra `plots`)."""
        from auxin.plots import plot_diagnosis

        return plot_diagnosis([row.to_dict() for row in self.rows])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._parts()

    def __str__(self) -> str:
        return as_text(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        columns = ("site", "width", "bottleneck", "share", "best neuron", "worth a parameter")
        rows = [
            (
                row.site,
                str(row.width),
                figure(row.bottleneck),
                f"{row.share:.1%}",
                figure(row.first_gain),
                figure(row.worth),
            )
            for row in self.rows
        ]
        title = f"Expressivity bottlenecks on {self.samples} samples (loss {self.loss:.4g})"
        yield table(title, columns, rows, bold=self.rows.index(self.tightest))
        for note in self.notes:
            yield f"note: {note}"
        if self.refused:
            widths = "width is" if len(self.refused) == 1 else "widths are"
            yield f"{len(self.refused)} {widths} not offered; see .refused"


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Any,
    *,
    sites: Sites | Sequence[str] | None = None,
    damping: float | None = None,
) -> Diagnosis:
    """Measure every site's expressivity bottleneck on all samples given; nothing is changed.

    Args:
        model: any `nn.Module`; it is measured in the mode that it is in.
        batches: an iterable of `(input, target)`, iterated once, all of it.
        loss: `loss(output, target)`, mean-reduced, or an `auxin.Objective`.
        sites: what `find_sites` gave, names, or None for every site.
        damping: of both Gram matrices, relative to their diagonals; None is the paper's pseudo-inverse.
    """
    target, task = plain(model), as_task(loss)
    if damping is not None:
        check_number("damping", damping)
    with isolated(target):
        seed = fresh_seed(target)
        stream = Stream(batches, task, target, seed)
        kept = [stream.first()]
        found = resolve_sites(target, task.inputs(kept[0].batch), sites)
        stream.more(kept, None)
        one_fold(kept)
        measurement = Measurement(target, task, found, kept)
        method = Tiny(damping=damping or 0.0)
        views = measure(measurement, method, torch.Generator(), ["estimate"])
        rows = tuple(make_row(view, damping or 0.0) for view in views.values())
        value = measurement.loss(target, "estimate")
        refused = tuple(str(refusal) for refusal in found.refused)
        return Diagnosis(rows, measurement.count("estimate"), value, refused, few_rows(measurement, found))


def make_row(view: SiteView, damping: float) -> Row:
    """The figures of one site."""
    names, site = view.site.consumers, view.site
    values = new_neurons(view.s(), view.n(), None, damping, view.constant, precision=view.precision).singular_values
    updates: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for name in names:
        module = view.measurement.model.get_submodule(name)
        parts = rule_for(module).update(module, view.updates[name])
        updates[name] = parts["weight"]
        if "bias" in parts:
            biases[name] = parts["bias"]
    desired = sum(float(view.consumer_sums[name, "estimate"].mean("v_square")) for name in names)
    variances = [output_variance(view.measurement, name) for name in names]
    return Row(
        site.name, site.width, names, psi(view) or 0.0, desired, values,
        updates if len(names) > 1 else updates[names[0]],
        biases if len(names) > 1 else biases.get(names[0]),
        sum(variances) / len(variances), site.parameters_per_neuron, site.multiply_adds_per_neuron,
    )  # fmt: skip
