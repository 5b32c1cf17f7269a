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
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.delta_operation import LEAST_PLACES, Operation
from dla.ops.gpu.delta_pieces import Piece
from dla.ops.gpu.delta_walk import decays
from dla.ops.gpu.language import per_head, product, rounded, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit
def lists_at(one, other, view, K, KP: tl.constexpr):
    """[KP] what two tables [.., K] say of a view's states; what is behind the last begins at no time."""
    state = tl.arange(0, KP)
    place = view.to(tl.int64) * K + state
    return tl.load(one + place, mask=state < K, other=2147483647), tl.load(other + place, mask=state < K, other=0)


@triton.jit
def row_lives(low, high, until, sequence, chunks, K, steps, H: tl.constexpr, KP: tl.constexpr):
    """One program a chunk b and head: the first chunk behind b that meets no rows of b, by halving."""
    b, h = tl.program_id(0), tl.program_id(1)
    n = tl.load(sequence + b)
    number, least, most = b - tl.load(chunks + n), b + 1, tl.load(chunks + n + 1)
    for _ in range(steps):
        middle = (least + most) // 2
        low_, high_ = lists_at(low, high, tl.minimum(middle, tl.num_programs(0) - 1) * H + h, K, KP)
        gone = tl.max(((low_ <= number) & (number < high_)).to(tl.int32), 0) > 0
        open = least < most
        most = tl.where(open & gone, middle, most)
        least = tl.where(open & (gone == 0), middle + 1, least)
    tl.store(until + b * H + h, least)


def lives_of(low: Tensor, high: Tensor, tiles: Tiles) -> Tensor:
    """``until`` [chunks, H] of Rows."""
    (_, H, K), c = low.shape, config("row_lives")
    until = torch.empty(tiles.count, H, dtype=torch.int32, device=low.device)
    arguments: dict[str, Any] = {"low": low, "high": high, "until": until, "sequence": tiles.sequence}
    arguments |= {"chunks": tiles.chunks, "K": K, "steps": tiles.count.bit_length() + 1, "H": H}
    launch(row_lives, (tiles.count, H), arguments | {"KP": max(LEAST_PLACES, triton.next_power_of_2(K))}, c)
    return until


@triton.jit
def addresses_of(following, H: tl.constexpr, token, time, inside, C: tl.constexpr):
    """[C] the addresses of the tokens' two parts; of the one they have without a gate (delta_states.py)."""
    if following is None:
        return tl.where(inside, time, -1), tl.where(inside, time, -1)
    else:
        return tl.where(inside, time - 1, -1), per_head(following, H, token, inside, -1, C)


@triton.jit
def members(begin, end, address):
    """[KP, C] which states have the parts at these addresses; none those below zero."""
    return (begin[:, None] <= address[None, :]) & (address[None, :] < end[:, None]) & (address >= 0)[None, :]


@triton.jit
def parts_of(begin, end, early, late, p, share):
    """[KP, C] how much of each row each state has; ``share`` [C] is p."""
    first = members(begin, end, early)
    if p is None:
        return first.to(tl.float32)
    else:
        return tl.where(first, 1 - share[None, :], 0.0) + tl.where(members(begin, end, late), share[None, :], 0.0)


@triton.jit
def place_in(begin, end, address, KP: tl.constexpr):
    """[C] the state on a list that each part is in; -1 if it is in none."""
    member = members(begin, end, address)
    return tl.sum(tl.where(member, tl.arange(0, KP)[:, None] + 1, 0), 0) - 1


@triton.jit
def weights_at(weight, view, states, C: tl.constexpr, KP: tl.constexpr):
    """[KP, C] what states count for at a chunk's queries."""
    state = tl.arange(0, KP)
    place = weight + view.to(tl.int64) * (states + C) * C + state[:, None] * C + tl.arange(0, C)[None, :]
    return tl.load(place, mask=(state < states)[:, None], other=0.0)


@triton.jit
def slot_at(low, high, keep, slots, c, b, number, h, K, H: tl.constexpr, KP: tl.constexpr):
    """Where what chunk c's queries meet of chunk b is, of [kept chunks, H, slots]; ``number``: b in its sequence."""
    return (tl.load(keep + c) * H + h).to(tl.int64) * slots + place_of(low, high, c, number, h, K, H, KP)


@triton.jit
def place_of(low, high, c, number, h, K, H: tl.constexpr, KP: tl.constexpr):
    """A tile's place among those that a chunk's queries meet."""
    low_, high_ = lists_at(low, high, c * H + h, K, KP)
    return number - tl.sum(tl.where(low_ <= number, high_ - low_, 0), 0)


@triton.jit
def square_at(slot, C: tl.constexpr):
    """Where [C, C] numbers of a slot are."""
    at = tl.arange(0, C)
    return slot * (C * C) + at[:, None] * C + at[None, :]


@triton.jit
def keys_at(slot, column, DK: tl.constexpr, C: tl.constexpr):
    """Where [C, columns] numbers of a slot's keys are."""
    return slot * (C * DK) + tl.arange(0, C)[:, None] * DK + column[None, :]


