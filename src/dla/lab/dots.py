"""A table as a picture: a line a row, a panel a column, a dot a seed, and the mean with its 95 % interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dla.lab.statistics import ANY, LIMITS, Limits, estimate
from dla.report import one_line
from dla.report.plots import COLOURS, FONT, INK, QUIET, drawing, png, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE = 0.22  # inches
MARGIN = 0.75  # of the title and the axis


@dataclass(frozen=True)
class Panel:
    title: str
    values: Mapping[str, Mapping[int, float]]  # of every row by seed
    chance: float | None = None


def draw_dots(rows: Sequence[str], panels: Sequence[Panel], value: str) -> bytes:
    """The picture, a PNG. Rows are drawn from the top; of accuracies all panels share the axis from 0 to 1."""
    with drawing(MARGIN + LINE * len(rows)) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for ax, panel in zip(axes, panels, strict=True):
            _draw(ax, rows, panel, LIMITS.get(value, ANY))
            ax.set_title(one_line(panel.title), fontsize=FONT)
            ax.set_xlabel(value)
            ax.grid(axis="x")
            ax.tick_params(axis="y", length=0)
            if value == "accuracy":
                ax.set_xlim(-0.02, 1.02)
                ax.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            else:
                ax.locator_params(axis="x", nbins=2)
        axes[0].set_yticks(range(len(rows)), labels(rows))
        axes[0].set_ylim(len(rows) - 0.5, -0.5)
        return png(figure)


def labels(rows: Sequence[str]) -> list[str]:
    """The rows' names without the words, up to a comma, that all of them begin with."""
    names = [row.split(", ") for row in rows]
    while len(rows) > 1 and all(len(name) > 1 and name[0] == names[0][0] for name in names):
        names = [name[1:] for name in names]
    return [short(one_line(", ".join(name))) for name in names]


def _draw(ax: Axes, rows: Sequence[str], panel: Panel, limits: Limits) -> None:
    for y, row in enumerate(rows):
        values = [*panel.values.get(row, {}).values()]
        if (found := estimate(values, limits)) is None:
            continue
        ax.scatter(values, [y] * len(values), s=11, color=INK, linewidths=0, zorder=3)
        ax.errorbar(found.mean, y, xerr=found.arms, color=COLOURS[0], ecolor=COLOURS[0] + "55", marker="|",
                    markersize=8, elinewidth=4, markeredgewidth=2, zorder=2)  # fmt: skip
    if panel.chance is not None:
        ax.axvline(panel.chance, color=QUIET, linewidth=0.8, linestyle=(0, (5, 3)), zorder=1)
