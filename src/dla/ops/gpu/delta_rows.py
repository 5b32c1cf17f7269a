"""Tokens of short states as rows with delta steps: a key that every chunk moves, and a value, instead of a matrix.

A token leaves the key of H (delta_chunks.py) at its chunk's end. As a state S becomes E (S - H^T (K S)) over a chunk,
so does a row's key, on its own:

    k' <- E (k' - along H)    along = k' K^T        A[t, r] = e_t w[t, r] (Q'_t . k'_r)        O_t += A[t, r] v_r

with the weight of the state that the row is in. That is 6 C dk + 2 C dv operations a row and chunk of C queries, where
a matrix takes 6 C dk dv: so states are matrices from ``LEAST`` tokens on (delta_memories.py). A state that grows so
long takes in its rows with the keys that they have then, which happens once to a token. With the soft gate a token has
two parts, in two states; they share the key. Rows do not need each other, so that all chunks of them go their way at
once, one program each.

A chunk's queries meet the rows tile by tile, a tile being those of an earlier chunk; tiles without any have no slot.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.delta_operation import Operation
from dla.ops.gpu.delta_pieces import Piece
from dla.ops.gpu.delta_row_plan import (
    keys_at,
    lists_at,
    parts_of,
    place_of,
    row_plan,
    rows_at,
    slot_at,
    square_at,
    weights_at,
)
from dla.ops.gpu.delta_walk import decays
from dla.ops.gpu.language import per_head, product, rounded, rows, tile, tokens_of
from dla.ops.gpu.tiles import CHUNK


@triton.jit
def end_decays(G, H: tl.constexpr, token, skipped, stop, C: tl.constexpr):
    """[C] of a chunk's tokens, but for those skipped, to its end."""
    mine = token + skipped + tl.arange(0, C) < stop
    if G is None:
        return tl.where(mine, 1.0, 0.0)
    else:
        end = tl.load(G + (stop - 1).to(tl.int64) * H)
        G_ = per_head(G, H, token + skipped, mine, 0.0, C)
        return tl.exp(tl.where(mine, end - G_, 0.0))


@triton.jit
def whole_decay(G, H: tl.constexpr, stop):
    """Over the whole chunk that stops there."""
    if G is None:
        return tl.full((), 1.0, tl.float32)
    else:
        return tl.exp(tl.load(G + (stop - 1).to(tl.int64) * H))


