"""What the delta rule's transitions do inside a chunk, for all states alike: one program a chunk and head.

Decays are numbers that every state shares, and stay apart. With A_t = I - beta_t k_t k_t^T, a chunk of C tokens takes a
state S to A_C ... A_1 S + sum_s A_C ... A_{s+1} beta_s k_s v_s^T. With the triangular matrix

    L[t, s] = beta_t k_t . k_s for s < t        T = (I + L)^-1        U = T diag(beta)

and K, Q the chunk's keys and queries, all that is ever needed of this is

    H  = U^T K           row s: the key that token s leaves at the chunk's end
    P  = tril(Q K^T) U   P[t, s]: what token s gives to query t
    Q' = Q - P K         the queries, as they meet a state at the chunk's start

since then S <- S - H^T (K S) + H^T V, and query t reads sum_s P[t, s] v_s + Q'_t S. So every memory reads and writes as
without beta, with these in place of its queries, products and keys, and moves what it held before by two products.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import arithmetic, per_head, product, rounded, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit
def unit_inverse(L, C: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular L [C, C], by elimination, column after column.

    (Sums of powers of L, as products, would be far larger than the inverse is: keys that repeat themselves would lose
    all digits.)
    """
    at = tl.arange(0, C)
    row, column = at[:, None], at[None, :]
    T = tl.where(row == column, 1.0, 0.0)
    for s in range(C - 1):
        below = tl.sum(tl.where(column == s, L, 0.0), 1)
        T -= below[:, None] * tl.sum(tl.where(row == s, T, 0.0), 0)[None, :]
    return T


@triton.jit
def overlaps(x, y, x_stride, y_stride, token, inside, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """x_t . y_s [C, C] of a chunk's rows."""
    total = tl.zeros([C, C], tl.float32)
    for d in range(0, DK, BK):
        column = d + tl.arange(0, BK)
        x_ = rows(x, x_stride, token, inside, column, DK, C)
        y_ = rows(y, y_stride, token, inside, column, DK, C)
        total += product(x_, tl.trans(y_), PRECISION)
    return total


@triton.jit
def delta_chunks(
    q, k, beta, T, P, queries, keys, first, stop, q_stride, k_stride,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T, P [chunks, H, C, C]; queries Q' and keys H [tokens, H, DK]."""
    c, h = tl.program_id(0), tl.program_id(1)
    token, inside = tokens_of(first, stop, c, C)
    at = tl.arange(0, C)
    q += h // GROUP * DK
    k += h // GROUP * DK
    beta_ = per_head(beta + h, H, token, inside, 0.0, C)
    L = overlaps(k, k, k_stride, k_stride, token, inside, DK, C, BK, PRECISION) * beta_[:, None]
    T_ = unit_inverse(tl.where(at[:, None] > at[None, :], L, 0.0), C)
    U = T_ * beta_[None, :]
    table = (c * H + h).to(tl.int64) * C * C
    square = table + at[:, None] * C + at[None, :]
    tl.store(T + square, T_)
    tl.debug_barrier()  # other threads read what was written
    M = overlaps(q, k, q_stride, k_stride, token, inside, DK, C, BK, PRECISION)
    M = tl.where(at[:, None] >= at[None, :], M, 0.0)
    for i in range(0, C, BK):  # some columns at a time, which saves registers
        some = table + at[:, None] * C + i + tl.arange(0, BK)[None, :]
        beta_some = per_head(beta + h, H, token + i, token + i + tl.arange(0, BK) < tl.load(stop + c), 0.0, BK)
        tl.store(P + some, product(M, tl.load(T + some) * beta_some[None, :], PRECISION))
    tl.debug_barrier()
    P_ = tl.load(P + square)
    queries += (token.to(tl.int64) * H + h) * DK
    keys += (token.to(tl.int64) * H + h) * DK
    for d in range(0, DK, BK):
        column = d + tl.arange(0, BK)
        k_ = rows(k, k_stride, token, inside, column, DK, C).to(tl.float32)
        q_ = rows(q, q_stride, token, inside, column, DK, C).to(tl.float32) - product(P_, k_, PRECISION)
        place, there = at[:, None] * (H * DK) + column[None, :], inside[:, None] & (column < DK)[None, :]
        tl.store(queries + place, rounded(q_, FACTOR), mask=there)
        tl.store(keys + place, rounded(product(tl.trans(U), k_, PRECISION), FACTOR), mask=there)


@dataclass(frozen=True)
class ChunkMatrices:
    """What ``delta_chunks`` made; the last two in the dtype that products with states are taken in."""

    T: Tensor  # [chunks, H, CHUNK, CHUNK] float32
    P: Tensor  # [chunks, H, CHUNK, CHUNK] float32
    queries: Tensor  # [tokens, H, dk]
    keys: Tensor  # [tokens, H, dk]


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """What computed operands of products are stored in, as ``arithmetic`` has it."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def chunk_matrices_of(q: Tensor, k: Tensor, beta: Tensor, tiles: Tiles) -> ChunkMatrices:
    """q, k [tokens, Hk, dk], beta [tokens, H] float32."""
    (tokens, H), dk, c = beta.shape, k.shape[2], config("delta_chunks", k.dtype)
    T, P = (torch.empty(tiles.count, H, CHUNK, CHUNK, dtype=torch.float32, device=k.device) for _ in range(2))
    queries, keys = (torch.empty(tokens, H, dk, dtype=factor_dtype(k.dtype), device=k.device) for _ in range(2))
    arguments: dict[str, Any] = {"q": q, "k": k, "beta": beta, "T": T, "P": P, "queries": queries, "keys": keys}
    arguments |= {"first": tiles.first, "stop": tiles.stop, "q_stride": q.stride(0), "k_stride": k.stride(0)}
    arguments |= {"H": H, "GROUP": H // k.shape[1], "DK": dk, "C": CHUNK, "BK": tile(dk, c["BK"])}
    launch(delta_chunks, (tiles.count, H), arguments | arithmetic(k.dtype), c)
    return ChunkMatrices(T, P, queries, keys)
