"""What all plots share: their look, and names beside lines instead of legends."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

Floats = npt.NDArray[np.float64]

INK, QUIET, GRID = "#333333", "#777777", "#e3e5e8"
# Okabe and Ito's colours without the yellow, which is too pale for lines on white
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000", "#e69f00")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
WIDTH, DPI, FONT = 7.0, 160, 8.5  # inches; at 700 px a point is 1.4 px
LEFT = 0.088  # where axes begin, in fractions of the width
LONGEST = 36  # characters of a label


@dataclass(frozen=True)
class Style:
    colour: str
    dash: str
    marker: str


def styles(names: Sequence[str]) -> dict[str, Style]:
    """The same look for a row in all plots: colours first, then other dashes and markers."""
    rounds = itertools.cycle((c, d, m) for d, m in zip(DASHES, MARKERS, strict=True) for c in COLOURS)
    return {name: Style(*look) for name, look in zip(names, rounds, strict=False)}


def bytes_text(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"


def name_at(ax: Axes, place: tuple[float, float], name: str, colour: str) -> Text:
    """A row's name at a place in pixels, in a colour darker than its line: text needs more contrast."""
    darker = "#" + "".join(f"{int(0.72 * int(colour[i : i + 2], 16)):02x}" for i in (1, 3, 5))
    return ax.text(*place, short(name), fontsize=FONT, color=darker, va="center", transform=None, parse_math=False)


def leader(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """A thin line in pixels."""
    from matplotlib.lines import Line2D

    line = Line2D([start[0], end[0]], [start[1], end[1]], color=colour, linewidth=0.6, alpha=0.7, transform=None)
    ax.figure.add_artist(line)


def label_ends(
    ax: Axes, ends: Sequence[tuple[str, float, float]], style: Mapping[str, Style], below: Axes | None = None
) -> None:
    """Each line's name in the right margin, level with its end as far as the others leave room.

    `below`: other axes under these, beside which names may stand too.
    """
    unit = DPI / 72
    frame = ax.get_window_extent()
    bottom = (below or ax).get_window_extent().y0
    places = [pixels(ax, x, y) for _, x, y in ends]
    heights = spread([place[1] for place in places], 1.35 * FONT * unit, bottom, frame.y1)
    for (name, _, _), place, height in zip(ends, places, heights, strict=True):
        colour = style[name].colour
        left = frame.x1 + 12 * unit
        name_at(ax, (left, height), name, colour)
        leader(ax, place, (left - 2 * unit, height), colour)


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


def room_for(figure: Figure, names: Sequence[str]) -> float:
    """Where axes must end, in fractions of the figure's width, for the names to fit beside them."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    texts = [figure.text(0, 0, short(name), fontsize=FONT, parse_math=False) for name in names]
    widest = max(text.get_window_extent(renderer).width for text in texts)
    for text in texts:
        text.remove()
    return float(1 - (widest + 18 * DPI / 72) / (WIDTH * DPI))


def new_figure(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    out = io.BytesIO()
    metadata: dict[str, Any] = {"Software": None}
    figure.savefig(out, format="png", dpi=DPI, metadata=metadata)
    return out.getvalue()


def pixels(ax: Axes, x: float, y: float) -> tuple[float, float]:
    across, up = ax.transData.transform((x, y))
    return float(across), float(up)


def tidy(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(QUIET)
    ax.grid(axis="y", color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=FONT - 0.5, color=QUIET, labelcolor=INK)


def short(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
