"""A table as a picture: a line a row, a panel a column, a dot a seed, and the mean with its 95 % interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dla.lab.statistics import estimate
from dla.plotting import COLOURS, FONT, GRID, INK, QUIET, WIDTH, new_figure, png, short, tidy
from dla.report import one_line

LINE = 0.22  # inches
MARGIN = 0.75  # of the title and the axis


@dataclass(frozen=True)
class Panel:
    title: str
    values: Mapping[str, Sequence[float]]  # of every row's seeds
    chance: float | None = None


def draw_dots(rows: Sequence[str], panels: Sequence[Panel], value: str) -> bytes:
    """The picture, a PNG. Rows are drawn from the top; of accuracies all panels share the axis from 0 to 1."""
    figure = new_figure(MARGIN + LINE * len(rows))
    height = figure.get_figheight()
    names = labels(rows)
    left = min(0.45, 0.04 + 0.0095 * max(map(len, names)) * 7 / WIDTH)
    room = (0.985 - left) / len(panels)
    for i, panel in enumerate(panels):
        ax = figure.add_axes((left + i * room, 0.42 / height, room * 0.94, LINE * len(rows) / height))
        _draw(ax, rows, panel)
        if value == "accuracy":
            ax.set_xlim(-0.02, 1.02)
            ax.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        else:
            ax.locator_params(axis="x", nbins=2)
        ax.set_yticks(range(len(rows)), names if i == 0 else [""] * len(rows), parse_math=False)
        ax.set_title(one_line(panel.title), loc="left", fontsize=FONT, color=INK, parse_math=False)
        ax.set_xlabel(value, fontsize=FONT, color=INK)
    return png(figure)


def labels(rows: Sequence[str]) -> list[str]:
    """The rows' names without the words, up to a comma, that all of them begin with."""
    names = [row.split(", ") for row in rows]
    while len(rows) > 1 and all(len(name) > 1 and name[0] == names[0][0] for name in names):
        names = [name[1:] for name in names]
    return [short(one_line(", ".join(name))) for name in names]


def _draw(ax, rows: Sequence[str], panel: Panel) -> None:  # type: ignore[no-untyped-def]
    for y, row in enumerate(rows):
        values = panel.values.get(row, ())
        found = estimate(values)
        if found is None:
            continue
        colour, band = COLOURS[0], COLOURS[0] + "55"
        ax.scatter(values, [y] * len(values), s=11, color=INK, linewidths=0, zorder=3)
        ax.errorbar(found.mean, y, xerr=found.half, color=colour, ecolor=band, marker="|", markersize=8,
                    elinewidth=4, markeredgewidth=2, zorder=2)  # fmt: skip
    if panel.chance is not None:
        ax.axvline(panel.chance, color=QUIET, linewidth=0.8, linestyle=(0, (5, 3)), zorder=1)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    tidy(ax)
    ax.grid(axis="x", color=GRID, linewidth=0.7)
    ax.tick_params(axis="y", length=0)
