"""The plots of a report: accuracy against state bytes, learning curves, accuracy by evaluation length."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dla.lab.statistics import Estimate, Row, TaskSummary, differing, is_number
from dla.plotting import (
    DPI,
    FONT,
    INK,
    LEFT,
    QUIET,
    Floats,
    Style,
    bytes_text,
    label_ends,
    leader,
    name_at,
    new_figure,
    pixels,
    png,
    room_for,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

DODGE = 0.06  # of the axis: how far points that share a length are drawn apart


@dataclass(frozen=True)
class Picture:
    caption: str
    alt: str
    png: bytes


@dataclass(frozen=True)
class Curve:
    """Learning curve of a row: mean, lowest and highest of its seeds at each step. [steps]"""

    steps: Floats
    mean: Floats
    low: Floats
    high: Floats


def draw(task: TaskSummary, style: Mapping[str, Style]) -> list[Picture]:
    """The plots that there are figures for. Raises ImportError without matplotlib."""
    import matplotlib  # noqa: F401  -- whether or not there is anything to draw

    pictures = [_bytes_plot(task, style), _curves_plot(task, style), _length_plot(task, style)]
    return [picture for picture in pictures if picture is not None]


# Accuracy against state bytes.


def _bytes_plot(task: TaskSummary, style: Mapping[str, Style]) -> Picture | None:
    points = [
        (row, bytes_, row.accuracy) for row in task.rows if (bytes_ := row.figures["state_bytes"]) and row.accuracy
    ]
    if not points:
        return None
    figure = new_figure(3.6 + 0.08 * max(0, len(points) - 8))
    ax = figure.add_axes((LEFT, 0.13, 0.97 - LEFT, 0.78))
    ax.set_xscale("log", base=2)
    for row, bytes_, accuracy in points:
        look = style[row.name]
        face = "white" if row.match else look.colour
        ax.errorbar(bytes_, accuracy.mean, accuracy.half, color=look.colour, marker=look.marker, markersize=6,
                    markerfacecolor=face, capsize=3, elinewidth=1.2, zorder=3)  # fmt: skip
    smallest, largest = min(b for _, b, _ in points), max(b for _, b, _ in points)
    ax.set_xlim(smallest / 1.6, largest * 1.6)
    _accuracy_axis(ax, task)
    ax.xaxis.set_major_formatter(lambda x, _: bytes_text(x))
    ax.set_xlabel("live state per sequence", fontsize=FONT, color=INK)
    ax.set_title("Accuracy against the size of the state", loc="left", fontsize=FONT + 1.5, color=INK)
    _label_points(ax, [(row.name, bytes_, accuracy) for row, bytes_, accuracy in points], style)
    absent = [row.name for row in task.rows if row.accuracy and not row.figures["state_bytes"]]
    caption = "Error bars: 95 % interval over seeds."
    caption += " Hollow: sized to the state bytes of another row." if any(row.match for row, _, _ in points) else ""
    caption += f" Without state bytes and so not shown: {', '.join(absent)}." if absent else ""
    told = (f"{row.name} {accuracy.mean:.3f} at {bytes_text(b)}" for row, b, accuracy in points)
    return Picture(caption, f"Accuracy against state bytes. {'; '.join(told)}", png(figure))


def _label_points(ax: Axes, points: Sequence[tuple[str, float, Estimate]], style: Mapping[str, Style]) -> None:
    """A label beside every point, at the nearest place where it covers no other label, point or error bar."""
    from matplotlib.transforms import Bbox

    unit = DPI / 72
    places = [pixels(ax, x, accuracy.mean) for _, x, accuracy in points]
    taken = [Bbox.from_bounds(x - 5 * unit, y - 5 * unit, 10 * unit, 10 * unit) for x, y in places]
    for (_, x, accuracy), (centre, _) in zip(points, places, strict=True):
        low, high = (pixels(ax, x, accuracy.mean + sign * (accuracy.half or 0))[1] for sign in (-1, 1))
        taken.append(Bbox.from_extents(centre - 2 * unit, low, centre + 2 * unit, high))
    for (name, _, _), place in zip(points, places, strict=True):
        label = name_at(ax, (0, 0), name, style[name].colour)
        size = label.get_window_extent(ax.figure.canvas.get_renderer())  # type: ignore[attr-defined]
        box = _free_place(place, size, taken, ax.get_window_extent(), unit)
        taken.append(box)
        label.set_position((box.x0, (box.y0 + box.y1) / 2))
        edge = (box.x0 if box.x0 > place[0] else box.x1, (box.y0 + box.y1) / 2)
        if abs(edge[1] - place[1]) > size.height:
            leader(ax, place, edge, style[name].colour)


def _free_place(point: tuple[float, float], size: Bbox, taken: Sequence[Bbox], inside: Bbox, unit: float) -> Bbox:
    from matplotlib.transforms import Bbox

    gap, width, height = 7 * unit, size.width, size.height
    steps = sorted(range(-16, 17), key=lambda step: (abs(step), -step))
    best, least = None, float("inf")
    for step, right in itertools.product(steps, (True, False)):
        left = point[0] + gap if right else point[0] - gap - width
        box = Bbox.from_bounds(left, point[1] + step * height / 2 - height / 2, width, height)
        out = box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1
        cost = 5 * out + sum(box.overlaps(other) for other in taken)
        if cost < least:
            best, least = box, cost
    assert best is not None
    return best


# Learning curves.


def _curves_plot(task: TaskSummary, style: Mapping[str, Style]) -> Picture | None:
    from matplotlib.ticker import LogLocator

    accuracy = {row.name: curve for row in task.rows if (curve := learning_curve(row, 2)) is not None}
    loss = {row.name: curve for row in task.rows if (curve := learning_curve(row, 1)) is not None}
    if not accuracy:
        return None
    figure = new_figure(4.4 + 0.16 * max(0, len(accuracy) - 18))
    right = room_for(figure, list(accuracy))
    upper = figure.add_axes((LEFT, 0.42, right - LEFT, 0.51))
    lower = figure.add_axes((LEFT, 0.1, right - LEFT, 0.27), sharex=upper)
    for ax, curves in ((upper, accuracy), (lower, loss)):
        for name, curve in curves.items():
            look = style[name]
            ax.plot(curve.steps, curve.mean, color=look.colour, linestyle=look.dash, linewidth=1.6, zorder=3)
            ax.fill_between(curve.steps, curve.low, curve.high, color=look.colour, alpha=0.13, linewidth=0)
    last = max(curve.steps[-1] for curve in accuracy.values())
    upper.set_xlim(0, max(last, 1))
    _accuracy_axis(upper, task)
    upper.tick_params(labelbottom=False)
    upper.set_title("Learning curves", loc="left", fontsize=FONT + 1.5, color=INK)
    if all(curve.low.min() > 0 for curve in loss.values()):
        lower.set_yscale("log", subs=[])
        lowest, highest = min(c.low.min() for c in loss.values()), max(c.high.max() for c in loss.values())
        wide = highest > 100 * lowest  # over many decades only whole powers of ten have room
        lower.yaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5), numticks=5 if wide else 8))
        lower.yaxis.set_major_formatter("{x:g}")
    tidy(lower)
    _name_upright(lower, "loss")
    lower.set_xlabel("step", fontsize=FONT, color=INK)
    ends = [(name, float(curve.steps[-1]), float(curve.mean[-1])) for name, curve in accuracy.items()]
    label_ends(upper, ends, style, lower)
    ended = "; ".join(f"{name} ends at {curve.mean[-1]:.3f}" for name, curve in accuracy.items())
    return Picture(
        "Mean over the seeds that did not diverge or fail, as far as all of them got; the band reaches from the lowest "
        "to the highest.",
        f"Accuracy and loss over training steps. {ended}",
        png(figure),
    )


def learning_curve(row: Row, column: int) -> Curve | None:
    """Column 1 (loss) or 2 (accuracy) of the finished runs' curves, over the steps that all of them reached."""
    curves = []
    for run in row.finished:
        points = [(point[0], point[column]) for point in run.get("curve") or [] if is_number(point[column])]
        if points:
            curves.append(np.array(sorted(points), dtype=np.float64).T)
    if not curves:
        return None
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    steps = np.unique(np.concatenate([steps for steps, _ in curves]))
    steps = steps[(steps >= first) & (steps <= last)]
    if not len(steps):
        return None
    values = np.stack([np.interp(steps, *curve) for curve in curves])  # [seeds, steps]
    return Curve(steps, values.mean(0), values.min(0), values.max(0))


