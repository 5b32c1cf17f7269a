"""What a memory did with a sequence, in figures: how often it opened states, and what a read touches (W)."""

import torch

from dla.ops import Segmentation


def describe(segmentation: Segmentation, dk: int, dv: int, *, samples: int = 8) -> dict[str, float]:
    """How often states were opened, how their tokens are shared out, and what a read touches.

    boundary_rate: share of tokens that opened a state. states: how many live at the end, the mean over heads.
    tokens_min … tokens_max: quantiles of the number of tokens in a state that lives at the end, all heads together.
    W: Σ_i min(n_i (dk + dv), dk·dv) / (dk·dv), the dense-state equivalents that a read touches when a state of few
    tokens is read as its tokens; the mean over heads and over `samples` evenly spaced steps, the last one among them.
    """
    batch, length, heads = segmentation.boundary.shape
    if length == 0:
        raise ValueError("segmentation must hold at least one token; it is empty")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    steps = sorted({length * (i + 1) // samples - 1 for i in range(samples)} - {-1})
    dense = dk * dv
    weights: list[float] = []
    final: list[int] = []
    for b in range(batch):
        for h in range(heads):
            for t in steps:
                counts = [end - start for start, end in segmentation.spans(b, h, t)]
                weights.append(sum(min(n * (dk + dv), dense) for n in counts) / dense)
            final += counts
    quantiles = torch.tensor(final, dtype=torch.float64).quantile(torch.tensor([0, 0.25, 0.5, 0.75, 1.0]).double())
    names = ("tokens_min", "tokens_q25", "tokens_median", "tokens_q75", "tokens_max")
    return {
        "boundary_rate": segmentation.boundary.double().mean().item(),
        "states": len(final) / (batch * heads),
        **dict(zip(names, quantiles.tolist(), strict=True)),
        "W": sum(weights) / len(weights),
    }
