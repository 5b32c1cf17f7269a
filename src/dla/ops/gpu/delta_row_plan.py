"""Which rows a chunk's queries meet with delta steps, where they stand, and when matrices take them in.

What delta_states.py says of every view, seen from tiles: a tile is an earlier chunk's tokens. Chunks that meet rows of
it have a slot for it, by its place among the tiles that they meet; nothing here depends on other numbers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import per_head, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.tiles import Tiles

LEAST_PLACES = 16  # of a list of states, in kernels


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
    """``until`` [chunks, H] of RowTables."""
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
def rows_at(p, following, tile, first, stop, offset, sequence, c, H: tl.constexpr, C: tl.constexpr):
    """[C] of the tile that is met: addresses of both parts, and p."""
    token, inside = tokens_of(first, stop, tl.load(tile), C)
    time = token - tl.load(offset + tl.load(sequence + c)) + tl.arange(0, C)
    early, late = addresses_of(following, H, token, time, inside, C)
    share = early.to(tl.float32)
    if p is not None:
        share = per_head(p, H, token, inside, 0.0, C)
    return early, late, share


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
def slot_at(low, high, keep, slots, c, number, h, K, H: tl.constexpr, KP: tl.constexpr):
    """Where what chunk c's queries meet of a tile is, of [kept chunks, H, slots]; ``number``: in its sequence."""
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
def keys_at(slot, row, column, DK: tl.constexpr, C: tl.constexpr):
    """Where rows and columns of a slot's keys [C, DK] are."""
    return slot * (C * DK) + row[:, None] * DK + column[None, :]


@triton.jit(do_not_specialize=["K", "states", "slots"])
def row_plan(
    following, tiles_met, falls, into, begin, end, after, row_begin, row_end, low, high, until, keep,
    from_chunk, to_chunk, first, stop, sequence, offset, chunks, K, states, slots,
    H: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """One program a chunk b of rows and head, over the chunks from from_chunk[n] to to_chunk[n] that meet them.

    By slot, [kept chunks, H, slots, ..]: tiles_met the number b; into [2, C] the matrices on the next list that take
    parts in, -1 if there is none; falls whether there is any.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    n, at = tl.load(sequence + b), tl.arange(0, C)
    token, inside = tokens_of(first, stop, b, C)
    number = b - tl.load(chunks + n)
    if following is not None:
        following += h
    early, late = addresses_of(following, H, token, token - tl.load(offset + n) + at, inside, C)
    upto = tl.minimum(tl.load(until + b * H + h), tl.load(to_chunk + n))
    for c in range(tl.maximum(tl.load(from_chunk + n), b + 1), upto):
        slot = slot_at(low, high, keep, slots, c, number, h, states, H, KP)
        tl.store(tiles_met + slot, b)
        begin_, end_ = lists_at(row_begin, row_end, c * H + h, states, KP)
        next_begin, next_end = lists_at(begin, end, tl.load(after + c) * H + h, K, DP)
        there = tl.where(place_in(begin_, end_, early, KP) >= 0, place_in(next_begin, next_end, early, DP), -1)
        tl.store(into + slot * (2 * C) + at, there)
        falling = tl.max(there, 0)
        if following is not None:
            there = tl.where(place_in(begin_, end_, late, KP) >= 0, place_in(next_begin, next_end, late, DP), -1)
            tl.store(into + slot * (2 * C) + C + at, there)
            falling = tl.maximum(falling, tl.max(there, 0))
        tl.store(falls + slot, (falling >= 0).to(tl.int32))
