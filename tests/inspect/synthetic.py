"""Readings that no model has made: random decisions of any size, by the merge rule's own costs."""

import torch

from dla.inspect.reading import PARTITIONS, LayerReading, Reading
from dla.ops import Segmentation

RULES = {"tau": 0.6, "capacity": 30, "merge": "density", "score": "token", "block": None}


def decisions(length: int, heads: int, seed: int = 0, *, mean: float = 0.5, capacity: int = 30) -> Segmentation:
    """Scores around a mean, and the boundaries and density merges that follow from them."""
    generator = torch.Generator().manual_seed(seed)
    score = (mean + 0.25 * torch.randn(length, heads, generator=generator)).clamp(0, 2)
    score[0] = 2**0.5
    boundary = score >= RULES["tau"]
    merged = torch.full((length, heads), -1)
    # All heads at once, the states of each in a row of a table: tokens and sums of scores.
    counts = torch.zeros(heads, capacity + 1, dtype=torch.float64)
    sums = torch.zeros(heads, capacity + 1, dtype=torch.float64)
    size, rows = torch.zeros(heads, dtype=torch.int64), torch.arange(heads)
    later = torch.arange(capacity)
    for t in range(length):
        opens = boundary[t]
        full = opens & (size == capacity)
        cost = (sums[:, :-1] + sums[:, 1:]) / (counts[:, :-1] + counts[:, 1:]).clamp_min(1)
        pair = cost[:, : capacity - 1].argmin(1)
        merged[t] = torch.where(full, pair, -1)
        shift = full[:, None] & (later[None] > pair[:, None])
        for table in (counts, sums):
            joined = table[rows, pair] + torch.where(full, table[rows, pair + 1], 0)
            moved = torch.where(shift, table[:, 1:], table[:, :-1])
            table[:, :-1] = moved
            table[rows, pair] = joined
        size = size - full.long() + opens.long()
        at = size - 1
        counts[rows, at] = torch.where(opens, 0, counts[rows, at]) + 1
        sums[rows, at] = torch.where(opens, 0, sums[rows, at]) + score[t]
    return Segmentation.from_merges(score[None], boundary[None], merged[None])


def layer_of(decided: Segmentation, layer: int = 0) -> LayerReading:
    heads = decided.boundary.shape[2]
    bounds = [dict.fromkeys(PARTITIONS, 1.5) for _ in range(heads)]
    blocks = [dict.fromkeys(PARTITIONS, 30) for _ in range(heads)]
    return LayerReading(layer, "dynamic", dict(RULES), decided, 64, 64, 10_000, 100_000, bounds, blocks)


def reading(layers: list[LayerReading], pieces: list[str]) -> Reading:
    return Reading("synthetic", list(range(len(pieces))), pieces, layers)
