"""`dla train plot`: the curves of training runs, from their logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dla.report.found import Found
from dla.report.plots import FONT, LONGEST, NO_MATPLOTLIB, QUIET, Floats, Style, drawing, label_ends, png, styles
from dla.report.words import count_text
from dla.training.monitor import Record
from dla.training.read_log import RunLog, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "curves.png"
LOSS, SMALL, FOOT = 3.3, 2.0, 0.4  # inches: the rows' heights, with their titles and axes, and the note's
SMOOTH = 100  # smoothing reaches over this part of the run to either side
LARGEST = 1e30  # numbers from here on, and those that are not finite, are not drawn
TICKS = 7  # most of them on the axis of positions
FEW: dict[str, Any] = {"nbins": 5, "steps": [1, 2, 5, 10]}  # ticks on an axis of values
MEMORY = {"boundary_rate": "Boundary rate", "live_states": "Live states", "W": "W, dense states a read"}


Points = tuple[Floats, Floats]
Panel = Callable[["Axes", Sequence[RunLog], Mapping[str, Style]], None]


def run(folders: list[Path], out: Path | None = None) -> Found:
    """Draw the runs' curves to ``out``, a folder or a file .png (None: the first run's folder), and say where."""
    runs = [read_run(folder, name) for folder, name in zip(folders, names(folders), strict=True)]
    try:
        picture = draw(runs)
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: {NO_MATPLOTLIB}") from error
    path = out if out is not None and out.suffix == ".png" else (out or folders[0]) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    return Found(str(path))


def names(folders: Sequence[Path]) -> list[str]:
    """What each run is called: its folder's name, with as many of those above as tell it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    found: list[str] = []
    for i, own in enumerate(parts):
        others = {*parts} - {own}
        n = next((n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others)), len(own))
        again = parts[:i].count(own)  # the same folder twice
        found.append("/".join(own[-n:]) + (f" ({again + 1})" if again else ""))
    # without the middle of long names: runs of a series most often differ at the end
    short = [n if len(n) <= LONGEST else f"{n[: LONGEST // 3]}…{n[len(n) - LONGEST // 2 :]}" for n in found]
    return short if len(set(short)) == len(short) else found


def draw(runs: Sequence[RunLog]) -> bytes:
    """The picture, as PNG. Raises ImportError without matplotlib."""
    style = styles([r.name for r in runs])
    rows = _rows(runs)
    heights = [LOSS, *[SMALL] * len(rows)]
    note = "Loss and gradient norm: faint as logged, strong smoothed. Markers: loss on validation data."
    note += "\nMemory: mean of the dynamic layers, band from the lowest to the highest." if len(rows) > 1 else ""
    with drawing(sum(heights) + FOOT) as figure:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=FONT - 1, color=QUIET)
        top, *lower = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        loss = top.subplots()
        for part, row in zip(lower, rows, strict=True):
            axes = part.subplots(1, len(row), width_ratios=[share for _, _, share in row])
            for ax, (title, panel, _) in zip(axes, row, strict=True):
                panel(ax, runs, style)
                ax.set_title(title, fontsize=FONT)
        loss_panel(loss, runs, style)  # last, since it settles the layout
        return png(figure)


def _rows(runs: Sequence[RunLog]) -> list[list[tuple[str, Panel, float]]]:
    """The small panels: title, what draws it, and its share of the width."""
    row: list[tuple[str, Panel, float]] = [("Gradient norm", norm_panel, 1), ("Learning rate", rate_panel, 1)]
    if any(_by_position(r) for r in runs):
        row.insert(0, ("Validation loss by position, at the end", position_panel, 1.7))
    rows = [row]
    if any(r.memory for r in runs):
        rows.append([(title, _memory_panel(name), 1) for name, title in MEMORY.items()])
    return rows


# The panels.


def loss_panel(ax: Axes, runs: Sequence[RunLog], style: Mapping[str, Style]) -> None:
    """Training loss, faint as it was and strong smoothed, and the validation's as markers."""
    validation = {r.name: series(r.evaluations, "validation_loss") for r in runs}
    lines = _smooth_lines(ax, runs, "loss", style, [values for _, values in validation.values()])
    for name, (steps, losses) in validation.items():
        if len(steps):
            look = style[name]
            ax.plot(steps, losses, linestyle="", marker=look.marker, markersize=5.5, color=look.colour,
                    markeredgecolor="white", markeredgewidth=0.8, zorder=4, clip_on=False)  # fmt: skip
    _step_axis(ax, runs, 8)
    ax.set_title("Loss")
    label_ends(ax, [(name, float(x[-1]), float(y[-1])) for name, (x, y) in lines.items()], style)


