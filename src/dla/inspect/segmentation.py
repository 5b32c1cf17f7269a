"""A segmentation as figures and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dla.inspect.theory import block_heterogeneity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

INK, ACCENT, GRID = "#333333", "#d1495b", "#c9ccd1"


@dataclass(frozen=True)
class Partition:
    """A stream cut into contiguous blocks."""

    name: str
    blocks: list[int]  # lengths, oldest first
    bound: float  # Theorem 1 for a query of norm 1
    spread: list[float]  # per block: mean squared distance of its tokens from their mean; 1 = the whole stream's

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of each block, end exclusive."""
        ends = torch.tensor(self.blocks).cumsum(0).tolist()
        return [(end - n, end) for end, n in zip(ends, self.blocks, strict=True)]


def token_states(k: Tensor, v: Tensor) -> Tensor:
    """What each token writes, flattened. k [T, dk], v [T, dv] -> [T, dk·dv]."""
    return torch.einsum("tk,tv->tkv", k, v).flatten(1)


def partition(name: str, u: Tensor, blocks: Sequence[int]) -> Partition:
    """The figures of a partition of the contributions u [T, d] into blocks of the given lengths."""
    within, lengths = block_heterogeneity(u, blocks), torch.tensor(blocks, device=u.device)
    bound = (lengths * within).sqrt().sum()  # of Theorem 1: it depends on the query's norm alone
    whole = block_heterogeneity(u, [len(u)]) / len(u)
    spread = within / lengths / whole.clamp_min(torch.finfo(torch.float64).tiny)
    return Partition(name, list(blocks), bound.item(), spread.tolist())


def draw(
    path: Path,
    partitions: Sequence[Partition],
    score: Tensor,
    boundary: Tensor,
    changes: Tensor,
    tau: float,
    zoom: tuple[int, int] | None = None,
) -> None:
    """Write a picture: the score over time with its threshold, and below it what each partition kept.

    score, boundary, changes: [T], of one head. zoom: the (start, end) of the close-up; None takes the last 192 tokens.
    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    length = len(score)
    zoom = (max(0, length - 192), length) if zoom is None else zoom
    heights = [1.5, 1.5, 0.42 * len(partitions) + 0.3]
    figure, axes = plt.subplots(
        3, 1, figsize=(12, 2.6 + sum(heights)), height_ratios=heights, layout="constrained", facecolor="white"
    )
    whole, close, kept = axes
    _score_axes(whole, score, boundary, changes, tau, (0, length), dot=4)
    whole.set_title(
        "Does a token fit the current state? Its score I, for one head, over the whole stream", loc="left", fontsize=10
    )
    _score_axes(close, score, boundary, changes, tau, zoom, dot=16)
    close.set_title(f"The same, tokens {zoom[0]} to {zoom[1]}", loc="left", fontsize=10)
    handles, labels = close.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    colours = _partition_axes(kept, partitions, changes)
    bar = figure.colorbar(colours, ax=kept, fraction=0.03, pad=0.01, aspect=14)
    bar.set_label("spread inside a state\n(1 = whole stream)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _score_axes(
    ax: Axes, score: Tensor, boundary: Tensor, changes: Tensor, tau: float, window: tuple[int, int], dot: float
) -> None:
    start, end = window
    time = torch.arange(start, end)
    score, opens = score[start:end].float().cpu(), boundary[start:end].bool().cpu()
    planted = (changes[start:end].nonzero().flatten() + start).tolist()
    ax.vlines(planted, 0, 2, color=GRID, linewidth=0.7, zorder=0, label="planted change")
    ax.scatter(time[~opens], score[~opens], s=dot, color="#8d99ae", linewidths=0, label="joins the current state")
    ax.scatter(time[opens], score[opens], s=dot, color=ACCENT, linewidths=0, label="opens a state")
    ax.axhline(tau, color=INK, linewidth=1, linestyle="--", label=f"threshold τ = {tau:g}")
    ax.set(xlim=(start, end), ylim=(0, 2), ylabel="score I")
    _tidy(ax)


def _partition_axes(ax: Axes, partitions: Sequence[Partition], changes: Tensor) -> ScalarMappable:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    length = sum(partitions[0].blocks)
    widest = max(max(p.spread) for p in partitions) or 1.0
    colours = ScalarMappable(Normalize(0, widest), colormaps["YlGnBu"])
    for row, p in enumerate(partitions):
        widths = [(start, end - start) for start, end in p.spans]
        rgba = colours.to_rgba(np.asarray(p.spread))
        ax.broken_barh(widths, (row - 0.36, 0.62), facecolors=rgba, linewidth=0)
        starts = [start for start, _ in p.spans]
        ax.vlines(starts, row - 0.36, row + 0.36, color=INK, linewidth=0.6)
    planted = changes.nonzero().flatten().tolist()
    ax.vlines(planted, -0.95, -0.6, color=GRID, linewidth=0.9)
    ax.text(-0.005, -0.78, "planted changes", transform=ax.get_yaxis_transform(), ha="right", va="center", fontsize=8)
    labels = [f"{p.name}\n{len(p.blocks)} states, bound {p.bound:.0f}" for p in partitions]
    ax.set_yticks(range(len(partitions)), labels, fontsize=8)
    ax.set(xlim=(0, length), ylim=(len(partitions) - 0.5, -1), xlabel="token")
    ax.set_title(
        "What this head keeps at the end: every bar is one state, the darker the more mixed", loc="left", fontsize=10
    )
    _tidy(ax)
    return colours


def _tidy(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
