"""What the transitions A_t = exp(g_t) (I - beta_t k_t k_t^T) do inside a chunk, as matrices.

Every memory reads a chunk through the same four quantities, whatever its states are: with t, s positions in the chunk,

    P[t, s] = q_t^T A_t ... A_{s+1} k_s (beta_s)      how token s reaches the query at t
    Q[t]    = (A_t ... A_1)^T q_t                     the query, against the states at the chunk's start
    Z[s]    = A_C ... A_{s+1} k_s (beta_s)            the key that token s leaves at the chunk's end
    T       = A_C ... A_1                             what happens to a state over the chunk

so that o_t = sum_s weight P[t, s] v_s + sum_i weight Q[t]^T S_i, and S_i becomes T S_i + sum_s Z[s] v_s^T.
With beta they come from the UT form, one triangular solve a chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NOTHING = -1000.0  # a log-decay after which nothing is left, in float64 too


@dataclass
class Transitions:
    """Shapes with heads H and G chunks of C tokens: [n, H, G, ...]."""

    P: Tensor | None  # [n, H, G, C, C] lower triangular
    Q: Tensor | None  # [n, H, G, C, dk]
    Z: Tensor  # [n, H, G, C, dk]
    T: Tensor | None  # [n, H, G, dk, dk], or [n, H, G, 1, 1] for a scalar decay, or None for the identity


def transitions(q: Tensor | None, k: Tensor, g: Tensor | None, beta: Tensor | None, heads: int) -> Transitions:
    """From q, k [n, Hk, G, C, dk] and g, beta [n, H, G, C]; q=None leaves out what only reads need."""
    C, group = k.shape[3], heads // k.shape[1]
    causal = torch.ones(C, C, dtype=torch.bool, device=k.device).tril()
    decay = causal.to(k.dtype) if g is None else _segment_sums(g, causal).exp()  # [.., C, C] from s to t
    since_start = None if g is None else g.cumsum(-1).exp()  # [n, H, G, C]
    keys = spread(k, group)
    fading = keys if since_start is None else keys * since_start[..., None]  # keys as they meet the chunk's start
    leaving = keys if g is None else keys * decay[..., -1, :, None]
    P = Q = None
    if q is not None:
        P = spread(q @ k.transpose(-1, -2), group) * decay
        Q = spread(q, group) if since_start is None else spread(q, group) * since_start[..., None]
    if beta is None:
        return Transitions(P, Q, leaving, None if since_start is None else since_start[..., -1:, None])
    # U = (I + tril(diag(beta) (K K^T * decay), -1))^-1 diag(beta) turns values into what the delta rule writes
    overlap = spread(k @ k.transpose(-1, -2), group) * decay * beta[..., None]
    U = torch.linalg.solve_triangular(overlap, torch.diag_embed(beta), upper=False, unitriangular=True)
    Z = U.transpose(-1, -2) @ leaving
    T = -Z.transpose(-1, -2) @ fading
    whole = T.new_ones(()) if since_start is None else since_start[..., -1:]
    T = T + torch.diag_embed(whole.expand(*T.shape[:-1]))
    if P is not None and Q is not None:
        P = P @ U
        Q = Q - P @ fading
    return Transitions(P, Q, Z, T)


def spread(x: Tensor, group: int) -> Tensor:
    """Give every head its key group's entry: [n, Hk, ...] -> [n, H, ...]"""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _segment_sums(g: Tensor, causal: Tensor) -> Tensor:
    """sum of g over (s, t], -inf above the diagonal: [.., C] -> [.., C, C].

    The running sum is float64 and its steps are cut where their exponential is 0 anyway, so that the differences keep
    their digits next to strong decays; rounding is monotone, so none is positive.
    """
    total = g.double().clamp_min(NOTHING).cumsum(-1)
    return (total[..., :, None] - total[..., None, :]).to(g.dtype).masked_fill(~causal, -torch.inf)
