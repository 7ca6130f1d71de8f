"""Tables that a terminal shows as they are, and `print` as text."""

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table


def as_text(*parts: RenderableType) -> str:
    """What a plain terminal of 100 columns would show."""
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get().rstrip("\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], bold: int | None = None) -> Table:
    """A table whose first column is text and whose others are figures; `bold` marks a row."""
    made = Table(title=title)
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", overflow="fold")
    for index, row in enumerate(rows):
        made.add_row(*row, style="bold" if index == bold else None)
    return made


def figure(value: float | None) -> str:
    """A number in four digits, or nothing."""
    return "" if value is None else f"{value:.4g}"
