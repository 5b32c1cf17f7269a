"""Gradients of what a chunk's tokens say to its own queries, and of its matrices, in four kernels.

``delta_own``, from dA = scale dO V^T for s <= t:    d own = dA . P . D        dP = dA . own . D
                                                     dV += scale (P . D . own)^T dO

Then back through delta_chunks.py, from dQ', dH and the keys' gradient dK so far, with M = tril(Q K^T):

    ``delta_inner`` (dP, dU), ``delta_steps`` (the others)      ``delta_outer``
    Q' = Q - P K           dP  -= dQ' K^T                       dQ  = dQ'    dK -= P^T dQ'
    P  = M U               dM   = tril(dP U^T)                  dQ += dM K   dK += dM^T Q
                           dU   = tril(M^T dP)
    H  = U^T K             dU  += tril(K dH^T)                               dK += U dH
    U  = T diag(beta)      dbeta_s  = column s of T . dU, summed
    T  = (I + L)^-1        dL   = -T^T dU U^T below the diagonal, since T^T d(T) T^T = T^T dU diag(beta) T^T
    L  = diag(beta) K K^T  dbeta_t += row t of dL . K K^T, summed            dK += (N + N^T) K, N = diag(beta) dL
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.delta_chunks import overlaps
from dla.ops.gpu.delta_operation import Operation
from dla.ops.gpu.delta_recent import between, own_products
from dla.ops.gpu.language import per_head, product, rounded, rows, tokens_of


@triton.jit
def square_of(number, C: tl.constexpr):
    """Where matrix ``number`` of [.., C, C] is."""
    at = tl.arange(0, C)
    return number.to(tl.int64) * C * C + at[:, None] * C + at[None, :]


@triton.jit(do_not_specialize=["states", "scale"])
def delta_own(
    v, P, weight, G, d_o, d_v, d_P, d_own, seen, first, stop, v_stride, states, scale,
    H: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """d_P [chunks, H, C, C], d_own as the last C rows of [chunks, H, states + C, C].

    seen [tokens, H]: dO_t . O_t as far as it comes from the chunk's own tokens.
    """
    c, h = tl.program_id(0), tl.program_id(1)
    at, here = tl.arange(0, C), c * H + h
    token, inside = tokens_of(first, stop, c, C)
    if G is not None:
        G += h
    d_A = tl.zeros([C, C], tl.float32)
    for d in range(0, DV, BV):
        column = d + tl.arange(0, BV)
        d_o_ = rows(d_o + h * DV, H * DV, token, inside, column, DV, C)
        v_ = rows(v + h * DV, v_stride, token, inside, column, DV, C)
        d_A += product(d_o_.to(v_.dtype), tl.trans(v_), PRECISION)
    D = between(G, H, token, inside, C)
    d_A = d_A * D * scale
    met = d_A * tl.load(P + square_of(here, C))
    if weight is not None:
        own = (here.to(tl.int64) * (states + C) + states) * C + at[None, :] * C + at[:, None]
        tl.store(d_own + own, met)
        w = tl.load(weight + own, mask=(at[None, :] <= at[:, None]) & inside[:, None], other=0.0)
        met, d_A = met * w, d_A * w
    tl.store(seen + token.to(tl.int64) * H + h + at * H, tl.sum(met, 1), mask=inside)
    tl.store(d_P + square_of(here, C), d_A)
    A = tl.trans(rounded(own_products(P, weight, D, here, states, C) * scale, FACTOR))
    for d in range(0, DV, BV):
        column = d + tl.arange(0, BV)
        d_o_ = rows(d_o + h * DV, H * DV, token, inside, column, DV, C).to(FACTOR)
        place = (token.to(tl.int64) * H + h) * DV + at[:, None] * (H * DV) + column[None, :]
        there = inside[:, None] & (column < DV)[None, :]
        past = tl.load(d_v + place, mask=there, other=0.0)
        tl.store(d_v + place, past + product(A, d_o_, PRECISION), mask=there)


@triton.jit
def delta_inner(
    q, k, d_P, d_U, d_queries, d_keys, first, stop, q_stride, k_stride,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_P and d_U [chunks, H, C, C]; the first is changed."""
    c, h = tl.program_id(0), tl.program_id(1)
    at, square = tl.arange(0, C), square_of(c * H + h, C)
    token, inside = tokens_of(first, stop, c, C)
    q += h // GROUP * DK
    k += h // GROUP * DK
    lower = at[None, :] <= at[:, None]
    d_P_, by_key = tl.load(d_P + square), tl.zeros([C, C], tl.float32)
    for d in range(0, DK, BK):
        column = d + tl.arange(0, BK)
        k_ = tl.trans(rows(k, k_stride, token, inside, column, DK, C).to(tl.float32))
        d_P_ -= product(rows(d_queries + h * DK, H * DK, token, inside, column, DK, C), k_, PRECISION)
        by_key += product(rows(d_keys + h * DK, H * DK, token, inside, column, DK, C), k_, PRECISION)
    d_P_ = tl.where(lower, d_P_, 0.0)
    tl.store(d_P + square, d_P_)
    M = tl.where(lower, overlaps(q, k, q_stride, k_stride, token, inside, DK, C, BK, PRECISION), 0.0)
    d_U_ = tl.trans(by_key) + product(tl.trans(M), d_P_, PRECISION)
    tl.store(d_U + square, tl.where(lower, d_U_, 0.0))


