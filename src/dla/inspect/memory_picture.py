"""A picture of what the dynamic memories of a model kept of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dla.inspect.segmentation import ACCENT, GRID, INK
from dla.ops import Segmentation
from dla.report.plots import drawing, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WRITTEN, ASKED, STATE = "#2a9d8f", "#e9a23b", "#dfe6ee"


def draw_memory(path: Path, segmentations: Sequence[Segmentation], written: Tensor, asked: Tensor, title: str) -> None:
    """Write a picture: for every layer and head the states alive at the first question, and where states were opened.

    segmentations: one a layer, of which the first sequence is shown; written, asked [T] bool: tokens to mark, where
    answers were written and where they were asked for. Raises ImportError without matplotlib.
    """
    length = len(written)
    at = int(asked.nonzero()[0]) if bool(asked.any()) else length
    rows = [(layer, head) for layer, s in enumerate(segmentations) for head in range(s.score.shape[2])]
    with drawing(1.6 + 0.62 * (len(rows) + 1), width=12, dpi=130) as figure:
        ax = figure.subplots()
        _strip(ax, written, asked)
        for row, (layer, head) in enumerate(rows, 1):
            segmentation = segmentations[layer]
            spans = segmentation.spans(0, head, at - 1)
            ax.broken_barh([(a, b - a) for a, b in spans], (row - 0.3, 0.6), facecolors=STATE, linewidth=0)
            ax.vlines([a for a, _ in spans], row - 0.3, row + 0.3, color=INK, linewidth=1)
            opened = segmentation.boundary[0, :, head].nonzero()[:, 0].tolist()
            ax.scatter(opened, [row + 0.38] * len(opened), s=7, color=ACCENT, linewidths=0)
        ax.axvline(at, color=GRID, linewidth=1, zorder=0)
        live = [len(segmentations[layer].spans(0, head, at - 1)) for layer, head in rows]
        labels = [f"layer {layer}, head {head}\n{n} states" for (layer, head), n in zip(rows, live, strict=True)]
        ax.set_yticks(range(len(rows) + 1), ["tokens", *labels])
        ax.set(xlim=(-0.5, length + 0.5), ylim=(len(rows) + 0.6, -0.7), xlabel="token", title=title)
        ax.grid(visible=False)
        _legend(ax, at)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(figure))


def _strip(ax: Axes, written: Tensor, asked: Tensor) -> None:
    for mask, colour in ((torch.ones_like(written), GRID), (written, WRITTEN), (asked, ASKED)):
        ax.broken_barh([(t - 0.45, 0.9) for t in mask.nonzero()[:, 0].tolist()], (-0.25, 0.5), facecolors=colour)


def _legend(ax: Axes, at: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(color=WRITTEN, label="an answer is written"),
        Patch(color=ASKED, label="it is asked for"),
        Patch(facecolor=STATE, edgecolor=INK, label=f"a state alive before token {at}"),
        Line2D([], [], color=ACCENT, marker="o", markersize=3, linestyle="", label="a token opens a state"),
    ]
    ax.figure.legend(handles=handles, loc="outside lower center", ncols=4)
