"""The plots of a report: accuracy against state bytes, learning curves, accuracy by evaluation length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dla.lab.statistics import Contender, TaskSummary, differing
from dla.report import is_number
from dla.report.page import Picture
from dla.report.plots import FONT, QUIET, Floats, Style, drawing, label_ends, label_points, png
from dla.report.words import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DODGE = 0.06  # of the axis: how far points that share a length are drawn apart


@dataclass(frozen=True)
class Curve:
    """Learning curve of a contender: mean, lowest and highest of its seeds at each step. [steps]"""

    steps: Floats
    mean: Floats
    low: Floats
    high: Floats


def draw(task: TaskSummary, style: Mapping[str, Style]) -> list[Picture]:
    """The plots that there are figures for. Raises ImportError without matplotlib."""
    pictures = [_bytes_plot(task, style), _curves_plot(task, style), _length_plot(task, style)]
    return [picture for picture in pictures if picture is not None]


def _bytes_plot(task: TaskSummary, style: Mapping[str, Style]) -> Picture | None:
    rows = [(one, size, one.accuracy) for one in task.rows if (size := one.figures["state_bytes"]) and one.accuracy]
    if not rows:
        return None
    with drawing(3.6 + 0.08 * max(0, len(rows) - 8)) as figure:
        ax = figure.subplots()
        for one, size, accuracy in rows:
            look, face = style[one.name], "white" if one.match else style[one.name].colour
            ax.errorbar(size, accuracy.mean, accuracy.arms, color=look.colour, marker=look.marker, markersize=6,
                        markerfacecolor=face, capsize=3, elinewidth=1.2, zorder=3)  # fmt: skip
        sizes = [size for _, size, _ in rows]
        ax.set_xscale("log", base=2)
        ax.set(xlim=(min(sizes) / 1.6, max(sizes) * 1.6), xlabel="live state per sequence",
               title="Accuracy against the size of the state")  # fmt: skip
        ax.xaxis.set_major_formatter(lambda x, _: bytes_text(x))
        label_ends(ax, [], style, across=_accuracy_axis(ax, task))
        label_points(ax, [(one.name, size, e.mean, (e.low, e.high)) for one, size, e in rows], style)
        drawn = png(figure)
    absent = [one.name for one in task.rows if one.accuracy and not one.figures["state_bytes"]]
    caption = "Error bars: 95 % interval over seeds."
    caption += " Hollow: sized to the state bytes of another row." if any(one.match for one, _, _ in rows) else ""
    caption += f" Without state bytes and so not shown: {', '.join(absent)}." if absent else ""
    told = (f"{one.name} {accuracy.mean:.3f} at {bytes_text(size)}" for one, size, accuracy in rows)
    return Picture(caption, f"Accuracy against state bytes. {'; '.join(told)}", drawn)


def _curves_plot(task: TaskSummary, style: Mapping[str, Style]) -> Picture | None:
    accuracy = {one.name: curve for one in task.rows if (curve := learning_curve(one, 2)) is not None}
    loss = {one.name: curve for one in task.rows if (curve := learning_curve(one, 1)) is not None}
    if not accuracy:
        return None
    with drawing(4.4 + 0.16 * max(0, len(accuracy) - 18)) as figure:
        upper, lower = figure.subplots(2, 1, height_ratios=(2, 1), sharex=True)
        for ax, curves in ((upper, accuracy), (lower, loss)):
            for name, curve in curves.items():
                look = style[name]
                ax.plot(curve.steps, curve.mean, color=look.colour, linestyle=look.dash, zorder=3)
                ax.fill_between(curve.steps, curve.low, curve.high, color=look.colour, alpha=0.13, linewidth=0)
        last = max(curve.steps[-1] for curve in accuracy.values())
        upper.set(xlim=(0, max(last, 1)), title="Learning curves")
        chance = _accuracy_axis(upper, task)
        _loss_axis(lower, loss)
        lower.set_xlabel("step")
        figure.align_ylabels()
        ends = [(name, float(curve.steps[-1]), float(curve.mean[-1])) for name, curve in accuracy.items()]
        label_ends(upper, ends, style, lower, chance)
        drawn = png(figure)
    ended = "; ".join(f"{name} ends at {curve.mean[-1]:.3f}" for name, curve in accuracy.items())
    return Picture(
        "Mean over the seeds that did not diverge or fail, as far as all of them got; the band reaches from the lowest "
        "to the highest.",
        f"Accuracy and loss over training steps. {ended}",
        drawn,
    )


def _loss_axis(ax: Axes, loss: Mapping[str, Curve]) -> None:
    from matplotlib.ticker import LogLocator

    ax.set_ylabel("loss")
    ends = [end for curve in loss.values() for end in (curve.low.min(), curve.high.max())]
    if not ends or min(ends) <= 0:
        return
    ax.set_yscale("log", subs=[])
    wide = max(ends) > 100 * min(ends)  # over many decades only whole powers of ten have room
    ax.yaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5), numticks=5 if wide else 8))
    ax.yaxis.set_major_formatter("{x:g}")


def learning_curve(one: Contender, column: int) -> Curve | None:
    """Column 1 (loss) or 2 (accuracy) of the finished runs' curves, over the steps that all of them reached."""
    curves = []
    for run in one.finished:
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


