"""The report page: right figures, escaped texts, nothing from outside."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from auxin.errors import InputError
from auxin.history import Growth, History, Record
from auxin.report import Epoch, Table, lives, report_page, write_report
from auxin.report_figures import Axis, Life, bars, line_chart, network, number, scale

VOID = {"meta", "br", "input", "link", "img", "hr"}


def record(site: str, before: int, added: int, kept: tuple[int, ...] | None = None, **more: object) -> Record:
    after = (before if kept is None else len(kept)) + added
    return Record(site, added, added, before, after, kept=kept, **more)


def history() -> History:
    """1 → 2 → 4 neurons, then a trim to the second and fourth."""
    first = record("fc</script>", 1, 1, singular_values=(2.0, 0.5), bottleneck=4.0, predicted=0.1, measured=0.08)
    second = record("fc</script>", 2, 2, singular_values=(1.0,), bottleneck=1.0, notes=("a <b> note",))
    trim = record("fc</script>", 4, 0, kept=(1, 3))
    return History([Growth((first,), call=2), Growth((second,), call=3), Growth((trim,), call=5)])


def epochs() -> list[Epoch]:
    widths = (1, 1, 2, 4, 4, 2)
    return [Epoch(i + 1, 1 / (i + 1), i / 10, 10 * w, {"fc": w}) for i, w in enumerate(widths)]


class Balance(HTMLParser):
    """Raises where an element is closed that is not the innermost open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("given", [(history(), epochs()), (history(), []), (History(), epochs()), (History(), [])])
def test_page_is_well_formed(given: tuple[History, list[Epoch]]) -> None:
    parser = Balance()
    parser.feed(report_page(*given))
    assert parser.open == []


def test_page_needs_no_network() -> None:
    page = report_page(history(), epochs()).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"https?://|src=|@import|url\(", page) == []


def test_texts_are_escaped() -> None:
    page = report_page(history(), epochs(), "a <title>", [Table("<h>", ("<c>",), [("<cell>",)], "<caption>")])
    for text in ("a <title>", "<h>", "<c>", "<cell>", "<caption>", "a <b> note", "fc</script>"):
        assert text not in page


def test_player_knows_every_epoch_and_growth() -> None:
    page = report_page(history(), epochs())
    frames = json.loads(page.split('id="epochs">')[1].split("</script>")[0])
    assert [frame["epoch"] for frame in frames] == [1, 2, 3, 4, 5, 6]
    assert frames[1]["text"] == "epoch 2: accuracy 10.0%; fc</script> 1 → 2"


def test_lives_follow_growth_and_trim() -> None:
    assert lives(history()) == {"fc</script>": [Life(None, 5), Life(2, None), Life(3, 5), Life(3, None)]}


def test_growths_without_a_call_count_themselves() -> None:
    growths = [Growth((record("fc", 1, 1),)), Growth((record("fc", 2, 1),))]
    assert lives(History(growths)) == {"fc": [Life(), Life(1), Life(2)]}


def test_every_neuron_is_drawn() -> None:
    drawing = ElementTree.fromstring(network({"a": [Life(), Life(1, 2)], "b": [Life()] * 300}))
    dots = [element for element in drawing.iter() if element.get("class", "").startswith("neuron")]
    assert len(dots) == 302
    assert (dots[1].get("data-born"), dots[1].get("data-died"), dots[1].get("class")) == ("1", "2", "neuron gone")
    box = [float(part) for part in drawing.get("viewBox", "").split()]
    assert all(0 <= float(dot.get("cx", "-1")) <= box[2] and 0 <= float(dot.get("cy", "-1")) <= box[3] for dot in dots)


def test_bars_show_what_was_taken() -> None:
    drawing = ElementTree.fromstring(bars([4.0, 2.0, 1.0], taken=2))
    rectangles = [element for element in drawing.iter() if element.tag.endswith("rect")]
    assert [r.get("class") for r in rectangles] == ["new", "new", "rest"]
    heights = [float(r.get("height", "0")) for r in rectangles]
    assert heights[0] == pytest.approx(2 * heights[1]) == pytest.approx(4 * heights[2])
    assert bars([], 0) == bars([0.0, math.nan], 1) == ""


def test_chart_drops_what_it_cannot_show() -> None:
    points = [(1.0, 1.0), (2.0, math.nan), (3.0, 0.0), (4.0, 4.0)]
    drawing = ElementTree.fromstring(line_chart({"a": points, "b": []}, Axis("x"), Axis("y", log=True)))
    assert len([element for element in drawing.iter() if element.tag.endswith("circle")]) == 2
    assert line_chart({"a": []}, Axis("x"), Axis("y")) == ""


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[1.0], [3.0, 3.0], [0.001, 7e6], [5.0, 6.0], [0.25, 0.5]])
def test_scale_maps_into_its_range(values: list[float], log: bool) -> None:
    to_pixel = scale(values, 300.0, 20.0, log)
    assert all(20 <= to_pixel(value) <= 300 for value in (*values, *to_pixel.ticks()))
    assert to_pixel.ticks()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.123456, "0.123"),
        (12345.0, "12\u202f345"),
        (1e-9, "1e-09"),
        (math.nan, "nan"),
        (2.0**30, "1.07e+09"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def test_path_is_checked_first(tmp_path: Path) -> None:
    assert write_report(tmp_path / "page.html", history()).exists()
    with pytest.raises(InputError, match="is a folder"):
        write_report(tmp_path, history())
    with pytest.raises(InputError, match="no folder"):
        write_report(tmp_path / "absent" / "page.html", history())
