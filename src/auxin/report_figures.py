"""Figures as SVG text: line charts, the growing network, and bars. Colours come from the page's style sheet."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 16, 44
SERIES_COLOURS = 6


@dataclass(frozen=True)
class Axis:
    """One axis of a chart: its title, and whether it is logarithmic (to base 2)."""

    title: str
    log: bool = False


@dataclass(frozen=True)
class Life:
    """When a neuron came (None: it was there from the start) and when it was taken away (None: it stayed)."""

    born: int | None = None
    died: int | None = None


@dataclass(frozen=True)
class Scale:
    """Maps the values between `low` and `high` to the pixels between `start` and `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high, at = (math.log2(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * (at - low) / (high - low)

    def ticks(self) -> list[float]:
        """About five round values: powers of 2 on a logarithmic scale, else steps of 1, 2 or 5."""
        if self.log:
            first, last = math.ceil(math.log2(self.low) - 1e-9), math.floor(math.log2(self.high) + 1e-9)
            return [2.0**power for power in range(first, last + 1, max(1, (last - first) // 5))]
        raw = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [count * step for count in range(first, last + 1)]


def scale(values: Sequence[float], start: float, stop: float, log: bool) -> Scale:
    """The scale that shows all of `values`, and never has length 0."""
    low, high = min(values), max(values)
    if log:
        return Scale(low, max(high, low * 2), start, stop, log=True)
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return Scale(low - margin, high + margin, start, stop)


def number(value: float | None) -> str:
    """A number as short as it can be read: three digits, no exponent where that is no longer."""
    if value is None:
        return "–"
    if math.isfinite(value) and 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.3g}"


def line_chart(series: Mapping[str, Sequence[Point]], x: Axis, y: Axis, marks: Sequence[float] = ()) -> str:
    """A chart of named lines; dashed vertical lines stand at `marks`. An empty text where there is nothing to show."""
    shown = {name: finite_points(points, x, y) for name, points in series.items()}
    shown = {name: points for name, points in shown.items() if points}
    if not shown:
        return ""
    together = [point for points in shown.values() for point in points]
    to_x = scale([p[0] for p in together] + list(marks), LEFT, WIDTH - RIGHT, x.log)
    to_y = scale([p[1] for p in together], HEIGHT - BOTTOM, TOP, y.log)
    parts = [frame(x, y, to_x, to_y)]
    parts += [f'<line class="mark" x1="{to_x(m):.1f}" x2="{to_x(m):.1f}" {VERTICAL}/>' for m in marks]
    lines = (line(points, to_x, to_y, index) for index, points in enumerate(shown.values()))
    parts += [*lines, legend(list(shown)) if len(shown) > 1 else ""]
    label = escape(f"{y.title} over {x.title}: {', '.join(shown)}")
    return svg(WIDTH, HEIGHT, label, "".join(parts))


VERTICAL = f'y1="{TOP}" y2="{HEIGHT - BOTTOM}"'


def svg(width: float, height: float, label: str, content: str) -> str:
    """An SVG element of that size, with a description for those who cannot see it."""
    box = f'viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{label}">{content}</svg>'


def finite_points(points: Sequence[Point], x: Axis, y: Axis) -> list[Point]:
    """The points that can be drawn: finite, and positive on a logarithmic axis."""
    return [p for p in points if all(math.isfinite(v) and (v > 0 or not a.log) for v, a in zip(p, (x, y), strict=True))]


def frame(x: Axis, y: Axis, to_x: Scale, to_y: Scale) -> str:
    """Grid lines with their values, and the titles of the axes."""
    floor = HEIGHT - BOTTOM
    parts = []
    for tick in to_y.ticks():
        at = to_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in to_x.ticks():
        parts.append(f'<text x="{to_x(tick):.1f}" y="{floor + 18}" text-anchor="middle">{number(tick)}</text>')
    middle = (TOP + floor) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.title)}</text>'
    )
    parts.append(f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(y.title)}</text>')
    return "".join(parts)


def line(points: Sequence[Point], to_x: Callable[[float], float], to_y: Callable[[float], float], index: int) -> str:
    """One line with a dot at each of its points; the dots carry their values."""
    colour = f"s{index % SERIES_COLOURS}"
    at = [(to_x(a), to_y(b)) for a, b in points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
    dots = "".join(
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5"><title>{number(p)}, {number(q)}</title></circle>'
        for (a, b), (p, q) in zip(at, points, strict=True)
    )
    return f'<g class="{colour}"><polyline points="{path}"/>{dots}</g>'


def legend(names: Sequence[str]) -> str:
    """The names of the lines in their colours, in the lower right corner; none where there are too many to tell."""
    if len(names) > SERIES_COLOURS:
        return ""
    bottom = HEIGHT - BOTTOM - 8
    return "".join(
        f'<text class="s{index}" x="{WIDTH - RIGHT - 6}" y="{bottom - 16 * (len(names) - 1 - index)}" '
        f'text-anchor="end">{escape(name)}</text>'
        for index, name in enumerate(names)
    )


def bars(values: Sequence[float], taken: int) -> str:
    """Small bars for singular values, those of the neurons that were added in the colour of what is new."""
    values = [value for value in values if math.isfinite(value)]
    if not values or max(values) <= 0:
        return ""
    top, step, height = max(values), 7, 34
    parts = []
    for index, value in enumerate(values):
        size = max(1.0, height * value / top)
        kind = "new" if index < taken else "rest"
        parts.append(
            f'<rect class="{kind}" x="{index * step}" y="{height - size:.1f}" width="5" height="{size:.1f}">'
            f"<title>{number(value)}</title></rect>"
        )
    drawing = svg(len(values) * step, height, f"{len(values)} singular values", "".join(parts))
    return drawing.replace("<svg ", f'<svg class="bars" width="{len(values) * step}" height="{height}" ', 1)


def network(columns: Mapping[str, Sequence[Life]]) -> str:
    """The network as one column of dots a site; each dot knows when it came and went, so that a page can play it."""
    width, height, gap = 150.0, 260.0, 40.0
    births = sorted({life.born for lives in columns.values() for life in lives if life.born is not None})
    shades = {born: 0.4 + 0.6 * (index + 1) / len(births) for index, born in enumerate(births)}
    parts = []
    for index, (name, lives) in enumerate(columns.items()):
        left = index * (width + gap)
        parts.append(f'<text x="{left + width / 2:.0f}" y="14" text-anchor="middle">{escape(name)}</text>')
        for life, (x, y, radius) in zip(lives, grid(len(lives), width, height - 36), strict=True):
            shade = 0.25 if life.born is None else shades[life.born]
            parts.append(dot(life, left + x, 28 + y, radius, shade))
    return svg(max(len(columns) * (width + gap) - gap, 1.0), height, "neurons of each site", "".join(parts))


def grid(count: int, width: float, height: float) -> list[tuple[float, float, float]]:
    """Centres and radius of `count` dots that fill a box row by row."""
    across = max(1, math.ceil(math.sqrt(count * width / height)))
    down = max(1, math.ceil(count / across))
    step = min(width / across, height / down, 28.0)
    left = (width - step * across) / 2
    return [(left + step * (i % across + 0.5), step * (i // across + 0.5), step * 0.4) for i in range(count)]


def dot(life: Life, x: float, y: float, radius: float, shade: float) -> str:
    """One neuron, as it is at the end: the page shows the end unless it is played."""
    times = (("born", life.born), ("died", life.died))
    data = "".join(f' data-{name}="{when}"' for name, when in times if when is not None)
    kind = "neuron" if life.died is None else "neuron gone"
    return f'<circle class="{kind}"{data} fill-opacity="{shade:.2f}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
