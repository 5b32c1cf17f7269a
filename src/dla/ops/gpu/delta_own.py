"""Gradients of what a chunk's tokens say to its own queries, and of its matrices: one program a chunk and head.

First, with dA = scale dO V^T for s <= t: d own = dA . P . D, and dP = dA . own . D. Then back through delta_chunks.py,
from dQ', dH and the keys' gradient dK so far:

    Q' = Q - P K           dQ  = dQ'              dP -= dQ' K^T          dK -= P^T dQ'
    P  = tril(Q K^T) U     dM  = tril(dP U^T)     dQ += dM K             dK += dM^T Q       dU = tril(Q K^T)^T dP
    H  = U^T K                                    dU += K dH^T           dK += U dH
    U  = T diag(beta)      dbeta_s = column s of (T . dU), summed
    T  = (I + L)^-1        dL  = -T^T dU U^T below the diagonal, since T^T d(T) T^T = T^T dU diag(beta) T^T
    L  = diag(beta) K K^T  dbeta_t += row t of (dL . K K^T), summed      dK += (N + N^T) K, N = diag(beta) dL
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.delta_chunks import exact, overlaps
from dla.ops.gpu.delta_walk import Operation, decays
from dla.ops.gpu.language import per_head, product, rows, tokens_of
from dla.ops.gpu.launch import launch


@triton.jit(do_not_specialize=["K", "scale"])
def delta_own(
    q, k, v, beta, T, P, weight, G, d_o, d_queries, d_old, d_keys, d_q, d_k, d_beta, d_own, seen, first, stop,
    q_stride, k_stride, v_stride, K, scale,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """d_q, d_k [tokens, H, DK], d_beta [tokens, H], d_own as the last C rows of [chunks, H, K + C, C].

    seen [tokens, H]: dO_t . O_t as far as it comes from the chunk's own tokens.
    """
    c, h = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, C)
    token, inside = tokens_of(first, stop, c, C)
    here = (c * H + h).to(tl.int64)
    q += h // GROUP * DK
    k += h // GROUP * DK
    head = token.to(tl.int64) * H + h
    d_queries += h * DK
    d_keys += h * DK
    if G is not None:
        G += h
    lower = at[None, :] <= at[:, None]
    _, _, _, D = decays(G, H, token, inside, C)
    beta_ = per_head(beta + h, H, token, inside, 0.0, C)
    square = here * C * C + at[:, None] * C + at[None, :]
    T_, P_ = tl.load(T + square), tl.load(P + square)
    U = T_ * beta_[None, :]

    d_A = tl.zeros([C, C], tl.float32)
    for d in range(0, DV, BV):
        wide = d + tl.arange(0, BV)
        d_o_ = rows(d_o + h * DV, H * DV, token, inside, wide, DV, C)
        v_ = rows(v + h * DV, v_stride, token, inside, wide, DV, C)
        d_A += product(d_o_.to(v_.dtype), tl.trans(v_), PRECISION)
    d_A = d_A * D * scale
    met = d_A * P_
    if weight is not None:
        own = (here * (K + C) + K) * C + at[None, :] * C + at[:, None]
        tl.store(d_own + own, met)
        w = tl.where(lower & inside[:, None], tl.load(weight + own), 0.0)
        met, d_A = met * w, d_A * w
    tl.store(seen + head + at * H, tl.sum(met, 1), mask=inside)

    M = overlaps(q, k, q_stride, k_stride, token, inside, DK, C, BK, PRECISION)
    M = tl.where(lower, M, 0.0)
    d_P, d_U = d_A, tl.zeros([C, C], tl.float32)
    for d in range(0, DK, BK):
        column = d + tl.arange(0, BK)
        k_ = tl.trans(rows(k, k_stride, token, inside, column, DK, C).to(tl.float32))
        d_P -= product(rows(d_queries, H * DK, token, inside, column, DK, C), k_, PRECISION)
        d_U += tl.trans(product(rows(d_keys, H * DK, token, inside, column, DK, C), k_, PRECISION))
    d_P = tl.where(lower, d_P, 0.0)
    d_M = tl.where(lower, product(d_P, tl.trans(U), EXACT), 0.0)
    d_U = tl.where(lower, d_U + product(tl.trans(M), d_P, EXACT), 0.0)
    d_beta_ = tl.sum(T_ * d_U, 0)
    N = -product(product(tl.trans(T_), d_U, EXACT), tl.trans(U), EXACT)
    N = tl.where(at[None, :] < at[:, None], N, 0.0)
    d_beta_ += tl.sum(N * overlaps(k, k, k_stride, k_stride, token, inside, DK, C, BK, PRECISION), 1)
    tl.store(d_beta + head + at * H, d_beta_, mask=inside)
    N = N * beta_[:, None]
    N += tl.trans(N)
    for d in range(0, DK, BK):
        column = d + tl.arange(0, BK)
        k_ = rows(k, k_stride, token, inside, column, DK, C).to(tl.float32)
        q_ = rows(q, q_stride, token, inside, column, DK, C).to(tl.float32)
        d_query = rows(d_queries, H * DK, token, inside, column, DK, C)
        d_key = rows(d_old + h * DK, H * DK, token, inside, column, DK, C)
        d_key += product(U, rows(d_keys, H * DK, token, inside, column, DK, C), PRECISION)
        d_key -= product(tl.trans(P_), d_query, PRECISION)
        d_key += product(tl.trans(d_M), q_, PRECISION) + product(N, k_, PRECISION)
        d_query += product(d_M, k_, PRECISION)
        place = head * DK + at[:, None] * (H * DK) + column[None, :]
        there = inside[:, None] & (column < DK)[None, :]
        tl.store(d_q + place, d_query, mask=there)
        tl.store(d_k + place, d_key, mask=there)


def own_of(x: Operation, weight: Tensor | None, d_o: Tensor, given: dict[str, Tensor | None]) -> None:
    """See ``delta_own``; ``given``: the gradients, by name."""
    arguments, c = x.arguments("delta_own")
    _, H, *_ = x.shape
    arguments |= {"q": x.q, "q_stride": x.q.stride(0), "beta": x.beta, "T": x.made.T, "weight": weight, "d_o": d_o}
    arguments |= {"EXACT": exact(), **given}
    launch(delta_own, (x.tiles.count, H), {name: arguments[name] for name in delta_own.arg_names}, c)
