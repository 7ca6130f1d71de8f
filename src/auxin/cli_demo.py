"""`auxin demo`: what the demo prints, and the page it writes."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table as RichTable

from auxin.cli_values import positive_int
from auxin.demo import GROWN, Run, Settings, Summary, run_demo, summarise
from auxin.history import Growth
from auxin.report import Epoch, Table, check_writable, write_report
from auxin.report_figures import number

REPORT = "auxin-demo.html"
COLUMNS = ("run", "accuracy", "widths", "parameters", "FLOPs", "seconds")
CAPTION = (
    "Test accuracy, mean ± standard deviation; seeds: {seeds}. FLOPs of training's forward and backward passes; "
    "seconds include measuring and growing."
)
LINE = "{seed:>4}  {epoch:>5}  {accuracy:>8}  {neurons:^21}  {predicted:>14}  {measured:>13}"
TITLES = {"seed": "seed", "epoch": "epoch", "accuracy": "accuracy", "neurons": "widths"}
TITLES |= {"predicted": "predicted fall", "measured": "measured fall"}


def add_command(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command to the parser of the command line."""
    parser = commands.add_parser(
        "demo",
        parents=[shared],
        help="grow a network on scikit-learn's digits, from one neuron a layer, in under a minute",
        description="Grow an MLP on scikit-learn's digits from one neuron a layer until it stops by itself; compare "
        "it with its final architecture trained from scratch at equal training FLOPs, and with its seed never grown.",
    )
    parser.add_argument("--seeds", type=positive_int, default=3, metavar="N", help="runs of each kind (3)")
    parser.add_argument(
        "--report", type=Path, default=Path(REPORT), metavar="FILE", help=f"the page to write ({REPORT})"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> Mapping[str, Any]:
    """Run the demo, print it as it goes, write the page, and return everything as plain data."""
    check_writable(options.report)
    settings = Settings(seeds=options.seeds)
    console.print("Growing an MLP on 8×8 digits, 64-1-1-10 at first; each line is a growth.\n")
    console.print(LINE.format(**TITLES), style="bold")
    with console.status("") as status:
        runs = run_demo(settings, Narrator(console, status))
    summaries = summarise(runs)
    console.print("", result_table(summaries))
    shown = next(run for run in runs if run.name == GROWN)
    write_report(options.report, shown.history, shown.epochs, "A network that grew on digits", [page_table(summaries)])
    console.print(f"How it grew, neuron by neuron: {options.report}", soft_wrap=True)
    return as_data(settings, runs, summaries, options.report)


class Narrator:
    """Tells each growth as it happens, and keeps the status line up to date."""

    def __init__(self, console: Console, status: Status) -> None:
        self.console = console
        self.status = status

    def __call__(self, name: str, seed: int, epoch: Epoch, growth: Growth | None) -> None:
        """The end of one epoch of the run `name`."""
        widths = dashed(epoch.widths.values())
        self.status.update(f"seed {seed}, {name}: epoch {epoch.epoch}, {widths}, accuracy {epoch.accuracy:.1%}")
        if growth is not None:
            self.console.print(growth_line(seed, epoch, growth), highlight=False)


def growth_line(seed: int, epoch: Epoch, growth: Growth) -> str:
    """One growth in one line: when, how good, from what to what, and what was promised and what came."""
    after = epoch.widths | {record.site: record.width_after for record in growth}
    return LINE.format(
        seed=seed,
        epoch=epoch.epoch,
        accuracy=f"{epoch.accuracy:.1%}",
        neurons=f"{dashed(epoch.widths.values()):>9} → {dashed(after.values()):9}",
        predicted=number(total(record.predicted for record in growth)),
        measured=number(total(record.measured for record in growth)),
    )


def dashed(widths: Iterable[int]) -> str:
    """Widths as in 64-32."""
    return "-".join(map(str, widths))


def total(values: Iterable[float | None]) -> float | None:
    """The sum of what is known, None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def cells(summary: Summary) -> tuple[str, ...]:
    """A summary as text, in the order of COLUMNS."""
    return (
        summary.name,
        f"{summary.accuracy:.1%} ± {summary.spread:.1%}",
        ", ".join(dict.fromkeys(map(dashed, summary.widths))),
        f"{summary.parameters:,.0f}",
        f"{summary.flops:.2e}",
        f"{summary.seconds:.1f}",
    )


def result_table(summaries: Sequence[Summary]) -> RichTable:
    """The table at the end, for the terminal."""
    table = RichTable(*COLUMNS, caption=CAPTION.format(seeds=len(summaries[0].widths)), caption_justify="left")
    for summary in summaries:
        table.add_row(*cells(summary))
    return table


def page_table(summaries: Sequence[Summary]) -> Table:
    """The same table, for the page."""
    return Table("Result", COLUMNS, list(map(cells, summaries)), CAPTION.format(seeds=len(summaries[0].widths)))


def as_data(settings: Settings, runs: Sequence[Run], summaries: Sequence[Summary], report: Path) -> dict[str, Any]:
    """Everything that was measured, ready for JSON."""
    return {
        "settings": asdict(settings),
        "summary": [asdict(summary) for summary in summaries],
        "runs": [{**asdict(run), "history": [growth.to_dict() for growth in run.history]} for run in runs],
        "report": str(report),
    }
