"""What the two walks say about a chunk's queries, keys and weights: one program a chunk, head and BK of their columns.

    dQ' = scale sum_i diag(e w_i) dO S_i^T        dw_i = scale e . rows of (Q' . dO S_i^T), summed
    dK  = -E sum_j dY_j X_j^T                     dc_j = E_s . rows of (V . dY_j), summed
    dH  = sum_j Y_j dS'_j^T

S_i, Y_j, dS'_j and dY_j are as ``delta_walk`` and ``delta_back`` kept them. Sums over columns are left in parts, one
for every BK of them.
"""

from typing import Any

import triton
import triton.language as tl

from dla.ops.gpu.delta_operation import Operation
from dla.ops.gpu.delta_pieces import Piece
from dla.ops.gpu.delta_walk import decays, row_of_weight
from dla.ops.gpu.language import matrix, product, rows, tokens_of


@triton.jit(do_not_specialize=["K", "states", "scale", "count_of_chunks"])
def delta_reads(
    queries, weight, G, d_o, kept, d_kept, written, d_written, chunk, keep, d_queries, d_old, d_keys, d_states,
    count, rank, after, heirs, first, stop, K, states, scale, count_of_chunks,
    H: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_queries (dQ'), d_old (dK), d_keys (dH) [tokens, H, DK]; d_states [parts, chunks, H, states, C]."""
    tiles: tl.constexpr = tl.cdiv(DK, BK)
    c, part, h = tl.load(chunk + tl.program_id(0) // tiles), tl.program_id(0) % tiles, tl.program_id(1)
    column, at = part * BK + tl.arange(0, BK), tl.arange(0, C)
    plan_head = h if HEADS > 1 else 0
    token, inside = tokens_of(first, stop, c, C)
    if G is not None:
        G += h
    e, E, _ = decays(G, H, token, inside, C)
    number, here = tl.load(keep + c) * H + h, c * H + h
    q_ = rows(queries + h * DK, H * DK, token, inside, column, DK, C).to(tl.float32)
    d_q, d_k, d_h = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    plan = (c * HEADS + plan_head) * K
    i = 0
    for j in range(tl.load(count + tl.load(after + c) * HEADS + plan_head)):
        i_end = tl.load(heirs + plan + j)
        row = ((number * K + j).to(tl.int64) * C + at[:, None]) * DV
        for d in range(0, DV, BV):
            wide = d + tl.arange(0, BV)
            Y = tl.load(written + row + wide[None, :], mask=(wide < DV)[None, :], other=0.0)
            d_S = matrix(d_kept, number * K + j, column, wide, DK, DV, True)
            d_h += product(Y, tl.trans(d_S), PRECISION)
        for state in range(i, i_end):
            M = tl.zeros([C, BK], tl.float32)
            for d in range(0, DV, BV):
                wide = d + tl.arange(0, BV)
                S = matrix(kept, number * K + state, column, wide, DK, DV, True)
                d_o_ = rows(d_o + h * DV, H * DV, token, inside, wide, DV, C).to(FACTOR)
                d_Y = tl.load(d_written + row + wide[None, :], mask=(wide < DV)[None, :], other=0.0)
                M += product(d_o_, tl.trans(S), PRECISION)
                d_k -= product(d_Y, tl.trans(S), PRECISION)
            M = M * (e * scale)[:, None]
            of_all = row_of_weight(rank, plan + state, state)
            place = here.to(tl.int64) * states + of_all
            tl.store(d_states + (part * count_of_chunks * H * states.to(tl.int64) + place) * C + at, tl.sum(M * q_, 1))
            if weight is not None:
                w = tl.load(weight + (here.to(tl.int64) * (states + C) + of_all) * C + at, mask=inside, other=0.0)
                M = M * w[:, None]
            d_q += M
        i = i_end
    place = (token.to(tl.int64) * H + h) * DK + at[:, None] * (H * DK) + column[None, :]
    there = inside[:, None] & (column < DK)[None, :]
    tl.store(d_queries + place, d_q, mask=there)
    tl.store(d_old + place, d_k * E, mask=there)
    tl.store(d_keys + place, d_h, mask=there)


@triton.jit(do_not_specialize=["K"])
def delta_shares(
    v, G, d_written, chunk, keep, d_shares, count, after, first, stop, v_stride, K,
    H: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head: d_shares [chunks, H, K, C]."""
    c, h = tl.load(chunk + tl.program_id(0)), tl.program_id(1)
    at = tl.arange(0, C)
    token, inside = tokens_of(first, stop, c, C)
    if G is not None:
        G += h
    _, _, to_end = decays(G, H, token, inside, C)
    number = tl.load(keep + c) * H + h
    for j in range(tl.load(count + tl.load(after + c) * HEADS + (h if HEADS > 1 else 0))):
        row = ((number * K + j).to(tl.int64) * C + at[:, None]) * DV
        share = tl.zeros([C], tl.float32)
        for d in range(0, DV, BV):
            wide = d + tl.arange(0, BV)
            d_Y = tl.load(d_written + row + wide[None, :], mask=(wide < DV)[None, :], other=0.0)
            v_ = rows(v + h * DV, v_stride, token, inside, wide, DV, C)
            share += tl.sum(d_Y.to(tl.float32) * v_.to(tl.float32), 1)
        tl.store(d_shares + ((c * H + h).to(tl.int64) * K + j) * C + at, share * to_end)


def reads_of(x: Operation, piece: Piece, given: dict[str, Any]) -> None:
    """Launch them for the chunks of a piece; ``given``: the other arguments by name."""
    grid, given = (len(piece.chunk), x.v.shape[1]), given | vars(piece) | {"count_of_chunks": x.tiles.count}
    x.launch(delta_reads, grid, given, "BK")
    if given["d_shares"] is not None:
        x.launch(delta_shares, grid, given)
