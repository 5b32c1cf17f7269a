"""Back from what a chunk's queries read of rows, and from the rows that its matrices took in.

With A = e w Q' k'^T of delta_rows.py, dA = scale dO v^T and M[j, r] how much of row r state j has, so that w[t, r] =
sum_j W[j, t] M[j, r]:

    dS  = dA e w                 the gradient of Q' k'^T, for delta_rows_back.py
    dw  = dA e (Q' k'^T)         dW = M dw^T        dM[j, r] = sum_t W[j, t] dw[t, r]

``delta_unfold``: state j took in k'^T diag(M_j) v, so k' has the gradient sum_j M_j v dS_j^T. What p has of both is
the difference of its two parts' dM.
"""

from typing import Any

import triton
import triton.language as tl

from dla.ops.gpu.delta_operation import Operation
from dla.ops.gpu.delta_pieces import Piece
from dla.ops.gpu.delta_row_plan import keys_at, lists_at, members, parts_of, rows_at, square_at, weights_at
from dla.ops.gpu.delta_rows import read_keys
from dla.ops.gpu.delta_walk import decays, share_in
from dla.ops.gpu.language import matrix, product, rounded, rows, tokens_of


@triton.jit(do_not_specialize=["states", "slots", "scale"])
def delta_met(
    v, queries, weight, G, p, following, d_o, tiles_met, kept_keys, d_products, d_parts, d_met,
    row_begin, row_end, met, chunk, keep, first, stop, sequence, offset, v_stride, states, slots, scale,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk, slot and head: d_products [C, C], d_met (dW) [states, C]; with the soft gate d_parts [C].

    d_met is zero where there is no tile.
    """
    c, each, h, at = tl.load(chunk + tl.program_id(0)), tl.program_id(1), tl.program_id(2), tl.arange(0, C)
    token, inside = tokens_of(first, stop, c, C)
    view, slot = c * H + h, (tl.load(keep + c) * H + h).to(tl.int64) * slots + each
    d_W = tl.zeros([KP, C], tl.float32)
    if each < tl.load(met + view):
        if G is not None:
            G += h
        if p is not None:
            p += h
            following += h
        token_b, inside_b = tokens_of(first, stop, tl.load(tiles_met + slot), C)
        d_A = tl.zeros([C, C], tl.float32)
        for d in range(0, DV, BV):
            column = d + tl.arange(0, BV)
            v_ = rows(v + h * DV, v_stride, token_b, inside_b, column, DV, C)
            d_o_ = rows(d_o + h * DV, H * DV, token, inside, column, DV, C)
            d_A += product(d_o_.to(v_.dtype), tl.trans(v_), PRECISION)
        e, _, _ = decays(G, H, token, inside, C)
        d_A = d_A * (tl.where(inside, e, 0.0) * scale)[:, None]
        begin, end = lists_at(row_begin, row_end, view, states, KP)
        early, late, share = rows_at(p, following, tiles_met + slot, first, stop, offset, sequence, c, H, C)
        M, W = parts_of(begin, end, early, late, p, share), weights_at(weight, view, states, C, KP)
        w = product(tl.trans(W), M, PRECISION)
        tl.store(d_products + square_at(slot, C), rounded(tl.where(w == 0, 0.0, d_A * w), FACTOR))
        read = read_keys(queries + h * DK, kept_keys, slot, token, inside, H, DK, C, BK, PRECISION)
        d_w = read * d_A
        d_W = product(M, tl.trans(d_w), PRECISION)
        if p is not None:
            d_M = product(W, d_w, PRECISION)
            d_late = tl.sum(tl.where(members(begin, end, late), d_M, 0.0), 0)
            d_early = tl.sum(tl.where(members(begin, end, early), d_M, 0.0), 0)
            tl.store(d_parts + slot * C + at, d_late - d_early)
    state = tl.arange(0, KP)
    place = d_met + slot * states * C + state[:, None] * C + at[None, :]
    tl.store(place, d_W, mask=(state < states)[:, None])


@triton.jit(do_not_specialize=["K", "slots"])
def delta_unfold(
    v, p, tiles_met, falls, into, folded, d_kept, d_folded, d_parts, met, count, after, chunk, keep, first, stop,
    v_stride, K, slots,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head: d_folded [C, DK] by slot, and what it adds to d_parts."""
    c, h, at = tl.load(chunk + tl.program_id(0)), tl.program_id(1), tl.arange(0, C)
    number = tl.load(keep + c) * H + h
    row = number.to(tl.int64) * slots
    if p is not None:
        p += h
    for each in range(tl.load(met + c * H + h)):
        slot = row + each
        if tl.load(falls + slot) > 0:
            token, inside = tokens_of(first, stop, tl.load(tiles_met + slot), C)
            table, d_part = into + slot * (2 * C), tl.zeros([C], tl.float32)
            for d in range(0, DK, BK):
                column = d + tl.arange(0, BK)
                place, wide = keys_at(slot, at, column, DK, C), (column < DK)[None, :]
                k_ = tl.load(folded + place, mask=wide, other=0.0).to(tl.float32)
                d_k = tl.zeros([C, BK], tl.float32)
                for j in range(tl.load(count + tl.load(after + c) * H + h)):
                    share = share_in(table, p, H, token, inside, j, C)
                    if tl.max(share, 0) > 0:
                        read = tl.zeros([C, BK], tl.float32)
                        for w in range(0, DV, BV):
                            across = w + tl.arange(0, BV)
                            v_ = rows(v + h * DV, v_stride, token, inside, across, DV, C).to(FACTOR)
                            d_S = matrix(d_kept, number * K + j, column, across, DK, DV, True)
                            read += product(v_, tl.trans(d_S), PRECISION)
                        d_k += read * share[:, None]
                        if p is not None:
                            sign = (tl.load(table + C + at) == j).to(tl.float32)
                            sign -= (tl.load(table + at) == j).to(tl.float32)
                            d_part += sign * tl.sum(read * k_, 1)
                tl.store(d_folded + place, rounded(d_k, FACTOR), mask=wide)
            if p is not None:
                tl.store(d_parts + slot * C + at, tl.load(d_parts + slot * C + at) + d_part)


def met_of(x: Operation, piece: Piece, given: dict[str, Any]) -> None:
    """Launch both for the chunks of a piece, and add up dW; ``given``: the other arguments by name."""
    assert x.rows is not None
    H, count = x.v.shape[1], len(piece.chunk)
    given = given | vars(piece)
    x.launch(delta_met, (count, x.rows.slots, H), given)
    x.launch(delta_unfold, (count, H), given)
    given["d_weight"][piece.chunk.long(), :, : x.all_states] = given["d_met"][:count].sum(2)
