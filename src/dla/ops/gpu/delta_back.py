"""From the last chunk to the first with the gradients of all states of a head (delta_walk.py the other way).

Given dO and the gradients dS'_j of the states behind a chunk, with decays and weights as there:

    dY_j = H dS'_j                           what Y_j = diag(E_s c_j) V - E K X_j is read with
    dV   = sum_j diag(E_s c_j) dY_j          but for what the chunk's own queries read (delta_own.py)
    dX_j = E (dS'_j - K^T dY_j)
    dS_i = dX_j + scale Q'^T diag(e w_i) dO  for the states i that state j is made of

Like the states, their gradients lie in memory and are changed in place, from the last of the list to the first. What
``delta_reads.py`` needs of them is kept: dS'_j and dY_j.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.delta_operation import Operation
from dla.ops.gpu.delta_pieces import Piece
from dla.ops.gpu.delta_walk import decays, list_of, row_of_weight, share_of
from dla.ops.gpu.language import matrix, product, put_matrix, rounded, rows, tokens_of


@triton.jit(do_not_specialize=["K", "states", "scale"])
def delta_back(
    k, queries, keys, weight, shares, G, d_o, d_S, d_v, d_kept, d_written, keep,
    count, rank, half, after, heirs, since, places, from_chunk, to_chunk, first, stop, k_stride, K, states, scale,
    H: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a sequence, head and BV columns, over the chunks from to_chunk[n] back to from_chunk[n].

    d_S [N, H, K, DK, DV]: gradients of the states behind the last of these chunks, then of those before the first.
    """
    tiles: tl.constexpr = tl.cdiv(DV, BV)
    n, h = tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    column, at = tl.program_id(0) % tiles * BV + tl.arange(0, BV), tl.arange(0, C)
    plan_head = h if HEADS > 1 else 0
    k += h // GROUP * DK
    queries += h * DK
    keys += h * DK
    d_o += h * DV
    if G is not None:
        G += h
    last = tl.load(to_chunk + n) - 1
    for back in range(last + 1 - tl.load(from_chunk + n)):
        c = last - back
        token, inside = tokens_of(first, stop, c, C)
        e, E, to_end = decays(G, H, token, inside, C)
        here, number = c * H + h, tl.load(keep + c)
        d_o_ = rows(d_o, H * DV, token, inside, column, DV, C)
        out = (token.to(tl.int64) * H + h) * DV + at[:, None] * (H * DV) + column[None, :]
        d_v_ = tl.load(d_v + out, mask=inside[:, None] & (column < DV)[None, :], other=0.0)
        d_o_ = d_o_.to(tl.float32) * (e * scale)[:, None]
        plan = (c * HEADS + plan_head) * K
        held = list_of(half, c * HEADS + plan_head, n, tl.num_programs(0) // tiles, h, H) * K
        behind = list_of(half, tl.load(after + c) * HEADS + plan_head, n, tl.num_programs(0) // tiles, h, H) * K
        made = tl.load(count + tl.load(after + c) * HEADS + plan_head)
        for older in range(made):
            j = made - 1 - older
            i, i_end = tl.load(heirs + plan + j - 1, mask=j > 0, other=0), tl.load(heirs + plan + j)
            d_Y = tl.zeros([C, BV], tl.float32)
            for d in range(0, DK, BK):
                row = d + tl.arange(0, BK)
                d_X = rounded(matrix(d_S, behind + j, row, column, DK, DV, True), FACTOR)
                put_matrix(d_kept, (number * H + h) * K + j, row, column, DK, DV, d_X)
                d_Y += product(rows(keys, H * DK, token, inside, row, DK, C), d_X, PRECISION)
            share = share_of(shares, here.to(tl.int64) * K + j, at, since, places, plan + j, C)
            d_v_ += d_Y * (to_end * share)[:, None]
            place = (((number * H + h) * K + j).to(tl.int64) * C + at[:, None]) * DV + column[None, :]
            tl.store(d_written + place, rounded(d_Y, d_written.dtype.element_ty), mask=(column < DV)[None, :])
            d_Y = rounded(d_Y * -E, FACTOR)
            if i_end > i:
                for d in range(0, DK, BK):
                    row = d + tl.arange(0, BK)
                    k_ = rows(k, k_stride, token, inside, row, DK, C).to(FACTOR)
                    q_ = rows(queries, H * DK, token, inside, row, DK, C)
                    d_X = matrix(d_S, behind + j, row, column, DK, DV, True) * E
                    d_X += product(tl.trans(k_), d_Y, PRECISION)
                    for state in range(i, i_end):
                        read = d_o_
                        if weight is not None:
                            w = here.to(tl.int64) * (states + C) + row_of_weight(rank, plan + state, state)
                            read = read * tl.load(weight + w * C + at, mask=inside, other=0.0)[:, None]
                        d_part = d_X + product(tl.trans(q_), rounded(read, FACTOR), PRECISION)
                        put_matrix(d_S, held + state, row, column, DK, DV, d_part)
        tl.store(d_v + out, d_v_, mask=inside[:, None] & (column < DV)[None, :])
        tl.debug_barrier()  # other threads may read a gradient at the next chunk


def walk_back(x: Operation, d_S: Tensor, piece: Piece, given: dict[str, Any]) -> Tensor:
    """d_S [N, H, K, dk, dv] before a piece, of that behind it; see ``delta_back``. Adds to d_v [tokens, H, dv]."""
    N, H, *_ = x.shape
    d_S = x.runs.lists(d_S)
    x.launch(delta_back, (N * H,), given | {"d_S": d_S, **vars(piece)}, "BV")
    return x.runs.list_at(piece.from_chunk, d_S, x.tiles)