def _length_plot(task: TaskSummary, style: Mapping[str, Style]) -> Picture | None:
    chosen, along = length_evaluations(task)
    trained, lines = float(task.task.get("length") or 0), {}
    for one in task.rows:
        found = {length: one.evaluations[i] for length, i in chosen.items()} | {trained: one.accuracy}
        line = [(length, e) for length, e in sorted(found.items(), key=lambda point: point[0]) if e is not None]
        if len(line) > 1:
            lines[one.name] = line
    if not lines:
        return None
    lengths = sorted({length for points in lines.values() for length, _ in points})
    with drawing(3.4 + 0.2 * max(0, len(lines) - 14)) as figure:
        ax = figure.subplots()
        ax.set_xscale("log", base=2)
        apart = (lengths[-1] / lengths[0]) ** (DODGE / len(lines))
        ends = []
        for i, (name, points) in enumerate(lines.items()):
            look = style[name]
            x = [length * apart ** (i - (len(lines) - 1) / 2) for length, _ in points]
            y, arms = [e.mean for _, e in points], np.hstack([e.arms for _, e in points])
            ax.errorbar(x, y, arms, color=look.colour, linestyle=look.dash, marker=look.marker, markersize=4.5,
                        elinewidth=1, capsize=2.5, zorder=3)  # fmt: skip
            ends.append((name, x[-1], y[-1]))
        ax.set(xlim=(lengths[0] / 1.15, lengths[-1] * 1.15), xlabel="length evaluated")
        ax.set_xticks(lengths, [f"{length:g}" for length in lengths])
        ax.minorticks_off()
        ax.axvline(trained, color=QUIET, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        ax.text(trained, 1, "trained", transform=ax.get_xaxis_transform(), ha="center", va="bottom",
                fontsize=FONT - 1, color=QUIET)  # fmt: skip
        chance = _accuracy_axis(ax, task)
        ax.set_title("Accuracy by evaluation length", pad=14)
        label_ends(ax, ends, style, across=chance)
        drawn = png(figure)
    alt = "; ".join(f"{name} " + ", ".join(f"{e.mean:.3f} at {x:g}" for x, e in line) for name, line in lines.items())
    told = f" Along with the length: {', '.join(along)}." if along else ""
    return Picture(f"Error bars: 95 % interval over seeds.{told}", f"Accuracy by evaluation length. {alt}", drawn)


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


def _accuracy_axis(ax: Axes, task: TaskSummary) -> list[tuple[str, float]]:
    """From 0 to 1, with a dashed line at chance: its name, which goes to the margin, and its height."""
    ax.set(ylim=(0, 1.04), ylabel="accuracy")
    if task.chance is None:
        return []
    ax.axhline(task.chance, color=QUIET, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
    return [("chance", task.chance)]
