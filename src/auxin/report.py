"""A self-contained HTML page of a training run that grew: it needs no network, and reads without JavaScript."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path
from string import Template

from auxin.errors import InputError
from auxin.history import Growth, History, Record
from auxin.report_figures import Axis, Life, Point, bars, line_chart, network, number


@dataclass(frozen=True)
class Epoch:
    """What was measured at the end of an epoch, before the growth that may follow it.

    `accuracy` is a share between 0 and 1. `epoch` counts as the grower's calls of `step` do.
    """

    epoch: int
    loss: float
    accuracy: float
    parameters: int
    widths: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of plain text with a heading and a sentence under it."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def write_report(
    path: str | PathLike[str],
    history: History,
    epochs: Sequence[Epoch] = (),
    title: str = "A network that grew",
    tables: Sequence[Table] = (),
) -> Path:
    """Write the page of `report_page` to `path`, and return the path."""
    target = check_writable(path)
    target.write_text(report_page(history, epochs, title, tables), encoding="utf-8")
    return target


def check_writable(path: str | PathLike[str]) -> Path:
    """`path` as a Path, if a file can be written there: told before the long work whose result it holds."""
    target = Path(path)
    if target.is_dir():
        raise InputError(f"{target} is a folder; name the file to write, as in {target / 'report.html'}")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder {target.parent} to write {target.name} in; create it first")
    return target


def report_page(
    history: History,
    epochs: Sequence[Epoch] = (),
    title: str = "A network that grew",
    tables: Sequence[Table] = (),
) -> str:
    """The report as HTML: growth played back, curves, and why each neuron was added."""
    sections = [
        *map(table_section, tables),
        playback_section(history, epochs),
        pair(accuracy_section(history, epochs), size_section(epochs)),
        pair(width_section(history), bottleneck_section(history)),
        growth_section(history),
    ]
    template = Template(files("auxin").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        subtitle=escape(summary(history, epochs)),
        sections="\n".join(filter(None, sections)),
        # "</script>" within a string would end the element that holds the data.
        epochs=json.dumps(frames(history, epochs)).replace("</", "<\\/"),
    )


def summary(history: History, epochs: Sequence[Epoch]) -> str:
    """One sentence on what happened."""
    added = sum(growth.added for growth in history)
    removed = sum(record.width_before + record.added - record.width_after for growth in history for record in growth)
    parts = [f"{len(history)} growths, {added} neurons added" + (f", {removed} trimmed" if removed else "")]
    if widths := history.widths():
        parts.append("final widths " + ", ".join(f"{site} {width}" for site, width in widths.items()))
    if epochs:
        parts.append(f"accuracy {epochs[-1].accuracy:.1%} with {epochs[-1].parameters:,} parameters")
    return "; ".join(parts) + "."


def section(heading: str, content: str, note: str = "") -> str:
    """A section of the page; nothing where there is no content."""
    said = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(heading)}</h2>{said}{content}</section>" if content else ""


def pair(*sections: str) -> str:
    """Sections side by side where there is room."""
    return f'<div class="pair">{"".join(sections)}</div>' if any(sections) else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table whose cells are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def table_section(given: Table) -> str:
    """A table of plain text as a section."""
    rows = ([escape(cell) for cell in row] for row in given.rows)
    return section(given.heading, table(given.columns, rows), given.caption)


def moment(growth: Growth, index: int) -> int:
    """When a growth happened: the grower's call, or its place in the history where nobody counted."""
    return index + 1 if growth.call is None else growth.call


def moments(history: History) -> list[tuple[int, Growth]]:
    """Every growth with its moment."""
    return [(moment(growth, index), growth) for index, growth in enumerate(history)]


def lives(history: History) -> dict[str, list[Life]]:
    """For every site that ever changed, when each of its neurons came and went, in the order of their coming."""
    all_lives: dict[str, list[Life]] = {}
    alive: dict[str, list[int]] = {}
    for when, growth in moments(history):
        for record in growth:
            first = [Life()] * record.width_before
            neurons = all_lives.setdefault(record.site, first)
            present = alive.setdefault(record.site, list(range(record.width_before)))
            kept = present if record.kept is None else [present[index] for index in record.kept]
            for gone in set(present) - set(kept):
                neurons[gone] = Life(neurons[gone].born, when)
            alive[record.site] = [*kept, *range(len(neurons), len(neurons) + record.added)]
            neurons.extend([Life(when)] * record.added)
    return all_lives


