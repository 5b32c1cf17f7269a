"""What all plots share: their look, and names beside lines and points instead of legends."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

Floats = npt.NDArray[np.float64]

NO_MATPLOTLIB = "pip install 'dynamic-linear-attention[plot]'"
NO_PICTURE = f"matplotlib is not installed, so no picture was drawn: {NO_MATPLOTLIB}"
INK, QUIET, GRID = "#333333", "#777777", "#e3e5e8"
# Okabe and Ito's colours without the yellow, which is too pale for lines on white
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000", "#e69f00")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
WIDTH, DPI, FONT = 7.0, 160, 8.5  # inches; at 700 px a point is 1.4 px
POINT = DPI / 72  # in pixels
LONGEST = 36  # characters of a label
BESIDE = 1.03  # where names stand in the right margin, in fractions of the axes' width
LOOK: dict[Any, Any] = {
    "figure.facecolor": "white",
    "font.size": FONT,
    "text.color": INK,
    "text.parse_math": False,  # names may hold dollar signs
    "axes.titlesize": FONT + 1.5,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "figure.constrained_layout.w_pad": 0.08,  # inches around axes and what belongs to them
    "figure.constrained_layout.h_pad": 0.06,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    **{f"{axis}tick.{name}": x for axis in "xy" for name, x in
       {"color": QUIET, "labelcolor": INK, "labelsize": FONT - 0.5}.items()},
}  # fmt: skip


@contextmanager
def drawing(height: float, width: float = WIDTH, dpi: int = DPI) -> Iterator[Figure]:
    """A figure, in inches, whose axes must be made inside the block to have the look of all plots.

    It lays out its axes itself. Raises ImportError without matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(LOOK):
        figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def png(figure: Figure) -> bytes:
    out = io.BytesIO()
    metadata: dict[str, Any] = {"Software": None}
    figure.savefig(out, format="png", dpi=figure.dpi, metadata=metadata)
    return out.getvalue()


def svg(figure: Figure) -> bytes:
    """The same every time: no date, and names by what they name."""
    from matplotlib import rc_context

    out = io.BytesIO()
    with rc_context({"svg.hashsalt": "dla"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


@dataclass(frozen=True)
class Style:
    colour: str
    dash: str
    marker: str


def styles(names: Sequence[str]) -> dict[str, Style]:
    """The same look for a name in all plots: colours first, then other dashes and markers."""
    rounds = itertools.cycle((c, d, m) for d, m in zip(DASHES, MARKERS, strict=True) for c in COLOURS)
    return {name: Style(*look) for name, look in zip(names, rounds, strict=False)}


def short(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


# Names beside what they name.


def label_ends(
    ax: Axes,
    ends: Sequence[tuple[str, float, float]],
    style: Mapping[str, Style],
    below: Axes | None = None,
    across: Sequence[tuple[str, float]] = (),
) -> None:
    """Each line's name in the right margin, level with its end as far as the others leave room.

    `below`: other axes under these, beside which names may stand too. `across`: names and heights of lines that reach
    from side to side and belong to nobody. The figure's layout is final after this.
    """
    right, quiet = ax.get_xlim()[1], Style(QUIET, "--", "")
    named = [(name, x, y, style[name]) for name, x, y in ends] + [(name, right, y, quiet) for name, y in across]
    names = [_name(ax, name, look, x=BESIDE, y=0.5, transform=ax.transAxes) for name, _, _, look in named]
    frame, bottom = _settled(ax), (below or ax).get_window_extent().y0
    places = [ax.transData.transform((x, y)) for _, x, y, _ in named]
    heights = spread([place[1] for place in places], 1.35 * FONT * POINT, bottom, frame.y1)
    for (_, _, _, look), text, place, height in zip(named, names, places, heights, strict=True):
        text.set_y((height - frame.y0) / frame.height)
        _leader(ax, place, (frame.x0 + BESIDE * frame.width - 2 * POINT, height), look)


def label_points(
    ax: Axes, points: Sequence[tuple[str, float, float, tuple[float, float]]], style: Mapping[str, Style]
) -> None:
    """A name beside every point (name, x, y, ends of its error bar), where it covers no other name, point or bar."""
    from matplotlib.transforms import Bbox

    inside = _settled(ax)
    places = [ax.transData.transform((x, y)) for _, x, y, _ in points]
    taken = [Bbox.from_bounds(x - 5 * POINT, y - 5 * POINT, 10 * POINT, 10 * POINT) for x, y in places]
    taken += [text.get_window_extent() for text in ax.texts]
    for _, x, _, ends in points:
        (left, low), (right, high) = ax.transData.transform([(x, y) for y in ends])
        taken.append(Bbox.from_extents(left - 2 * POINT, low, right + 2 * POINT, high))
    for (name, _, _, _), place in zip(points, places, strict=True):
        text = _name(ax, name, style[name], x=0, y=0, transform=None)
        size = text.get_window_extent()
        box = _free_place(place, size, taken, inside)
        taken.append(box)
        middle = (box.y0 + box.y1) / 2
        text.set_position((box.x0, middle))
        if abs(middle - place[1]) > size.height:
            _leader(ax, place, (box.x0 if box.x0 > place[0] else box.x1, middle), style[name])


def _name(ax: Axes, name: str, style: Style, **place: Any) -> Text:
    """A name in a colour darker than what it names: text needs more contrast."""
    darker = "#" + "".join(f"{int(0.72 * int(style.colour[i : i + 2], 16)):02x}" for i in (1, 3, 5))
    return ax.text(s=short(name), color=darker, va="center", **place)


def _leader(ax: Axes, start: Floats, end: tuple[float, float], style: Style) -> None:
    """A thin line in pixels."""
    from matplotlib.lines import Line2D

    ends = ([start[0], end[0]], [start[1], end[1]])
    ax.figure.add_artist(Line2D(*ends, color=style.colour, linewidth=0.6, alpha=0.7, transform=None))


def _settled(ax: Axes) -> Bbox:
    """Lay out the figure, once and for all; where the axes are then, in pixels."""
    root = ax.figure.canvas.figure
    root.draw_without_rendering()
    root.set_layout_engine("none")
    return ax.get_window_extent()


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places nearest to the values that keep their order, lie `gap` apart and between low and high.

    Of equal values the first is the highest. With too many for the room the gap stays, and they go on below `low`.
    """
    order = sorted(range(len(values)), key=lambda i: (values[i], -i))
    # Less i gaps each, the places need only not fall: least squares pools neighbours that would (isotonic regression).
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([values[i] - rank * gap])
        while len(pools) > 1 and np.mean(pools[-2]) >= np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    level = [float(np.mean(pool)) for pool in pools for _ in pool]
    highest = high - (len(values) - 1) * gap
    places = [0.0] * len(values)
    for rank, i in enumerate(order):
        places[i] = min(max(level[rank], low), highest) + rank * gap
    return places


def _free_place(point: Floats, size: Bbox, taken: Sequence[Bbox], inside: Bbox) -> Bbox:
    """The nearest place beside the point, in pixels, with the least of what is taken or outside."""
    from matplotlib.transforms import Bbox

    gap, width, height = 7 * POINT, size.width, size.height

    def box(step: int, right: bool) -> Bbox:
        left = point[0] + gap if right else point[0] - gap - width
        return Bbox.from_bounds(left, point[1] + (step - 1) * height / 2, width, height)

    def cost(box: Bbox) -> int:
        out = box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1
        return 5 * out + box.count_overlaps(taken)

    steps = sorted(range(-16, 17), key=lambda step: (abs(step), -step))
    return min((box(step, right) for step in steps for right in (True, False)), key=cost)
