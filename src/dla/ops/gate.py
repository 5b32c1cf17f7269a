"""The soft gate: how much of each token waits for the next state, differentiable in that token."""

from torch import Tensor

from dla.ops.decide import information, safe_norm, unit
from dla.ops.layout import Layout
from dla.ops.rules import Rules
from dla.ops.scan import Scan
from dla.ops.transitions import spread


def soft_gate(
    k: Tensor, v: Tensor, beta: Tensor | None, scanned: Scan, *, layout: Layout, rules: Rules, temperature: float
) -> Tensor:
    """p [B * T, H] from k [B, T, Hk, dk], v [B, T, H, dv], beta [B, T, H] and what the scan saw of the states."""
    dtype = scanned.score.dtype
    if rules.block is not None or scanned.reads is None:
        return scanned.boundary.to(dtype)
    reads = scanned.reads
    k, v = spread(layout.flat(k), v.shape[2] // k.shape[2]).to(dtype), layout.flat(v).to(dtype)
    norm_k, norm_v = safe_norm(k), safe_norm(v)
    k, v = unit(k, norm_k), unit(v, norm_v)
    # k^T S v with S constant: its value, and its derivatives S v and S^T k
    product = (k * reads.state_v).sum(-1) + ((v - v.detach()) * reads.state_k).sum(-1)
    steps = None if beta is None else layout.flat(beta).to(dtype)
    score = information(product, norm_k, norm_v, steps, reads.norm, rules.score)
    gate = ((score - rules.tau) / temperature).sigmoid()
    first = scanned.boundary.new_zeros(gate.shape[0])
    for start, length in zip(layout.offsets, layout.lengths, strict=True):
        if length:
            first[start] = True
    return gate.masked_fill(first[:, None], 1.0)
