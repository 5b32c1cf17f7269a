"""From chunk to chunk with all matrices of a head: what queries read of them, and what they become.

A chunk with decays e_t since its start, E over all of it and E_s from token s to its end reads its states S_i and
makes of them the next ones (delta_plan.py says which X_j = sum of some S_i and which tokens belong together):

    O    = (recent + sum_i diag(e w_i) Q' S_i) scale
    Y_j  = diag(E_s c_j) V - E K X_j                      c_j[s]: the share of token s that state j takes
    S'_j = E X_j + H^T Y_j + the rows that j takes in

with Q', H of delta_chunks.py, weights w_i of delta_weights.py, and what delta_recent.py found of tokens. Matrices are
float32 and lie in memory, in the order of their list, and are changed in place: a list's state j is made of states from
j on. A matrix takes 6 C dk dv operations and, read twice and written, 12 dk dv bytes a chunk of C tokens.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.delta_operation import Operation
from dla.ops.gpu.delta_pieces import Piece
from dla.ops.gpu.language import matrix, per_head, product, put_matrix, rounded, rows, tokens_of


@triton.jit
def sum_of(S, number, begin, end, row, column, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Rows and columns of the sum of matrices begin to end, counted from ``number``."""
    total = tl.zeros([BK, BV], tl.float32)
    for state in range(begin, end):
        total += matrix(S, number + state, row, column, DK, DV, True)
    return total


@triton.jit
def decays(G, H: tl.constexpr, token, inside, C: tl.constexpr):
    """Of a chunk's tokens: e_t since its start, E over all of it, E_s to its end."""
    if G is None:
        one = tl.full([C], 1.0, tl.float32)
        return one, tl.full((), 1.0, tl.float32), one
    else:
        G_ = per_head(G, H, token, inside, 0.0, C)
        end = tl.min(G_, 0)
        return tl.exp(G_), tl.exp(end), tl.exp(tl.where(inside, end - G_, 0.0))


@triton.jit
def share_of(shares, place, at, since, places, plan, C: tl.constexpr):
    """c_j [C]: of the chunk's tokens that are the state's all, or what a table says."""
    if shares is None:
        return ((at >= tl.load(since + plan)) & (at < tl.load(places + plan))).to(tl.float32)
    else:
        return tl.load(shares + place * C + at)


@triton.jit
def row_of_weight(rank, place, state):
    """Where the weights of a state of the list are: by its place among all states."""
    if rank is None:
        return state
    else:
        return tl.load(rank + place)


@triton.jit
def list_of(half, view, n, heads, h, H: tl.constexpr):
    """The number of a head's list of matrices at a view; there may be two, of which one is in use."""
    if half is None:
        return n * H + h
    else:
        return tl.load(half + view) * heads + n * H + h


@triton.jit
def share_in(into, p, H: tl.constexpr, token, inside, j, C: tl.constexpr):
    """[C] how much of each row a list's state takes in: all of it, or 1 - p and p."""
    at = tl.arange(0, C)
    share = (tl.load(into + at) == j).to(tl.float32)
    if p is None:
        return share
    else:
        p_ = per_head(p, H, token, inside, 0.0, C)
        return share * (1 - p_) + tl.where(tl.load(into + C + at) == j, p_, 0.0)


