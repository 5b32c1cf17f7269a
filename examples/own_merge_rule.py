"""A merge rule of your own, without touching the library: decide in Python, and let the operator follow.

    python examples/own_merge_rule.py

The operator takes decisions that were made elsewhere (``segmentation=``), with gradients and at full speed. Here, when
the list is full, the two neighbours with the fewest tokens are merged, so that states have similar sizes.
"""

import torch
from torch import Tensor

import dla

CAPACITY = 6


def smallest_pair(counts: list[int]) -> int:
    """The rule: the index of the older one of the pair to merge."""
    return min(range(len(counts) - 1), key=lambda i: counts[i] + counts[i + 1])


def decide(k: Tensor, v: Tensor, tau: float) -> dla.Segmentation:
    """Boundaries by the library's score, merges by our rule."""
    found = dla.segment(k, v, tau=tau, capacity=None)  # nothing is merged
    merged = torch.full(found.boundary.shape, -1)
    batch, time, heads = merged.shape
    for b in range(batch):
        for h in range(heads):
            counts: list[int] = []
            for t in range(time):
                if not found.boundary[b, t, h]:
                    counts[-1] += 1
                    continue
                if len(counts) == CAPACITY:
                    pair = smallest_pair(counts)
                    merged[b, t, h] = pair
                    counts[pair : pair + 2] = [counts[pair] + counts[pair + 1]]
                counts.append(1)
    return dla.Segmentation.from_merges(found.score, found.boundary, merged)


torch.manual_seed(0)
k, v, q = torch.randn(3, 1, 200, 1, 16)
lam = torch.ones(1, 200, 1, CAPACITY)
ours = decide(k, v, tau=1.2)
theirs = dla.segment(k, v, tau=1.2, capacity=CAPACITY)
print("sizes of states by our rule:     ", [end - start for start, end in ours.spans(0, 0)])
print("sizes of states by merge=density:", [end - start for start, end in theirs.spans(0, 0)])

v.requires_grad_()
o, _ = dla.dynamic_linear_attention(q, k, v, lam, tau=1.2, capacity=CAPACITY, segmentation=ours)
o.square().mean().backward()
print("outputs", tuple(o.shape), "and a gradient of norm", round(float(v.grad.norm()), 4))
