"""Plots draw what they are given, and say what is missing."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from auxin import plots
from auxin.errors import MissingExtraError
from auxin.history import Growth, History, Record


def history() -> History:
    growths = [Growth((Record("a", 1, 1, 1, 2), Record("b", 0, 0, 3, 3)), call=2)]
    return History([*growths, Growth((Record("a", 2, 2, 2, 4),), call=5)])


def test_widths_over_calls() -> None:
    assert plots.width_steps(history()) == {"a": ([0, 2, 5], [1, 2, 4]), "b": ([0, 2], [3, 3])}


@pytest.fixture
def pyplot(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """pyplot without a screen, and without figures left open."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    found = pytest.importorskip("matplotlib.pyplot")
    yield found
    found.close("all")


@pytest.mark.usefixtures("pyplot")
def test_history_is_drawn() -> None:
    lines = plots.plot_history(history()).axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["a", "b"]
    assert list(lines[0].get_ydata()) == [1, 2, 4]
    plots.plot_history(History())


@pytest.mark.usefixtures("pyplot")
def test_diagnosis_is_drawn() -> None:
    rows = [
        {"site": "a", "bottleneck": 5.0, "singular_values": [2.0, 0.5]},
        {"site": "b", "bottleneck": 1.0, "singular_values": [3.0]},
        {"site": "c", "bottleneck": 2.0, "singular_values": []},
    ]
    bars, lines = plots.plot_diagnosis(rows).axes
    assert [bar.get_width() for bar in bars.patches] == [4.25, 1.0, 0.0, 0.75, 0.0, 2.0]
    assert [list(line.get_ydata()) for line in lines.get_lines()] == [[2.0, 0.5], [3.0], []]
    plots.plot_diagnosis([])


def test_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"auxin\[plots\]"):
        plots.plot_history(history())