@triton.jit
def fold(
    S, made, v, p, first, stop, tiles_met, falls, into, folded, slot, tile, column, width, v_stride,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a slot's rows to columns of the matrices that take them in."""
    token, inside = tokens_of(first, stop, tile, C)
    v_ = rows(v, v_stride, token, inside, column, DV, C).to(tl.float32)
    into += slot * (2 * C)
    most = tl.max(tl.load(into + tl.arange(0, C)).to(tl.int32), 0)
    if p is not None:
        most = tl.maximum(most, tl.max(tl.load(into + C + tl.arange(0, C)).to(tl.int32), 0))
    for j in range(most + 1):
        share = share_in(into, p, H, token, inside, j, C)
        if tl.max(share, 0) > 0:
            Y = rounded(v_ * share[:, None], FACTOR)
            for d in range(0, width, BK):
                row = d + tl.arange(0, BK)
                place = folded + slot * (C * DK) + tl.arange(0, C)[:, None] * DK + row[None, :]
                k_ = tl.load(place, mask=(row < DK)[None, :], other=0.0)
                S_ = matrix(S, made + j, row, column, DK, DV, True) + product(tl.trans(k_), Y, PRECISION)
                put_matrix(S, made + j, row, column, DK, DV, S_)
            tl.debug_barrier()  # other threads may read what was written


@triton.jit(do_not_specialize=["K", "states", "slots", "width", "scale"])
def delta_walk(
    k, v, queries, keys, weight, shares, G, p, S, kept, written, recent, o,
    tiles_met, falls, into, folded, met,
    count, rank, half, after, heirs, since, places, keep, from_chunk, to_chunk, first, stop,
    k_stride, v_stride, K, states, slots, width, scale,
    H: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, SLOTS: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a sequence, head and BV columns, over the chunks of the sequence from from_chunk[n] to to_chunk[n].

    S [N, H, K, DK, DV], or [2, N, H, K, DK, DV] with ``half``: the states at the first chunk's start, then those after
    the last. ``width`` is DK, as a number that is not known before, which keeps loops from being unrolled. Outputs are
    written if there is ``o``, and contain ``recent`` [tokens, H, DV], what is read of tokens. ``folded`` and the tables
    before it are of delta_rows.py; SLOTS is a power of two. If there is ``kept``, the states at the start of chunk c
    are kept as number keep[c], and the Y_j written.
    """
    tiles: tl.constexpr = tl.cdiv(DV, BV)
    n, h = tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    column, at = tl.program_id(0) % tiles * BV + tl.arange(0, BV), tl.arange(0, C)
    plan_head = h if HEADS > 1 else 0
    k += h // GROUP * DK
    v += h * DV
    queries += h * DK
    keys += h * DK
    if G is not None:
        G += h
    if p is not None:
        p += h
    for c in range(tl.load(from_chunk + n), tl.load(to_chunk + n)):
        token, inside = tokens_of(first, stop, c, C)
        e, E, to_end = decays(G, H, token, inside, C)
        here = c * H + h
        v_ = rows(v, v_stride, token, inside, column, DV, C)
        past = tl.zeros([C, BV], tl.float32)
        if kept is not None:
            number = (tl.load(keep + c) * H + h) * K
        plan, next_list = (c * HEADS + plan_head) * K, tl.load(after + c) * HEADS + plan_head
        held = list_of(half, c * HEADS + plan_head, n, tl.num_programs(0) // tiles, h, H) * K
        made = list_of(half, next_list, n, tl.num_programs(0) // tiles, h, H) * K
        i = 0
        for j in range(tl.load(count + next_list)):
            i_end = tl.load(heirs + plan + j)
            share = share_of(shares, here.to(tl.int64) * K + j, at, since, places, plan + j, C)
            Y = v_.to(tl.float32) * (to_end * share)[:, None]
            for state in range(i, i_end):
                read, along = tl.zeros([C, BV], tl.float32), tl.zeros([C, BV], tl.float32)
                for d in range(0, width, BK):
                    row = d + tl.arange(0, BK)
                    S_ = matrix(S, held + state, row, column, DK, DV, True)
                    if kept is not None:
                        put_matrix(kept, number + state, row, column, DK, DV, rounded(S_, kept.dtype.element_ty))
                    S_ = rounded(S_, FACTOR)
                    k_ = rows(k, k_stride, token, inside, row, DK, C)
                    along += product(k_.to(FACTOR), S_, PRECISION)
                    if o is not None:
                        read += product(rows(queries, H * DK, token, inside, row, DK, C), S_, PRECISION)
                Y -= along * E
                if o is not None:
                    if weight is not None:
                        w = row_of_weight(rank, plan + state, state)
                        read *= tl.load(weight + (here.to(tl.int64) * (states + C) + w) * C + at)[:, None]
                    past += read
            Y = rounded(Y, FACTOR)
            if kept is not None:
                place = ((number + j).to(tl.int64) * C + at[:, None]) * DV + column[None, :]
                tl.store(written + place, Y, mask=(column < DV)[None, :])
            for d in range(0, width, BK):
                row = d + tl.arange(0, BK)
                X = sum_of(S, held, i, i_end, row, column, DK, DV, BK, BV) * E
                h_ = rows(keys, H * DK, token, inside, row, DK, C)
                put_matrix(S, made + j, row, column, DK, DV, X + product(tl.trans(h_), Y, PRECISION))
            i = i_end
        if folded is not None:
            row_of_slots = (tl.load(keep + c) * H + h).to(tl.int64) * slots
            slot = tl.arange(0, SLOTS)
            many = tl.load(met + here)
            falling = tl.load(falls + row_of_slots + slot, mask=slot < many, other=0)
            if tl.max(falling, 0) > 0:
                tl.debug_barrier()
                for each in range(many):
                    slot_ = row_of_slots + each
                    if tl.load(falls + slot_) > 0:
                        fold(S, made, v, p, first, stop, tiles_met, falls, into, folded, slot_,
                             tl.load(tiles_met + slot_), column, width, v_stride,
                             H, DK, DV, C, BK, BV, FACTOR, PRECISION)  # fmt: skip
        if o is not None:
            place = (token.to(tl.int64) * H + h) * DV + at[:, None] * (H * DV) + column[None, :]
            there = inside[:, None] & (column < DV)[None, :]
            o_ = (tl.load(recent + place, mask=there, other=0.0) + past * e[:, None]) * scale
            tl.store(o + place, rounded(o_, o.dtype.element_ty), mask=there)
        tl.debug_barrier()  # other threads may read a state at the next chunk


def walk(
    x: Operation, S: Tensor, piece: Piece, room: dict[str, Tensor],
    o: Tensor | None = None, recent: Tensor | None = None, kept: dict[str, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The states [N, H, K, dk, dv] behind a piece, of those before it; see ``delta_walk``."""
    S = x.runs.lists(S)
    N, H, _, dk, _ = x.shape
    given: dict[str, Any] = {"S": S, "o": o, "recent": recent, "width": dk, **vars(piece), **room, **(kept or {})}
    given |= {"SLOTS": 1, "slots": 0} if x.rows is None else {"SLOTS": triton.next_power_of_2(x.rows.slots)}
    x.launch(delta_walk, (N * H,), given, "BV")
    return x.runs.list_at(piece.to_chunk, S, x.tiles)