@triton.jit
def delta_steps(
    k, beta, T, d_P, d_U, d_M, d_N, scratch, d_beta, first, stop, k_stride,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_M (dM) and d_N (N) [chunks, H, C, C], d_beta [tokens, H]; BK columns at a time, which saves registers."""
    c, h = tl.program_id(0), tl.program_id(1)
    at, place = tl.arange(0, C), (c * H + h).to(tl.int64) * C * C
    token, inside = tokens_of(first, stop, c, C)
    k += h // GROUP * DK
    square = square_of(c * H + h, C)
    d_beta_ = tl.sum(tl.load(T + square) * tl.load(d_U + square), 0)
    beta_ = per_head(beta + h, H, token, inside, 0.0, C)
    for i in range(0, C, BK):
        s = i + tl.arange(0, BK)
        some = place + at[:, None] * C + s[None, :]
        U = tl.load(T + place + s[:, None] * C + at[None, :]) * beta_[None, :]
        M = product(tl.load(d_P + square), tl.trans(U), PRECISION)
        tl.store(d_M + some, tl.where(s[None, :] <= at[:, None], M, 0.0))
        tl.store(scratch + some, product(tl.trans(tl.load(T + square)), tl.load(d_U + some), PRECISION))
    tl.debug_barrier()  # other threads read what was written
    for i in range(0, C, BK):
        s = i + tl.arange(0, BK)
        U = tl.load(T + place + s[:, None] * C + at[None, :]) * beta_[None, :]
        L = -product(tl.load(scratch + square), tl.trans(U), PRECISION)
        L = tl.where(s[None, :] < at[:, None], L, 0.0)
        there = token + s < tl.load(stop + c)
        KK = tl.zeros([C, BK], tl.float32)
        for d in range(0, DK, BK):
            column = d + tl.arange(0, BK)
            k_ = rows(k, k_stride, token, inside, column, DK, C)
            KK += product(k_, tl.trans(rows(k, k_stride, token + i, there, column, DK, BK)), PRECISION)
        d_beta_ += tl.sum(L * KK, 1)
        tl.store(d_N + place + at[:, None] * C + s[None, :], L * beta_[:, None])
    tl.store(d_beta + token.to(tl.int64) * H + h + at * H, d_beta_, mask=inside)


@triton.jit
def delta_outer(
    q, k, beta, T, P, d_M, d_N, d_queries, d_old, d_keys, d_q, d_k, first, stop, q_stride, k_stride,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk, head and BK columns of d_q, d_k [tokens, H, DK]."""
    tiles: tl.constexpr = tl.cdiv(DK, BK)
    c, h = tl.program_id(0) // tiles, tl.program_id(1)
    column, at = tl.program_id(0) % tiles * BK + tl.arange(0, BK), tl.arange(0, C)
    token, inside = tokens_of(first, stop, c, C)
    square = square_of(c * H + h, C)
    transposed = (c * H + h).to(tl.int64) * C * C + at[None, :] * C + at[:, None]
    k_ = rows(k + h // GROUP * DK, k_stride, token, inside, column, DK, C).to(tl.float32)
    d_query = rows(d_queries + h * DK, H * DK, token, inside, column, DK, C)
    d_key = rows(d_old + h * DK, H * DK, token, inside, column, DK, C)
    d_key -= product(tl.trans(tl.load(P + square)), d_query, PRECISION)
    d_key += product(tl.load(d_N + square) + tl.load(d_N + transposed), k_, PRECISION)
    M = tl.load(d_M + square)
    d_query += product(M, k_, PRECISION)
    q_ = rows(q + h // GROUP * DK, q_stride, token, inside, column, DK, C).to(tl.float32)
    d_key += product(tl.trans(M), q_, PRECISION)
    U = tl.load(T + square) * per_head(beta + h, H, token, inside, 0.0, C)[None, :]
    d_key += product(U, rows(d_keys + h * DK, H * DK, token, inside, column, DK, C), PRECISION)
    place = (token.to(tl.int64) * H + h) * DK + at[:, None] * (H * DK) + column[None, :]
    there = inside[:, None] & (column < DK)[None, :]
    tl.store(d_q + place, d_query, mask=there)
    tl.store(d_k + place, d_key, mask=there)


def through_chunks(
    x: Operation, d_o: Tensor, d_chunk: dict[str, Tensor], d_weight: Tensor, d_v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k [tokens, H, dk] and beta; and ``seen`` of ``delta_own``. Fills in d_weight's rows of tokens,
    and adds to d_v."""
    d_q, d_k = (torch.empty_like(d_chunk["d_queries"]) for _ in range(2))
    d_beta, seen = torch.empty_like(x.beta), torch.empty_like(x.beta)
    d_P, d_U, d_M, d_N, scratch = (torch.empty_like(x.made.T) for _ in range(5))
    given = {"q": x.q, "q_stride": x.q.stride(0), "beta": x.beta, "T": x.made.T, "d_o": d_o}
    given |= {"d_q": d_q, "d_k": d_k, "d_beta": d_beta, "d_own": d_weight, "seen": seen, "d_v": d_v}
    given |= {"d_P": d_P, "d_U": d_U, "d_M": d_M, "d_N": d_N, "scratch": scratch, **d_chunk}
    for kernel, sizes in ((delta_own, ""), (delta_inner, ""), (delta_steps, ""), (delta_outer, "BK")):
        x.launch(kernel, (x.tiles.count, x.v.shape[1]), given, sizes)
    return d_q, d_k, d_beta, seen