@triton.jit(do_not_specialize=["K", "states", "slots"])
def delta_rows(
    k, queries, keys, weight, G, p, following, carried, carry, tiles_met, falls, into, A, folded, kept_keys, along,
    begin, end, after, row_begin, row_end, low, high, until, keep, from_chunk, to_chunk,
    first, stop, sequence, offset, chunks, k_stride, K, states, slots,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, DP: tl.constexpr,
    BK: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk b of tokens and head, over the chunks from from_chunk[n] to to_chunk[n] behind it.

    carried [N, H, slots, C, DK] float32: keys at the first of these chunks; carry: at the one behind the last. All else
    is by slot, [kept chunks, H, slots, ..]: tiles_met the number b, A [C, C], into [2, C] the matrices on the next list
    that take parts in, -1 if there is none, falls whether there is any; then folded [C, DK] are the keys they take. If
    there are kept_keys [C, DK] and along [C, C], the factors of products are kept.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    n, at, column = tl.load(sequence + b), tl.arange(0, C), tl.arange(0, BK)
    token, inside = tokens_of(first, stop, b, C)
    number = b - tl.load(chunks + n)
    k += h // GROUP * DK
    queries += h * DK
    keys += h * DK
    if G is not None:
        G += h
    if p is not None:
        p += h
        following += h
    start, last = tl.load(from_chunk + n), tl.load(to_chunk + n)
    gone = tl.load(until + b * H + h)
    if (b < last) & (gone > start):
        wide = (column < DK)[None, :]
        _, _, to_end = decays(G, H, token, inside, C)
        key = rows(keys, H * DK, token, inside & (b >= start), column, DK, C).to(tl.float32) * to_end[:, None]
        if carried is not None:
            slot = (n * H + h).to(tl.int64) * slots
            if b < start:
                slot += place_of(low, high, start, number, h, states, H, KP)
            key += tl.load(carried + keys_at(slot, column, DK, C), mask=wide & (b < start), other=0.0)
        early, late = addresses_of(following, H, token, token - tl.load(offset + n) + at, inside, C)
        share = early.to(tl.float32)
        if p is not None:
            share = per_head(p, H, token, inside, 0.0, C)
        for c in range(tl.maximum(start, b + 1), tl.minimum(gone, last)):
            query, asks = tokens_of(first, stop, c, C)
            view, slot = c * H + h, slot_at(low, high, keep, slots, c, b, number, h, states, H, KP)
            begin_, end_ = lists_at(row_begin, row_end, view, states, KP)
            e, E, _ = decays(G, H, query, asks, C)
            factor = rounded(key, FACTOR)
            q_ = rows(queries, H * DK, query, asks, column, DK, C)
            M = parts_of(begin_, end_, early, late, p, share)
            w = product(tl.trans(weights_at(weight, view, states, C, KP)), M, PRECISION)
            w = tl.where(asks[:, None], w * e[:, None], 0.0)
            A_ = tl.where(w == 0, 0.0, product(q_, tl.trans(factor), PRECISION) * w)
            tl.store(A + square_at(slot, C), rounded(A_, FACTOR))
            tl.store(tiles_met + slot, b)
            k_ = rows(k, k_stride, query, asks, column, DK, C).to(FACTOR)
            along_ = rounded(product(factor, tl.trans(k_), PRECISION), FACTOR)
            if kept_keys is not None:
                tl.store(kept_keys + keys_at(slot, column, DK, C), factor, mask=wide)
                tl.store(along + square_at(slot, C), along_)
            h_ = rows(keys, H * DK, query, asks, column, DK, C)
            key = (key - product(along_, h_, PRECISION)) * E
            next_begin, next_end = lists_at(begin, end, tl.load(after + c) * H + h, K, DP)
            was = place_in(begin_, end_, early, KP)
            there = tl.where(was >= 0, place_in(next_begin, next_end, early, DP), -1)
            tl.store(into + slot * (2 * C) + at, there)
            falling = tl.max(there, 0)
            if p is not None:
                was = place_in(begin_, end_, late, KP)
                there = tl.where(was >= 0, place_in(next_begin, next_end, late, DP), -1)
                tl.store(into + slot * (2 * C) + C + at, there)
                falling = tl.maximum(falling, tl.max(there, 0))
            tl.store(falls + slot, (falling >= 0).to(tl.int32))
            if falling >= 0:
                tl.store(folded + keys_at(slot, column, DK, C), rounded(key, FACTOR), mask=wide)
        if gone > last:
            slot = (n * H + h).to(tl.int64) * slots + place_of(low, high, last, number, h, states, H, KP)
            tl.store(carry + keys_at(slot, column, DK, C), key, mask=wide)


KEPT = ("kept_keys", "along", "d_products", "back", "d_next", "d_folded", "d_parts")  # that gradients need


def sizes_of(x: Operation, kept: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What there is of every slot."""
    half, square, keys = x.made.queries.dtype, (CHUNK, CHUNK), (CHUNK, x.k.shape[2])
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"tiles_met": ((), torch.int32), "falls": ((), torch.int32)}
    sizes |= {"into": ((2, CHUNK), torch.int16), "A": (square, half), "folded": (keys, half)}
    if kept:
        sizes |= {"kept_keys": (keys, half), "along": (square, half), "d_products": (square, half)}
        sizes |= {"back": (square, half), "d_next": (keys, half), "d_folded": (keys, half)}
        sizes |= {"d_parts": ((CHUNK,), torch.float32)}
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
    given = {"carried": carried, "carry": carry, **vars(piece), **room, "BK": tile(x.k.shape[2], 256)}
    x.launch(delta_rows, (x.tiles.count, x.v.shape[1]), given)
    return carry