def position_panel(ax: Axes, runs: Sequence[RunLog], style: Mapping[str, Style]) -> None:
    """The last evaluation's loss over the position in the context, each stretch of it drawn at its end."""
    places: set[int] = set()
    for r in runs:
        points = _by_position(r)
        marker = {"marker": style[r.name].marker, "markersize": 3.5}
        _plain_line(ax, np.array([*points]), np.array([*points.values()]), style[r.name], **marker)
        places |= set(points)
    ax.set_xscale("log", base=2)
    first, last = int(np.floor(np.log2(min(places)))), int(np.ceil(np.log2(max(places))))
    every = -(-(last - first + 1) // TICKS)
    ticks = [2**i for i in range(last, first - 1, -every)]
    ax.set_xticks(ticks, [count_text(tick) for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(2 ** (first - 0.3), 2 ** (last + 0.3))
    ax.locator_params("y", **FEW)
    ax.set_xlabel("up to token")


def norm_panel(ax: Axes, runs: Sequence[RunLog], style: Mapping[str, Style]) -> None:
    """The norm of the gradient, before it was clipped."""
    _smooth_lines(ax, runs, "grad_norm", style)
    _step_axis(ax, runs)


def rate_panel(ax: Axes, runs: Sequence[RunLog], style: Mapping[str, Style]) -> None:
    """The learning rate."""
    for r in runs:
        _plain_line(ax, *series(r.steps, "lr"), style[r.name])
    ax.yaxis.set_major_formatter("{x:g}")
    _step_axis(ax, runs, from_zero=True)


def _memory_panel(name: str) -> Panel:
    def panel(ax: Axes, runs: Sequence[RunLog], style: Mapping[str, Style]) -> None:
        for r in runs:
            if not r.memory:
                continue
            steps = np.array([record["step"] for record in r.memory], dtype=np.float64)
            layers = [np.array([layer[name] for layer in record["memory"]], dtype=np.float64) for record in r.memory]
            layers = [np.where(np.abs(x) < LARGEST, x, np.nan) for x in layers]  # what cannot be drawn makes a gap
            low, mean, high = np.array([(x.min(), x.mean(), x.max()) for x in layers]).T
            ax.fill_between(steps, low, high, color=style[r.name].colour, alpha=0.13, linewidth=0)
            _plain_line(ax, steps, mean, style[r.name])
        _step_axis(ax, runs, from_zero=True)

    return panel


# What the panels share.


def series(records: Sequence[Record], name: str) -> Points:
    """Steps and values of a figure, where it is there and can be drawn."""
    points = [(r["step"], r[name]) for r in records if isinstance(r.get(name), int | float)]
    steps, values = np.array(points, dtype=np.float64).reshape(-1, 2).T
    drawn = np.abs(values) < LARGEST  # a nan is not
    return steps[drawn], values[drawn]


def smoothed(values: Floats) -> Floats:
    """The mean of each value and its neighbours: fewer of them near the start, where a curve falls fast."""
    n = len(values)
    at = np.arange(n)
    half = np.minimum(at // 6, n // SMOOTH)
    low, high = at - half, np.minimum(at + half + 1, n)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    mean: Floats = (sums[high] - sums[low]) / (high - low)
    return mean


def _smooth_lines(
    ax: Axes, runs: Sequence[RunLog], name: str, style: Mapping[str, Style], also: Sequence[Floats] = ()
) -> dict[str, Points]:
    """Draw a noisy figure of every step, faint as it is and strong smoothed; the smoothed lines, by run.

    also: values for which the axis must have room.
    """
    lines, seen = {}, [*also]
    for r in runs:
        steps, values = series(r.steps, name)
        look, smooth = style[r.name], smoothed(values)
        ax.plot(steps, values, color=look.colour, linewidth=0.6, alpha=0.28 / len(runs) ** 0.5, zorder=2)
        _plain_line(ax, steps, smooth, look, linewidth=None, zorder=3)
        if len(steps):
            lines[r.name] = (steps, smooth)
            seen += [smooth, np.percentile(values, (1, 99))]
    _log_scale(ax, np.concatenate(seen or [np.empty(0)]))
    return lines


def _by_position(run: RunLog) -> dict[int, float]:
    """Loss by the end of the stretch of positions, of the last evaluation."""
    last: Record = run.evaluations[-1] if run.evaluations else {}
    points = {int(key.rpartition("-")[2]) + 1: loss for key, loss in last.get("by_position", {}).items()}
    return {end: points[end] for end in sorted(points) if abs(points[end]) < LARGEST}


def _log_scale(ax: Axes, shown: Floats) -> None:
    """A logarithmic axis with plain numbers that holds what is shown; a rare step may lie outside."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    positive = shown[shown > 1 / LARGEST]
    if not len(positive):
        return
    low, high = positive.min(), positive.max()
    room = max((high / low) ** 0.06, 1.02)
    ax.set_ylim(low / room, high * room)  # first: there is no room around one large number by itself
    ax.set_yscale("log", subs=[])
    ax.minorticks_off()
    subs = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if high < 6 * low else (1, 2, 3, 5) if high < 30 * low else (1,)
    ax.yaxis.set_major_locator(MaxNLocator(**FEW) if high < 2 * low else LogLocator(subs=subs, numticks=10))
    ax.yaxis.set_major_formatter("{x:g}")


def _step_axis(ax: Axes, runs: Sequence[RunLog], ticks: int = 4, from_zero: bool = False) -> None:
    """The axis of steps; from_zero: the other one begins there."""
    last = max(r.steps[-1]["step"] for r in runs)
    ax.set_xlim(0, max(last, 1))
    ax.locator_params("x", nbins=ticks, integer=True, steps=[1, 2, 2.5, 5, 10])
    ax.xaxis.set_major_formatter(lambda x, _: count_text(x, 1000))
    ax.set_xlabel("step")
    if from_zero:
        ax.set_ylim(bottom=0)
        ax.locator_params("y", **FEW)


def _plain_line(ax: Axes, steps: Floats, values: Floats, look: Style, **more: Any) -> None:
    dot = "o" if len(steps) == 1 else ""  # where a single point makes no line
    ax.plot(steps, values, **{"color": look.colour, "linestyle": look.dash, "linewidth": 1.4, "marker": dot, **more})
