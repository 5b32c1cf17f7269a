"""The plain one-state recurrence at every chunk's start: S <- e^g S + k v^T, with no decision at all.

A memory's state, a run of tokens from one chunk's start to another's, is then a difference of two of its rows. Each
sequence has rows of its own: one before each of the ``carried`` states it goes on from (oldest first), one before each
of its chunks, and one after the last.

    two states carried in, three chunks:      row      0     1       2      3         4         5
                                              before   A     B       0      1         2         (end)
                                              S        0     A       A + B  A + B + first chunk ...

``total`` has the sum of g up to each row, from the call's start, in float64: over a long past only that leaves digits
to a difference. Inside a chunk, G_t is the sum of its tokens' g up to t.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import arithmetic, matrix, per_head, product, put_matrix, rounded, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.tiles import CHUNK, Tiles

NOTHING_LEFT: tl.constexpr = tl.constexpr(-128.0)  # e^-128 is zero in float32, so that no g needs to be below


@triton.jit
def running_decays(g, G, first, stop, H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr):
    """G [tokens, H]: running sums of g [tokens, H] inside each chunk."""
    token, inside = tokens_of(first, stop, tl.program_id(0), C)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    g_ = rows(g, H, token, inside, head, H, C).to(tl.float64)  # [C, BH]
    sums = tl.cumsum(tl.where(g_ < NOTHING_LEFT, NOTHING_LEFT, g_), 0)  # a NaN stays one
    at = token.to(tl.int64) * H + tl.arange(0, C)[:, None] * H + head[None, :]
    tl.store(G + at, sums.to(tl.float32), mask=inside[:, None] & (head < H)[None, :])


@triton.jit(do_not_specialize=["carried"])
def prefix_states(
    k, v, G, initial, S, total, first, stop, chunks, k_stride, v_stride, carried,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a sequence, head and tile [BK, BV] of its state."""
    tiles: tl.constexpr = tl.cdiv(DK, BK) * tl.cdiv(DV, BV)
    part, head_of_all = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    n, h = head_of_all // H, head_of_all % H
    row = part // tl.cdiv(DV, BV) * BK + tl.arange(0, BK)
    column = part % tl.cdiv(DV, BV) * BV + tl.arange(0, BV)
    k += h // GROUP * DK
    v += h * DV
    begin, end = tl.load(chunks + n), tl.load(chunks + n + 1)
    at = begin + n * (carried + 1)  # the sequence's first row
    state = tl.zeros([BK, BV], tl.float32)
    if initial is not None:
        for i in range(carried):
            put_matrix(S, (at + i).to(tl.int64) * H + h, row, column, DK, DV, state)
            if G is not None:
                tl.store(total + (at + i) * H + h, 0.0)
            state += matrix(initial, head_of_all * carried + i, row, column, DK, DV, True)
    at += carried
    sum_g = tl.full((), 0.0, tl.float64)
    for c in range(begin, end):
        put_matrix(S, at.to(tl.int64) * H + h, row, column, DK, DV, state)
        token, inside = tokens_of(first, stop, c, C)
        k_ = rows(k, k_stride, token, inside, row, DK, C)  # [C, BK]
        v_ = rows(v, v_stride, token, inside, column, DV, C)  # [C, BV]
        if G is not None:
            tl.store(total + at * H + h, sum_g)
            G_ = per_head(G + h, H, token, inside, 0.0, C)  # [C]
            G_end = tl.min(G_, 0)
            k_ = rounded(k_ * tl.exp(tl.where(inside, G_end - G_, 0.0))[:, None], FACTOR)
            state = state * tl.exp(G_end) + product(tl.trans(k_), v_.to(FACTOR), PRECISION)
            sum_g += G_end
        else:
            state += product(tl.trans(k_), v_, PRECISION)
        at += 1
    put_matrix(S, at.to(tl.int64) * H + h, row, column, DK, DV, state)
    if G is not None:
        tl.store(total + at * H + h, sum_g)


@dataclass(frozen=True)
class States:
    """What ``prefix_states`` made; row r of sequence n is at chunks[n] + n (carried + 1) + r."""

    S: Tensor  # [rows, H, dk, dv] float32
    G: Tensor | None  # [tokens, H] float32
    total: Tensor | None  # [rows, H] float64
    carried: int

    def last(self, tiles: Tiles) -> Tensor:
        """[N, H, dk, dv] after the last token."""
        return self.S[
            tiles.chunks[1:] + torch.arange(1, tiles.sequences + 1, device=self.S.device) * (self.carried + 1) - 1
        ]


def running_sums(g: Tensor, tiles: Tiles) -> Tensor:
    """[tokens, H] of g [tokens, H], inside each chunk."""
    (tokens, H), c = g.shape, config("running_decays")
    G = torch.empty(tokens, H, dtype=torch.float32, device=g.device)
    arguments: dict[str, Any] = {"g": g, "G": G, "first": tiles.first, "stop": tiles.stop}
    arguments |= {"H": H, "C": CHUNK, "BH": c["BH"]}
    launch(running_decays, (tiles.count, triton.cdiv(H, c["BH"])), arguments, c)
    return G


def states_of(
    k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None, tiles: Tiles, exact: bool = False
) -> States:
    """k [tokens, Hk, dk], v [tokens, H, dv], g [tokens, H]; initial [N, H, carried, dk, dv], oldest first.

    ``exact``: keys after decays are not rounded to their dtype.
    """
    dtype = torch.float32 if exact else k.dtype
    (_, H, dv), dk, N, c = v.shape, k.shape[2], tiles.sequences, config("prefix_states", dtype)
    carried = 0 if initial is None else initial.shape[2]
    count = tiles.count + N * (carried + 1)
    S = torch.empty(count, H, dk, dv, dtype=torch.float32, device=v.device)
    G = None if g is None else running_sums(g, tiles)
    total = None if g is None else torch.empty(count, H, dtype=torch.float64, device=v.device)
    initial = None if initial is None else initial.float().contiguous()
    BK, BV = tile(dk, c["BK"]), tile(dv, c["BV"])
    arguments: dict[str, Any] = {"k": k, "v": v, "G": G, "initial": initial, "S": S, "total": total}
    arguments |= {"first": tiles.first, "stop": tiles.stop, "chunks": tiles.chunks}
    arguments |= {"k_stride": k.stride(0), "v_stride": v.stride(0), "carried": carried}
    arguments |= {"H": H, "GROUP": H // k.shape[1], "DK": dk, "DV": dv, "C": CHUNK, "BK": BK, "BV": BV}
    grid = (N * H * triton.cdiv(dk, BK) * triton.cdiv(dv, BV),)
    launch(prefix_states, grid, arguments | arithmetic(dtype), c)
    return States(S, G, total, carried)
