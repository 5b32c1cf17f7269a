"""The matrices of the states that live after the last step, oldest first.

A state is a run of tokens [p, e). Its whole chunks are a difference of two rows of ``states.py``; what is left at
either end, in a chunk that it shares with a neighbour, is K^T V of its tokens there. All is decayed up to the end.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import arithmetic, fade, matrix, per_head, product, put_matrix, rounded, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.states import States
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit
def some_tokens(
    k, v, k_stride, v_stride, G, total, token, mine, inside, end, chunk_end, row, column, H,
    DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """K^T V of the chunk's tokens that are ``mine``, after all decay up to row ``end``."""
    k_ = rows(k, k_stride, token, mine, row, DK, C)
    v_ = rows(v, v_stride, token, mine, column, DV, C)
    if G is not None:
        G_ = per_head(G, H, token, inside, 0.0, C)
        left = tl.exp(tl.where(inside, tl.min(G_, 0) - G_, 0.0)) * fade(total, H, end, chunk_end)
        k_ = rounded(k_ * left[:, None], FACTOR)
    return product(tl.trans(k_.to(FACTOR)), v_.to(FACTOR), PRECISION)


@triton.jit
def place_of(position, carried, first, offset, begin, n, lead, C: tl.constexpr):
    """The row before a position or before the chunk it lies in, that chunk, and whether it lies inside of it."""
    chunk = begin + (tl.maximum(position, 0) + lead) // C
    inner = (position > 0) & (tl.load(first + chunk, mask=position > 0, other=0) - tl.load(offset + n) != position)
    return tl.where(position < 0, carried + position, carried + chunk - begin), chunk, inner


@triton.jit(do_not_specialize=["carried", "K", "heads"])
def span_matrices(
    k, v, G, S, total, position, count, made, first, stop, offset, lead, chunks, k_stride, v_stride, carried, K, heads,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a sequence, state and tile [BK, BV], and head."""
    tiles: tl.constexpr = tl.cdiv(DK, BK) * tl.cdiv(DV, BV)
    part, of_all, h = tl.program_id(0) % tiles, tl.program_id(0) // tiles, tl.program_id(1)
    n, i = of_all // K, of_all % K
    row = part // tl.cdiv(DV, BV) * BK + tl.arange(0, BK)
    column = part % tl.cdiv(DV, BV) * BV + tl.arange(0, BV)
    plan_head = n * heads + (h if heads > 1 else 0)
    there = tl.load(count + plan_head)
    state = tl.zeros([BK, BV], tl.float32)
    if i < there:
        k += h // GROUP * DK
        v += h * DV
        S += h.to(tl.int64) * DK * DV
        if G is not None:
            G += h
            total += h
        begin, until, ahead = tl.load(chunks + n), tl.load(chunks + n + 1), tl.load(lead + n)
        base = begin + n * (carried + 1)
        end = carried + until - begin  # the row after the last token
        p = tl.load(position + plan_head.to(tl.int64) * K + i)
        low, low_chunk, low_inner = place_of(p, carried, first, offset, begin, n, ahead, C)
        e = tl.load(offset + n + 1) - tl.load(offset + n)
        high, high_chunk, high_inner = end, until, False
        if i + 1 < there:
            e = tl.load(position + plan_head.to(tl.int64) * K + i + 1)
            high, high_chunk, high_inner = place_of(e, carried, first, offset, begin, n, ahead, C)
        if low_inner:
            token, inside = tokens_of(first, stop, low_chunk, C)
            time = token - tl.load(offset + n) + tl.arange(0, C)
            mine = inside & (time >= p) & (time < e)
            state += some_tokens(k, v, k_stride, v_stride, G, total, token, mine, inside, base + end, base + low + 1,
                                 row, column, H, DK, DV, C, FACTOR, PRECISION)  # fmt: skip
        if high_inner & ((high > low) | (low_inner == 0)):
            token, inside = tokens_of(first, stop, high_chunk, C)
            mine = inside & (token - tl.load(offset + n) + tl.arange(0, C) < e)
            state += some_tokens(k, v, k_stride, v_stride, G, total, token, mine, inside, base + end, base + high + 1,
                                 row, column, H, DK, DV, C, FACTOR, PRECISION)  # fmt: skip
        low += low_inner.to(tl.int32)
        if high > low:
            older = matrix(S, (base + low) * H, row, column, DK, DV, low > 0)
            whole = matrix(S, (base + high) * H, row, column, DK, DV, True)
            if G is not None:
                whole = (whole - fade(total, H, base + high, base + low) * older) * fade(
                    total, H, base + end, base + high
                )
            else:
                whole = whole - older
            state += whole
    put_matrix(made, (n * H + h) * K + i, row, column, DK, DV, state)


def matrices_of(k: Tensor, v: Tensor, position: Tensor, count: Tensor, states: States, tiles: Tiles) -> Tensor:
    """[N, H, K, dk, dv] float32 of the states that begin at position [N, H or 1, K], zero from ``count`` on."""
    (_, H, dv), (N, heads, K), dk = v.shape, position.shape, k.shape[2]
    c, made = config("span_matrices", k.dtype), torch.empty(N, H, K, dk, dv, dtype=torch.float32, device=v.device)
    BK, BV = tile(dk, c["BK"]), tile(dv, c["BV"])
    arguments: dict[str, Any] = {
        "k": k,
        "v": v,
        "G": states.G,
        "S": states.S,
        "total": states.total,
        "position": position,
    }
    arguments |= {"count": count, "made": made, "k_stride": k.stride(0), "v_stride": v.stride(0)}
    arguments |= {name: getattr(tiles, name) for name in ("first", "stop", "offset", "lead", "chunks")}
    arguments |= {"carried": states.carried, "K": K, "heads": heads}
    arguments |= {"H": H, "GROUP": H // k.shape[1], "DK": dk, "DV": dv, "C": CHUNK, "BK": BK, "BV": BV}
    grid = (N * K * triton.cdiv(dk, BK) * triton.cdiv(dv, BV), H)
    launch(span_matrices, grid, arguments | arithmetic(k.dtype), c)
    return made
