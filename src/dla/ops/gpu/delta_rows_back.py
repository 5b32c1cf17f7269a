"""The gradients of rows' keys and values: delta_rows.py from the last chunk to the first, one program a chunk of them.

With the gradient dk' of the keys behind a chunk, dS of delta_met.py and what matrices took in there:

    next = E (dk' + what they took)      back = next H^T       dk' <- next - back K + dS^T Q'
    dv  += scale A^T dO

``delta_row_reads`` adds up, over the rows that a chunk meets, what its queries and keys have of this:

    dQ' += dS k'        dH -= along^T next        dK -= back^T k'
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.delta_met import met_of
from dla.ops.gpu.delta_operation import Operation
from dla.ops.gpu.delta_pieces import Piece
from dla.ops.gpu.delta_row_plan import keys_at, place_of, slot_at, square_at
from dla.ops.gpu.delta_rows import carry_of, end_decays, whole_decay
from dla.ops.gpu.delta_walk import share_in
from dla.ops.gpu.language import matrix, product, rounded, rows, tile, tokens_of


@triton.jit(do_not_specialize=["states", "slots"])
def delta_rows_back(
    k, queries, keys, G, carried, carry, falls, d_products, d_folded, d_next, back, d_keys,
    low, high, until, keep, from_chunk, to_chunk, first, stop, sequence, chunks, k_stride, states, slots,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As many rows a program as BR. Adds to d_keys (dH).

    ``carried``: gradients of the keys behind the last chunk; ``carry``: at the first.
    """
    parts: tl.constexpr = C // BR
    b, part, h = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    n, at, column = tl.load(sequence + b), tl.arange(0, C), tl.arange(0, BK)
    row = part * BR + tl.arange(0, BR)
    number, wide = b - tl.load(chunks + n), (column < DK)[None, :]
    k += h // GROUP * DK
    queries += h * DK
    keys += h * DK
    if G is not None:
        G += h
    start, last = tl.load(from_chunk + n), tl.load(to_chunk + n)
    gone = tl.load(until + b * H + h)
    if (b < last) & (gone > start):
        base = (n * H + h).to(tl.int64) * slots
        d_key = tl.zeros([BR, BK], tl.float32)
        if carried is not None:
            slot = base
            if gone > last:
                slot += place_of(low, high, last, number, h, states, H, KP)
            d_key += tl.load(carried + keys_at(slot, row, column, DK, C), mask=wide & (gone > last), other=0.0)
        begin, end = tl.maximum(start, b + 1), tl.minimum(gone, last)
        for passed in range(end - begin):
            c = end - 1 - passed
            query, asks = tokens_of(first, stop, c, C)
            slot = slot_at(low, high, keep, slots, c, number, h, states, H, KP)
            took = wide & (tl.load(falls + slot) > 0)
            d_key += tl.load(d_folded + keys_at(slot, row, column, DK, C), mask=took, other=0.0).to(tl.float32)
            d_key = d_key * whole_decay(G, H, tl.load(stop + c))
            factor = rounded(d_key, FACTOR)
            tl.store(d_next + keys_at(slot, row, column, DK, C), factor, mask=wide)
            h_ = rows(keys, H * DK, query, asks, column, DK, C)
            back_ = rounded(product(factor, tl.trans(h_), PRECISION), FACTOR)
            tl.store(back + slot * (C * C) + row[:, None] * C + at[None, :], back_)
            k_ = rows(k, k_stride, query, asks, column, DK, C).to(FACTOR)
            d_key -= product(back_, k_, PRECISION)
            q_ = rows(queries, H * DK, query, asks, column, DK, C)
            d_S = tl.load(d_products + slot * (C * C) + at[None, :] * C + row[:, None])
            d_key += product(d_S, q_, PRECISION)
        if b >= start:
            token = tl.load(first + b)
            mine = token + row < tl.load(stop + b)
            to_end = end_decays(G, H, token, part * BR, tl.load(stop + b), BR)
            place = d_keys + (token.to(tl.int64) * H + h) * DK + row[:, None] * (H * DK) + column[None, :]
            there = mine[:, None] & wide
            tl.store(place, tl.load(place, mask=there, other=0.0) + d_key * to_end[:, None], mask=there)
        else:
            slot = base + place_of(low, high, start, number, h, states, H, KP)
            tl.store(carry + keys_at(slot, row, column, DK, C), d_key, mask=wide)


