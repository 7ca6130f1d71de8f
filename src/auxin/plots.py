"""Figures for notebooks and papers, drawn with matplotlib (the `plots` extra)."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from auxin.errors import MissingExtraError
from auxin.history import Growth, History, as_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def import_pyplot() -> ModuleType:
    """matplotlib's pyplot; where it is missing, an error that says how to get it."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError("plots need matplotlib, which is not installed; pip install 'auxin[plots]'") from error
    return pyplot


def plot_diagnosis(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Bottlenecks and singular values; `rows` as in `Diagnosis.to_dict()["rows"]`."""
    size = (10.0, 1.6 + 0.35 * max(4, len(rows)))
    figure, (left, right) = import_pyplot().subplots(1, 2, figsize=size, layout="constrained")
    draw_bottlenecks(left, rows)
    draw_singular_values(right, rows)
    return figure


def draw_bottlenecks(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    """One bar a site, in the order of the forward pass: its bottleneck, and what new neurons could take off it."""
    names = [row["site"] for row in rows]
    gains = [min(sum(value**2 for value in row["singular_values"]), row["bottleneck"]) for row in rows]
    rest = [row["bottleneck"] - gain for row, gain in zip(rows, gains, strict=True)]
    axes.barh(names, gains, color="#e08a1e", label="new neurons can take off, Σλ²")
    axes.barh(names, rest, left=gains, color="#c9d3cb", label="left")
    axes.invert_yaxis()
    axes.set_xlabel("bottleneck Ψ, a sample")
    axes.legend()


def draw_singular_values(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    """λ of every candidate neuron, a line a site."""
    for row in rows:
        values = row["singular_values"]
        axes.plot(range(1, len(values) + 1), values, marker=".", label=row["site"])
    axes.set_xlabel("neuron")
    axes.set_ylabel("singular value λ")
    if 0 < len(rows) <= 12:
        axes.legend()


def plot_history(history: History | Growth | Sequence[Growth]) -> "Figure":
    """The width of every site over the grower's calls, or over growths where nobody counted calls."""
    events = as_history(history)
    figure, axes = import_pyplot().subplots(layout="constrained")
    steps = width_steps(events)
    for name, (calls, widths) in steps.items():
        axes.step(calls, widths, where="post", label=name)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("growth" if any(growth.call is None for growth in events) else "call of step")
    axes.set_ylabel("neurons")
    if 0 < len(steps) <= 12:
        axes.legend()
    return figure


def width_steps(history: History) -> dict[str, tuple[list[int], list[int]]]:
    """For every site, when its width changed (0 is the start) and to what."""
    steps: dict[str, tuple[list[int], list[int]]] = {}
    for index, growth in enumerate(history):
        for record in growth:
            calls, widths = steps.setdefault(record.site, ([0], [record.width_before]))
            calls.append(index + 1 if growth.call is None else growth.call)
            widths.append(record.width_after)
    return steps