# Accuracy by evaluation length.


def _length_plot(task: TaskSummary, style: Mapping[str, Style]) -> Picture | None:
    chosen, along = length_evaluations(task)
    lines = {row.name: _length_line(row, task, chosen) for row in task.rows}
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    lengths = sorted({length for points in lines.values() for length, _ in points})
    alt = "; ".join(f"{name} " + ", ".join(f"{e.mean:.3f} at {x:g}" for x, e in line) for name, line in lines.items())
    figure = new_figure(3.4 + 0.2 * max(0, len(lines) - 14))
    ax = figure.add_axes((LEFT, 0.13, room_for(figure, list(lines)) - LEFT, 0.76))
    ax.set_xscale("log", base=2)
    apart = (lengths[-1] / lengths[0]) ** (DODGE / len(lines))
    for i, (name, points) in enumerate(lines.items()):
        look = style[name]
        lines[name] = points = [(x * apart ** (i - (len(lines) - 1) / 2), e) for x, e in points]
        x, y, half = zip(*((x, e.mean, e.half or 0) for x, e in points), strict=True)
        ax.errorbar(x, y, half, color=look.colour, linestyle=look.dash, marker=look.marker, markersize=4.5,
                    linewidth=1.6, elinewidth=1, capsize=2.5, zorder=3)  # fmt: skip
    ax.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
    ax.set_xticks(lengths, [f"{length:g}" for length in lengths])
    ax.minorticks_off()
    ax.axvline(task.task["length"], color=QUIET, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    ax.text(task.task["length"], 1, "trained", transform=ax.get_xaxis_transform(), ha="center", va="bottom",
            fontsize=FONT - 1, color=QUIET)  # fmt: skip
    _accuracy_axis(ax, task, 1 - 0.4 * np.log(lengths[-1] / lengths[-2]) / np.log(lengths[-1] / lengths[0]))
    ax.set_xlabel("length evaluated", fontsize=FONT, color=INK)
    ax.set_title("Accuracy by evaluation length", loc="left", pad=14, fontsize=FONT + 1.5, color=INK)
    label_ends(ax, [(name, points[-1][0], points[-1][1].mean) for name, points in lines.items()], style)
    told = f" Along with the length: {', '.join(along)}." if along else ""
    return Picture(f"Error bars: 95 % interval over seeds.{told}", f"Accuracy by evaluation length. {alt}", png(figure))


def length_evaluations(task: TaskSummary) -> tuple[dict[float, int], list[str]]:
    """The evaluations at other lengths, index by length, and the options that change along.

    Those that differ in length alone; without any, all of them, if no two have the same length.
    """
    if (own := task.task.get("length")) is None:
        return {}, []
    found = [(i, other.get("length"), [name for name, _ in differing(task.task, other)])
             for i, (_, other) in enumerate(task.evaluations)]  # fmt: skip
    alone = {length: i for i, length, options in found if options == ["length"] and is_number(length)}
    if alone:
        return alone, []
    lengths = {length: i for i, length, options in found if is_number(length) and "name" not in options}
    if len(lengths) < len(found) or own in lengths:
        return {}, []
    return lengths, sorted({name for _, _, options in found for name in options} - {"length"})


def _length_line(row: Row, task: TaskSummary, chosen: Mapping[float, int]) -> list[tuple[float, Estimate]]:
    points: list[tuple[float, Estimate | None]] = [(length, row.evaluations[i]) for length, i in chosen.items()]
    points.append((task.task.get("length", 0), row.accuracy))  # 0 alone makes no line
    return sorted(((length, e) for length, e in points if e is not None), key=lambda point: point[0])


# Labels at the ends of lines.


# What the plots share.


def _accuracy_axis(ax: Axes, task: TaskSummary, named: float = 1.0) -> None:
    """`named`: where along the line of chance it is said what that is."""
    from matplotlib.patheffects import withStroke

    ax.set_ylim(0, 1.04)
    _name_upright(ax, "accuracy")
    if task.chance is not None:
        ax.axhline(task.chance, color=QUIET, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
        ax.annotate("chance", (named, task.chance), xycoords=ax.get_yaxis_transform(), xytext=(0, 2), zorder=4,
                    textcoords="offset points", ha="right", fontsize=FONT - 1, color=QUIET,
                    path_effects=[withStroke(linewidth=2, foreground="white")])  # fmt: skip
    tidy(ax)


def _name_upright(ax: Axes, name: str) -> None:
    """The y axis' name, at the same place in all plots whatever the width of the ticks' labels."""
    from matplotlib.transforms import blended_transform_factory

    ax.set_ylabel(name, fontsize=FONT, color=INK)
    ax.yaxis.set_label_coords(0.02, 0.5, transform=blended_transform_factory(ax.figure.transFigure, ax.transAxes))