@triton.jit(do_not_specialize=["slots"])
def delta_row_reads(
    kept_keys, along, back, d_products, d_next, d_queries, d_old, d_keys, met, chunk, keep, first, stop, slots,
    H: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk, head and BK columns: adds to d_queries (dQ'), d_old (dK) and d_keys (dH) [tokens, H, DK]."""
    tiles: tl.constexpr = tl.cdiv(DK, BK)
    c, h = tl.load(chunk + tl.program_id(0) // tiles), tl.program_id(1)
    column, at = tl.program_id(0) % tiles * BK + tl.arange(0, BK), tl.arange(0, C)
    token, inside = tokens_of(first, stop, c, C)
    d_q, d_k, d_h = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    row = (tl.load(keep + c) * H + h).to(tl.int64) * slots
    for each in range(tl.load(met + c * H + h)):
        slot = row + each
        wide = (column < DK)[None, :]
        k_ = tl.load(kept_keys + keys_at(slot, at, column, DK, C), mask=wide, other=0.0)
        next_ = tl.load(d_next + keys_at(slot, at, column, DK, C), mask=wide, other=0.0)
        d_q += product(tl.load(d_products + square_at(slot, C)), k_, PRECISION)
        d_k += product(tl.trans(tl.load(back + square_at(slot, C))), k_, PRECISION)
        d_h += product(tl.trans(tl.load(along + square_at(slot, C))), next_, PRECISION)
    place = (token.to(tl.int64) * H + h) * DK + at[:, None] * (H * DK) + column[None, :]
    there = inside[:, None] & (column < DK)[None, :]
    tl.store(d_queries + place, tl.load(d_queries + place, mask=there, other=0.0) + d_q, mask=there)
    tl.store(d_old + place, tl.load(d_old + place, mask=there, other=0.0) - d_k, mask=there)
    tl.store(d_keys + place, tl.load(d_keys + place, mask=there, other=0.0) - d_h, mask=there)


@triton.jit(do_not_specialize=["K", "states", "slots", "scale"])
def delta_row_values(
    p, A, d_o, d_v, d_p, falls, into, folded, d_kept, d_parts,
    low, high, until, keep, from_chunk, to_chunk, count, after, first, stop, sequence, chunks, K, states, slots, scale,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk of rows, head and BV columns: adds to d_v [tokens, H, DV], and to d_p [tokens, H]."""
    tiles: tl.constexpr = tl.cdiv(DV, BV)
    b, h, part = tl.program_id(0) // tiles, tl.program_id(1), tl.program_id(0) % tiles
    n, at, column = tl.load(sequence + b), tl.arange(0, C), part * BV + tl.arange(0, BV)
    token, inside = tokens_of(first, stop, b, C)
    number = b - tl.load(chunks + n)
    start, last = tl.load(from_chunk + n), tl.load(to_chunk + n)
    gone = tl.load(until + b * H + h)
    if p is not None:
        p += h
    if (b < last) & (gone > tl.maximum(start, b + 1)):
        d_v_, d_part = tl.zeros([C, BV], tl.float32), tl.zeros([C], tl.float32)
        for c in range(tl.maximum(start, b + 1), tl.minimum(gone, last)):
            query, asks = tokens_of(first, stop, c, C)
            slot = slot_at(low, high, keep, slots, c, number, h, states, H, KP)
            d_o_ = rows(d_o + h * DV, H * DV, query, asks, column, DV, C).to(FACTOR)
            d_v_ += product(tl.trans(tl.load(A + square_at(slot, C))), d_o_, PRECISION) * scale
            if p is not None:
                d_part += tl.load(d_parts + slot * C + at)
            if tl.load(falls + slot) > 0:
                for j in range(tl.load(count + tl.load(after + c) * H + h)):
                    share = share_in(into + slot * (2 * C), p, H, token, inside, j, C)
                    if tl.max(share, 0) > 0:
                        for d in range(0, DK, BK):
                            wide = d + tl.arange(0, BK)
                            k_ = tl.load(folded + keys_at(slot, at, wide, DK, C), mask=(wide < DK)[None, :], other=0.0)
                            d_S = matrix(d_kept, (tl.load(keep + c) * H + h) * K + j, wide, column, DK, DV, True)
                            d_v_ += product(k_, d_S, PRECISION) * share[:, None]
        place = (token.to(tl.int64) * H + h) * DV + at[:, None] * (H * DV) + column[None, :]
        there = inside[:, None] & (column < DV)[None, :]
        tl.store(d_v + place, tl.load(d_v + place, mask=there, other=0.0) + d_v_, mask=there)
        if p is not None:
            place_p = token.to(tl.int64) * H + h + at * H
            mine = inside & (part == 0)
            tl.store(d_p + place_p, tl.load(d_p + place_p, mask=mine, other=0.0) + d_part, mask=mine)


def rows_back(x: Operation, piece: Piece, given: dict[str, Any], carried: Tensor | None) -> Tensor | None:
    """The gradients of keys before a piece, of those behind it; ``given``: the other arguments by name."""
    if x.rows is None:
        return None
    given, all_chunks = given | vars(piece), (x.tiles.count, x.v.shape[1])
    met_of(x, piece, given)
    carry = carry_of(x)
    keys = {"carried": carried, "carry": carry, "BK": tile(x.k.shape[2], 256)}
    x.launch(delta_rows_back, all_chunks, given | keys, "BR")
    x.launch(delta_row_reads, (len(piece.chunk), x.v.shape[1]), given, "BK")
    x.launch(delta_row_values, all_chunks, given, "BV")
    return carry