def frames(history: History, epochs: Sequence[Epoch]) -> list[dict[str, int | str]]:
    """What the player says at each moment: one frame an epoch, or one a growth where there are no epochs."""
    grown = dict(moments(history))
    if not epochs:
        start: list[dict[str, int | str]] = [{"epoch": 0, "text": "at the start"}]
        return start + [{"epoch": when, "text": f"growth {when}: {told(growth)}"} for when, growth in grown.items()]
    texts = (
        f"epoch {e.epoch}: accuracy {e.accuracy:.1%}" + (f"; {told(grown[e.epoch])}" if e.epoch in grown else "")
        for e in epochs
    )
    return [{"epoch": e.epoch, "text": text} for e, text in zip(epochs, texts, strict=True)]


def told(growth: Growth) -> str:
    """The widths that a growth changed, in words."""
    changed = [record for record in growth if record.width_before != record.width_after]
    return ", ".join(f"{r.site} {r.width_before} → {r.width_after}" for r in changed) or "nothing was added"


PLAYER = (
    '<div class="player" hidden><button type="button">Play</button>'
    '<input type="range" min="0" value="0" aria-label="epoch"><output></output></div>'
)


def playback_section(history: History, epochs: Sequence[Epoch]) -> str:
    """The network, neuron by neuron; without JavaScript as it is at the end."""
    columns = lives(history)
    if not columns:
        return ""
    note = "One dot a neuron: the paler, the older; just added ones are orange, trimmed ones hollow."
    return section("Growth", f'<div class="network">{network(columns)}</div>{PLAYER}', note)


def accuracy_section(history: History, epochs: Sequence[Epoch]) -> str:
    """Accuracy over epochs, growths marked."""
    points = [(float(e.epoch), 100 * e.accuracy) for e in epochs]
    marks = [float(when) for when, growth in moments(history) if epochs and when <= epochs[-1].epoch]
    chart = line_chart({"accuracy": points}, Axis("epoch"), Axis("accuracy, %"), marks)
    return section("Accuracy over time", chart, "Dashed lines: growths.")


def size_section(epochs: Sequence[Epoch]) -> str:
    """Accuracy against parameters, in the order of training."""
    points = [(float(e.parameters), 100 * e.accuracy) for e in epochs]
    chart = line_chart({"accuracy": points}, Axis("parameters", log=True), Axis("accuracy, %"))
    return section("Accuracy against parameters", chart, "One point an epoch, joined in the order of training.")


def width_section(history: History) -> str:
    """The width of every site over time."""
    series: dict[str, list[Point]] = {}
    for when, growth in moments(history):
        for record in growth:
            start = series.setdefault(record.site, [(0.0, float(record.width_before))])
            start += [(float(when), float(record.width_before)), (float(when), float(record.width_after))]
    return section("Widths over time", line_chart(series, Axis("time"), Axis("neurons", log=True)))


def bottleneck_section(history: History) -> str:
    """The bottleneck of every site before each growth."""
    series: dict[str, list[Point]] = {}
    for when, growth in moments(history):
        for record in growth:
            if record.bottleneck is not None:
                series.setdefault(record.site, []).append((float(when), record.bottleneck))
    chart = line_chart(series, Axis("time"), Axis("bottleneck Ψ", log=True))
    note = "The part of the desired update that the best change of the weights at hand cannot follow, a sample."
    return section("Bottleneck over time", chart, note)


def growth_section(history: History) -> str:
    """For each growth, why each neuron was added."""
    note = (
        "Bars: singular values λ, one a candidate neuron, largest first; coloured ones were added. "
        "Falls of the loss: predicted to first order, measured on held-out samples."
    )
    return section("Why each neuron was added", "".join(growth_details(w, g) for w, g in moments(history)), note)


def growth_details(when: int, growth: Growth) -> str:
    """One growth, folded to a line until it is opened."""
    columns = ("site", "neurons", "λ", "bottleneck Ψ", "predicted fall", "measured fall", "amplitude", "notes")
    rows = table(columns, map(record_cells, growth))
    notes = "".join(f"<p>{escape(note)}</p>" for note in growth.notes)
    losses = ""
    if growth.loss_before is not None and growth.loss_after is not None:
        losses = f"; held-out loss {number(growth.loss_before)} → {number(growth.loss_after)}"
    return f"<details><summary>{when}: {escape(told(growth))}{losses}</summary>{notes}{rows}</details>"


def record_cells(record: Record) -> tuple[str, ...]:
    """The cells of one site at one growth."""
    asked = f" (asked {record.asked})" if record.asked != record.added else ""
    return (
        escape(record.site),
        f"{record.width_before} → {record.width_after}{asked}",
        bars(record.singular_values, record.added),
        *(number(value) for value in (record.bottleneck, record.predicted, record.measured, record.amplitude)),
        "<br>".join(map(escape, record.notes)),
    )
