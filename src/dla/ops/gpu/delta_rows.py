"""Tokens of short states as rows: a key that every chunk moves, and a value, instead of a matrix.

A token leaves the key of H (delta_chunks.py) at its chunk's end. As a state S becomes E (S - H^T (K S)) over a chunk,
so does a row's key, on its own:

    k' <- E (k' - H^T (K k'))        A[t, r] = e_t w[t, r] (Q'_t . k'_r)        O_t += A[t, r] v_r

with the weight of the state that the row is in. That is 6 C dk + 2 C dv operations a row and chunk of C queries, where
a matrix takes 6 C dk dv: so states are matrices from ``LEAST`` tokens on. A state that grows so long takes in its rows
with the keys that they have then, which happens once to a token. Rows do not need each other, so that all chunks of
them go their way at once, one program each.

A chunk's queries meet the rows tile by tile, a tile being those of an earlier chunk; tiles without any have no slot.
"""

import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.delta_operation import LEAST_PLACES, Operation, Span
from dla.ops.gpu.delta_walk import decays
from dla.ops.gpu.language import product, rounded, rows, tile, tokens_of
from dla.ops.gpu.launch import launch


@triton.jit
def states_at(position, count, view, now, K, least, KP: tl.constexpr):
    """[KP] where the states of a view begin and end, which ends at ``now``, and whether they are matrices."""
    state = tl.arange(0, KP)
    found, position = tl.load(count + view), position + view.to(tl.int64) * K + state
    begin = tl.load(position, mask=state < found, other=now)
    end = tl.load(position + 1, mask=state + 1 < found, other=now)
    return begin, end, (state < found) & ((end - begin >= least) | (begin < 0))


@triton.jit
def state_of(begin, end, dense, time, KP: tl.constexpr):
    """[C] of tokens at these times: the state that each is in, and whether it is a row."""
    member = (begin[None, :] <= time[:, None]) & (time[:, None] < end[None, :])
    state = tl.sum(tl.where(member, tl.arange(0, KP)[None, :], 0), 1)
    return state, tl.sum((member & (dense == 0)[None, :]).to(tl.int32), 1) > 0


@triton.jit
def slot_of(begin, end, dense, b, C: tl.constexpr, KP: tl.constexpr):
    """The place of a sequence's b-th chunk of tokens among those that have one: all but what lies in one matrix."""
    low = (tl.maximum(begin, 0) + C - 1) // C
    whole = tl.where(dense & (low <= b), tl.maximum(end // C - low, 0), 0)
    return b - tl.sum(tl.reshape(whole, (KP // 8, 8)), axis=None)


@triton.jit
def square_at(number, slots, slot, C: tl.constexpr):
    """Where [C, C] numbers of a slot are."""
    at = tl.arange(0, C)
    return (number.to(tl.int64) * slots + slot) * (C * C) + at[:, None] * C + at[None, :]


@triton.jit(do_not_specialize=["K", "least", "slots"])
def delta_rows(
    k, queries, keys, weight, G, moved, left, A, position, all_count, keep, from_chunk, to_chunk,
    first, stop, sequence, offset, chunks, k_stride, K, least, slots,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    BK: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk b of tokens and head, over the chunks from from_chunk[n] to to_chunk[n] behind it.

    moved [tokens, H, DK] float32: the rows' keys, as they were when they last were rows. left [chunks, H]: how many of
    a chunk's tokens are rows. A [kept chunks, H, slots, C, C].
    """
    b, h = tl.program_id(0), tl.program_id(1)
    n, at, column = tl.load(sequence + b), tl.arange(0, C), tl.arange(0, BK)
    token, inside = tokens_of(first, stop, b, C)
    origin, number = tl.load(offset + n), b - tl.load(chunks + n)
    k += h // GROUP * DK
    queries += h * DK
    keys += h * DK
    if G is not None:
        G += h
    start, last = tl.load(from_chunk + n), tl.load(to_chunk + n)
    place = (token.to(tl.int64) * H + h) * DK + at[:, None] * (H * DK) + column[None, :]
    there = inside[:, None] & (column < DK)[None, :]
    if (b >= start) & (b < last):
        _, _, to_end = decays(G, H, token, inside, C)
        key = rows(keys, H * DK, token, inside, column, DK, C).to(tl.float32) * to_end[:, None]
        tl.store(moved + place, key, mask=there)
        tl.store(left + b * H + h, C)
        tl.debug_barrier()
    living = tl.load(left + b * H + h)
    living = tl.where(b < last, living, 0)
    if living > 0:
        key = tl.load(moved + place, mask=there, other=0.0)
        for c in range(tl.maximum(start, b + 1), last):
            if living > 0:
                query, asks = tokens_of(first, stop, c, C)
                begin, end, dense = states_at(position, all_count, c * H + h, query - origin, K, least, KP)
                state, is_row = state_of(begin, end, dense, token - origin + at, KP)
                is_row = is_row & inside
                living = tl.sum(tl.reshape(is_row.to(tl.int32), (C // 8, 8)), axis=None)
                if living > 0:
                    e, E, _ = decays(G, H, query, asks, C)
                    factor = rounded(key, FACTOR)
                    q_ = rows(queries, H * DK, query, asks, column, DK, C)
                    w = (c * H + h).to(tl.int64) * (K + C) * C + state[None, :] * C + at[:, None]
                    seen = asks[:, None] & is_row[None, :]
                    w = tl.load(weight + w, mask=seen, other=0.0) * e[:, None]
                    met = tl.where(seen, product(q_, tl.trans(factor), PRECISION) * w, 0.0)
                    slot = slot_of(begin, end, dense, number, C, KP)
                    tl.store(A + square_at(tl.load(keep + c) * H + h, slots, slot, C), rounded(met, FACTOR))
                    k_ = rows(k, k_stride, query, asks, column, DK, C).to(FACTOR)
                    along = rounded(product(factor, tl.trans(k_), PRECISION), FACTOR)
                    h_ = rows(keys, H * DK, query, asks, column, DK, C)
                    key = tl.where(is_row[:, None], (key - product(along, h_, PRECISION)) * E, key)
        tl.store(moved + place, key, mask=there)
        tl.store(left + b * H + h, living)


def move_rows(
    x: Operation, weight: Tensor | None, span: Span, keep: Tensor, moved: Tensor, left: Tensor, A: Tensor
) -> None:
    """See ``delta_rows``."""
    assert x.rows is not None
    _, H, K, dk, _ = x.shape
    arguments, c = x.arguments("delta_rows")
    arguments |= {"weight": weight, "moved": moved, "left": left, "A": A, "keep": keep, "slots": A.shape[2]}
    arguments |= {"from_chunk": span.begin, "to_chunk": span.until, **x.rows.arguments()}
    arguments |= {"BK": tile(dk, c["BK"]), "KP": max(LEAST_PLACES, triton.next_power_of_2(K))}
    arguments = {name: arguments[name] for name in delta_rows.arg_names}
    launch(delta_rows, (x.tiles.count, H), arguments, c)