@triton.jit(do_not_specialize=["states", "slots"])
def delta_rows(
    k, keys, G, carried, carry, falls, folded, kept_keys, along,
    low, high, until, keep, from_chunk, to_chunk, first, stop, sequence, chunks, k_stride, states, slots,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As many rows of a chunk b a program as BR, over the chunks from from_chunk[n] to to_chunk[n] that meet them.

    carried [N, H, slots, C, DK] float32: keys at the first of these chunks; carry: at the one behind the last. By slot:
    kept_keys [C, DK] as the chunk meets them, with along [C, C] if it is wanted; folded [C, DK], where rows fall, as
    matrices take them in.
    """
    parts: tl.constexpr = C // BR
    b, part, h = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    n, at, column = tl.load(sequence + b), tl.arange(0, C), tl.arange(0, BK)
    row = part * BR + tl.arange(0, BR)
    number, wide = b - tl.load(chunks + n), (column < DK)[None, :]
    k += h // GROUP * DK
    keys += h * DK
    if G is not None:
        G += h
    start, last = tl.load(from_chunk + n), tl.load(to_chunk + n)
    gone = tl.load(until + b * H + h)
    if (b < last) & (gone > start):
        token, end = tl.load(first + b), tl.load(stop + b)
        own = (token + row < end) & (b >= start)
        key = rows(keys, H * DK, token + part * BR, own, column, DK, BR).to(tl.float32)
        key = key * end_decays(G, H, token, part * BR, end, BR)[:, None]
        if carried is not None:
            slot = (n * H + h).to(tl.int64) * slots
            if b < start:
                slot += place_of(low, high, start, number, h, states, H, KP)
            key += tl.load(carried + keys_at(slot, row, column, DK, C), mask=wide & (b < start), other=0.0)
        for c in range(tl.maximum(start, b + 1), tl.minimum(gone, last)):
            query, asks = tokens_of(first, stop, c, C)
            slot = slot_at(low, high, keep, slots, c, number, h, states, H, KP)
            factor = rounded(key, FACTOR)
            tl.store(kept_keys + keys_at(slot, row, column, DK, C), factor, mask=wide)
            k_ = rows(k, k_stride, query, asks, column, DK, C).to(FACTOR)
            along_ = rounded(product(factor, tl.trans(k_), PRECISION), FACTOR)
            if along is not None:
                tl.store(along + slot * (C * C) + row[:, None] * C + at[None, :], along_)
            h_ = rows(keys, H * DK, query, asks, column, DK, C)
            key = (key - product(along_, h_, PRECISION)) * whole_decay(G, H, tl.load(stop + c))
            if tl.load(falls + slot) > 0:
                tl.store(folded + keys_at(slot, row, column, DK, C), rounded(key, FACTOR), mask=wide)
        if gone > last:
            slot = (n * H + h).to(tl.int64) * slots + place_of(low, high, last, number, h, states, H, KP)
            tl.store(carry + keys_at(slot, row, column, DK, C), key, mask=wide)


@triton.jit
def read_keys(
    queries, kept_keys, slot, token, inside,
    H: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Q'_t . k'_r [t, r] of a chunk's queries and a slot's keys."""
    read = tl.zeros([C, C], tl.float32)
    for d in range(0, DK, BK):
        column = d + tl.arange(0, BK)
        place = keys_at(slot, tl.arange(0, C), column, DK, C)
        k_ = tl.load(kept_keys + place, mask=(column < DK)[None, :], other=0.0)
        read += product(rows(queries, H * DK, token, inside, column, DK, C), tl.trans(k_), PRECISION)
    return read


@triton.jit(do_not_specialize=["states", "slots"])
def row_products(
    queries, weight, G, p, following, tiles_met, kept_keys, A, row_begin, row_end, met, chunk, keep,
    first, stop, sequence, offset, states, slots,
    H: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk, slot and head: A [C, C]."""
    c, each, h = tl.load(chunk + tl.program_id(0)), tl.program_id(1), tl.program_id(2)
    if each < tl.load(met + c * H + h):
        token, inside = tokens_of(first, stop, c, C)
        slot = (tl.load(keep + c) * H + h).to(tl.int64) * slots + each
        if G is not None:
            G += h
        if p is not None:
            p += h
            following += h
        read = read_keys(queries + h * DK, kept_keys, slot, token, inside, H, DK, C, BK, PRECISION)
        begin, end = lists_at(row_begin, row_end, c * H + h, states, KP)
        early, late, share = rows_at(p, following, tiles_met + slot, first, stop, offset, sequence, c, H, C)
        M = parts_of(begin, end, early, late, p, share)
        w = product(tl.trans(weights_at(weight, c * H + h, states, C, KP)), M, PRECISION)
        e, _, _ = decays(G, H, token, inside, C)
        w = tl.where(inside[:, None], w * e[:, None], 0.0)
        tl.store(A + square_at(slot, C), rounded(tl.where(w == 0, 0.0, read * w), FACTOR))


KEPT = ("along", "d_products", "back", "d_next", "d_folded", "d_parts", "d_met")  # that gradients need


def sizes_of(x: Operation, kept: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What there is of every slot."""
    half, square, keys = x.made.queries.dtype, (CHUNK, CHUNK), (CHUNK, x.k.shape[2])
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"tiles_met": ((), torch.int32), "falls": ((), torch.int32)}
    sizes |= {"into": ((2, CHUNK), torch.int16), "A": (square, half), "folded": (keys, half), "kept_keys": (keys, half)}
    if kept:
        sizes |= {"along": (square, half), "d_products": (square, half)}
        sizes |= {"back": (square, half), "d_next": (keys, half), "d_folded": (keys, half)}
        sizes |= {"d_parts": ((CHUNK,), torch.float32), "d_met": ((x.all_states, CHUNK), torch.float32)}
    return sizes


def room_for(x: Operation, count: int, kept: bool) -> dict[str, Tensor]:
    """Tensors of ``delta_rows`` for so many chunks; ``kept``: those that gradients need too. None without rows."""
    if x.rows is None:
        return {}
    lead, device = (count, x.v.shape[1], x.rows.slots), x.v.device
    return {name: torch.empty(*lead, *size, dtype=dtype, device=device)
            for name, (size, dtype) in sizes_of(x, kept).items()}  # fmt: skip


def bytes_of(x: Operation, kept: bool) -> int:
    """What ``room_for`` takes for a chunk."""
    if x.rows is None:
        return 0
    each = sum(math.prod(size) * dtype.itemsize for size, dtype in sizes_of(x, kept).values())
    return x.v.shape[1] * x.rows.slots * each


def carry_of(x: Operation) -> Tensor:
    """[N, H, slots, CHUNK, dk] room for keys, or their gradients, between two chunks."""
    assert x.rows is not None
    N, H, _, dk, _ = x.shape
    return torch.empty(N, H, x.rows.slots, CHUNK, dk, dtype=torch.float32, device=x.v.device)


def move_rows(x: Operation, piece: Piece, room: dict[str, Tensor], carried: Tensor | None) -> Tensor | None:
    """The keys behind a piece, of those before it; see ``delta_rows``."""
    if x.rows is None:
        return None
    carry = carry_of(x)
    given = {"carried": carried, "carry": carry, **vars(piece), **room}
    H = x.v.shape[1]
    x.launch(row_plan, (x.tiles.count, H), given)
    x.launch(delta_rows, (x.tiles.count, H), given | {"BK": tile(x.k.shape[2], 256)}, "BR")
    return carry


def products_of(x: Operation, piece: Piece, room: dict[str, Tensor]) -> None:
    """What a piece's queries read of the keys that ``move_rows`` kept; see ``row_products``."""
    if x.rows is not None:
        x.launch(row_products, (len(piece.chunk), x.rows.slots, x.v.shape[1]), {**vars(piece), **room})
