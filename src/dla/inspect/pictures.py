"""Pictures of what a memory kept of a sequence: every bar is one state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dla.ops import Segmentation
from dla.ops.segmentation import ALIVE
from dla.report.plots import COLOURS, INK, QUIET, drawing, png, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dla.inspect.reading import LayerReading
    from dla.inspect.stream import Partition

JOINS, OPENS, WRITTEN, ASKED, STATE, PALE = "#8d99ae", COLOURS[1], "#2a9d8f", "#e9a23b", "#dfe6ee", "#c9ccd1"
CLOSE_UP = 192  # tokens, the last ones
WIDE: dict[str, Any] = {"width": 12, "dpi": 130}


def draw_partitions(
    partitions: Sequence[Partition], score: Tensor, boundary: Tensor, changes: Tensor, tau: float
) -> bytes:
    """PNG: the score over time with its threshold, and below it what each partition kept.

    score, boundary, changes: [T], of one head. Raises ImportError without matplotlib.
    """
    length, heights = len(score), [1.5, 1.5, 0.42 * len(partitions) + 0.3]
    planted, opened = changes.nonzero()[:, 0], boundary.nonzero()[:, 0]
    joined = (~boundary).nonzero()[:, 0]
    with drawing(2.6 + sum(heights), **WIDE) as figure:
        whole, close, kept = figure.subplots(3, 1, height_ratios=heights)
        for ax, start, dot in ((whole, 0, 4), (close, max(0, length - CLOSE_UP), 16)):
            ax.vlines(planted, 0, 2, color=PALE, linewidth=0.7, zorder=0, label="planted change")
            ax.scatter(joined, score[joined], s=dot, color=JOINS, linewidths=0, label="joins the current state")
            ax.scatter(opened, score[opened], s=dot, color=OPENS, linewidths=0, label="opens a state")
            ax.axhline(tau, color=INK, linewidth=1, linestyle="--", label=f"threshold τ = {tau:g}")
            ax.set(xlim=(start, length), ylim=(0, 2), ylabel="score I")
            ax.set_title(f"The same, tokens {start} to {length}")
        whole.set_title("Does a token fit the current state? Its score I, for one head, over the whole stream")
        figure.legend(*close.get_legend_handles_labels(), loc="outside upper center", ncols=4)
        _draw_kept(kept, partitions)
        kept.vlines(planted, -0.95, -0.6, color=PALE, linewidth=0.9)
        return png(figure)


def _draw_kept(ax: Axes, partitions: Sequence[Partition]) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    widest = max(max(p.spread) for p in partitions) or 1.0
    colours = ScalarMappable(Normalize(0, widest), colormaps["YlGnBu"])
    for row, p in enumerate(partitions):
        _draw_states(ax, row, p.spans, colours.to_rgba(torch.tensor(p.spread).numpy()))
    names = [f"{p.name}\n{len(p.spans)} states, bound {p.bound:.0f}" for p in partitions]
    ax.set_yticks([-0.78, *range(len(partitions))], ["planted changes", *names])
    ax.set(xlim=(0, partitions[0].spans[-1][1]), ylim=(len(partitions) - 0.5, -1), xlabel="token")
    ax.set_title("What this head keeps at the end: every bar is one state, the darker the more mixed")
    ax.grid(visible=False)
    ax.figure.colorbar(colours, ax=ax, fraction=0.03, pad=0.01, aspect=14, label="spread (1 = whole stream)")


def draw_memory(segmentations: Sequence[Segmentation], written: Tensor, asked: Tensor, title: str) -> bytes:
    """PNG: for every layer and head the states alive at the first question, and where states were opened.

    segmentations: one a layer, of which the first sequence is shown; written, asked [T] bool: tokens to mark, where
    answers were written and where they were asked for. Raises ImportError without matplotlib.
    """
    length = len(written)
    at = int(asked.nonzero()[0]) if bool(asked.any()) else length
    heads = [(f"layer {i}, head {h}", s, h) for i, s in enumerate(segmentations) for h in range(s.score.shape[2])]
    names = ["tokens"]
    with drawing(1.6 + 0.62 * (len(heads) + 1), **WIDE) as figure:
        ax = figure.subplots()
        marks = {"": (PALE, torch.ones_like(asked)), "an answer is written": (WRITTEN, written)}
        for label, (colour, mask) in {**marks, "it is asked for": (ASKED, asked)}.items():
            tokens = [(t - 0.45, 0.9) for t in mask.nonzero()[:, 0].tolist()]
            ax.broken_barh(tokens, (-0.25, 0.5), facecolors=colour, label=label)
        for row, (name, segmentation, head) in enumerate(heads, 1):
            spans, opened = segmentation.spans(0, head, at - 1), segmentation.boundary[0, :, head].nonzero()[:, 0]
            _draw_states(ax, row, spans, STATE, label=f"a state alive before token {at}" if row == 1 else "")
            ax.scatter(opened, [row + 0.38] * len(opened), s=7, color=OPENS, linewidths=0,
                       label="a token opens a state" if row == 1 else "")  # fmt: skip
            names.append(f"{name}\n{len(spans)} states")
        ax.axvline(at, color=PALE, linewidth=1, zorder=0)
        ax.set_yticks(range(len(names)), names)
        ax.set(xlim=(-0.5, length + 0.5), ylim=(len(heads) + 0.6, -0.7), xlabel="token", title=title)
        ax.grid(visible=False)
        figure.legend(loc="outside lower center", ncols=4)
        return png(figure)


def _draw_states(ax: Axes, row: int, spans: Sequence[tuple[int, int]], colours: Any, label: str = "") -> None:
    ax.broken_barh([(start, end - start) for start, end in spans], (row - 0.33, 0.66), facecolors=colours, linewidth=0,
                   label=label)  # fmt: skip
    ax.vlines([start for start, _ in spans], row - 0.33, row + 0.33, color=INK, linewidth=0.8)


def draw_history(layers: Sequence[tuple[str, LayerReading]], head: int, at: int, form: str) -> bytes:
    """PNG or SVG: a head's scores over time, and below the history of its states; layers side by side with their names.

    Below, every start of a state is a line at its place in the text, from the step that opened it to the merge that
    ended it: above any step, the gaps between the lines are the states that lived then. Those alive after step ``at``
    are dark. Raises ImportError without matplotlib.
    """
    with drawing(5.2, width=1.5 + 5.5 * len(layers), dpi=130) as figure:
        axes = figure.subplots(2, len(layers), height_ratios=[1, 2.6], squeeze=False, sharex="col")
        for (name, layer), top, below in zip(layers, *axes, strict=True):
            _draw_scores(top, layer, head, at)
            _draw_lines(below, layer, head, at)
            top.set_title(f"{name}: layer {layer.layer}, head {head}")
        handles = dict(zip(*reversed(axes[1, 0].get_legend_handles_labels()), strict=True))
        for ax in axes[0]:
            handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
        return svg(figure) if form == "svg" else png(figure)


def _draw_scores(ax: Axes, layer: LayerReading, head: int, at: int) -> None:
    if layer.scored:
        score, opened = layer.decided.score[0, :, head], layer.decided.boundary[0, :, head]
        for mask, colour, label in ((~opened, JOINS, "joins the current state"), (opened, OPENS, "opens a state")):
            places = mask.nonzero()[:, 0]
            ax.scatter(places, score[places], s=5, color=colour, linewidths=0, label=label)
        if layer.rules["block"] is None:
            tau = layer.rules["tau"]
            ax.axhline(tau, color=INK, linewidth=1, linestyle="--", label=f"threshold τ = {tau:g}")
    else:
        ax.text(0.5, 0.5, "no scores: cut by position", transform=ax.transAxes, ha="center", color=QUIET)
    ax.axvline(at, color=WRITTEN, linewidth=1)
    ax.set(ylim=(0, 2), ylabel="score I")


def _draw_lines(ax: Axes, layer: LayerReading, head: int, at: int) -> None:
    death = layer.decided.death[0, :, head]
    starts, length = (death >= 0).nonzero()[:, 0], len(death)
    ends = death[starts].clamp(max=length)
    lives = (starts <= at) & (death[starts] > at)
    for mask, colour, width, label in (
        (~lives, PALE, 0.8, "a state that does not"), (lives, INK, 1.1, f"a state that lives after token {at}"),
    ):  # fmt: skip
        ax.hlines(starts[mask], starts[mask], ends[mask], color=colour, linewidth=width, label=label)
    merged = lives.logical_not() & (death[starts] < ALIVE)
    ax.scatter(ends[merged], starts[merged], s=4, color=QUIET, linewidths=0, label="where it was merged", zorder=2)
    ax.axvline(at, color=WRITTEN, linewidth=1, label=f"token {at}")
    ax.plot([0, length], [0, length], color=PALE, linewidth=0.8)
    ax.set(xlim=(0, length), ylim=(0, length), xlabel="time (tokens read)", ylabel="where in the text (token)")
    ax.grid(visible=False)
