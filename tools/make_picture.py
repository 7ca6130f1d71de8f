"""Draw docs/images/growth.svg from a real run of the demo: test accuracy and widths over epochs.

python tools/make_picture.py
"""

from pathlib import Path

from auxin.demo import GROWN, Settings, run_demo
from auxin.report import Epoch
from auxin.report_figures import HEIGHT, WIDTH, Axis, line_chart, svg

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "growth.svg"
# An image has no style sheet of a page around it; these colours can be read on white and on dark paper.
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #6b7c71; } .grid { stroke: #8a998f; opacity: .3; }
.mark { stroke: #6b7c71; stroke-dasharray: 2 4; } polyline { fill: none; stroke: currentColor; stroke-width: 2; }
circle { fill: currentColor; } .s0 { color: #2e9a5c; } .s1 { color: #d9782f; }
text.s0, text.s1 { fill: currentColor; font-weight: 600; }
</style>"""


def main() -> None:
    """Run one seed of the demo and draw its growth."""
    run = next(run for run in run_demo(Settings(seeds=1), lambda *_: None) if run.name == GROWN)
    marks = [float(growth.call) for growth in run.history if growth.call is not None]
    accuracy = {"accuracy": [(float(e.epoch), 100 * e.accuracy) for e in run.epochs]}
    sites = list(run.epochs[0].widths)
    widths = {f"layer {index + 1}": width_line(run.epochs, site) for index, site in enumerate(sites)}
    left = line_chart(accuracy, Axis("epoch"), Axis("test accuracy, %"), marks)
    right = line_chart(widths, Axis("epoch"), Axis("neurons", log=True), marks)
    PICTURE.write_text(beside(left, right) + "\n", encoding="utf-8")


def width_line(epochs: list[Epoch], site: str) -> list[tuple[float, float]]:
    """The width of one site over epochs."""
    return [(float(epoch.epoch), float(epoch.widths[site])) for epoch in epochs]


def beside(left: str, right: str) -> str:
    """Two charts side by side."""
    size = f'width="{WIDTH}" height="{HEIGHT}" '
    first = left.replace("<svg ", f"<svg {size}", 1)
    second = right.replace("<svg ", f'<svg x="{WIDTH}" {size}', 1)
    return svg(2 * WIDTH, HEIGHT, "a network grows on digits", STYLE + first + second)


if __name__ == "__main__":
    main()
