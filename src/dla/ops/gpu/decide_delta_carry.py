"""With the delta rule: from chunk to chunk of a sequence, where the state that is current at its start ends.

A state that started in the last chunk ends at ``beyond`` of its start (decide_delta_window.py). Only one that is older
needs its matrix S = 2^scale * matrix, which lies in memory and is worked on in tiles. With R = eff S, a chunk's tokens
see of it and of each other (decide_delta_table.py, j = 0)

    seen_t = e^(decay since the chunk's start) R_t + sum_s a[t, s] v_s      x_t = seen_t . v_t       y_t = |seen_t|^2

so its square follows from step to step, and S <- e^(decay) S + sum_t e^(decay from t on) k_t (n_t v_t - b_t e^g_t
seen_t).
"""

import triton
import triton.language as tl

from dla.ops.gpu.decide_candidates import opens
from dla.ops.gpu.decide_delta_table import DELTA_LINKS, DELTA_NOTES, end_of, unit_rows
from dla.ops.gpu.decide_delta_window import matrix_rows
from dla.ops.gpu.decide_table import BAD, FIRST, LOWEST, NONE, information
from dla.ops.gpu.language import product


@triton.jit
def tile_at(matrix, program, i, j, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr):
    """Where the tile at (i, j) of a program's matrix [DK, DV] lies, and what of it is there."""
    row, column = i + tl.arange(0, TILE_K), j + tl.arange(0, TILE_V)
    place = matrix + program.to(tl.int64) * DK * DV + row[:, None] * DV + column[None, :]
    return place, (row < DK)[:, None] & (column < DV)[None, :]


@triton.jit
def composed(a, b, c, d):
    """x -> a x + b, then x -> c x + d."""
    return a * c, b * c + d


@triton.jit
def from_tokens(
    a, v, note, token, end, j, v_stride, DV: tl.constexpr, TILE: tl.constexpr, TILE_V: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Columns from j of a times a chunk's unit values: [C, TILE_V]. Some tokens at a time, which saves registers."""
    total = tl.zeros([C, TILE_V], tl.float32)
    for s in range(0, C, TILE):
        at = s + tl.arange(0, TILE)
        scale, over = tl.load(note + 9 * C + at), tl.load(note + 10 * C + at)
        values = unit_rows(v + (token + s) * v_stride, token + at < end, v_stride, j, scale, over, DV, TILE_V)
        total += product(tl.load(a + tl.arange(0, C)[:, None] * C + at[None, :]), values, PRECISION)
    return total


@triton.jit
def build(
    v, end_keys, note, matrix, program, since, token, v_stride, level, end_coarse, end_fine,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The state of the tokens from ``since`` on of a whole chunk, at its end, over 2^level; its square."""
    at = tl.arange(0, C)
    square, everywhere = tl.full([], 0, tl.float32), at >= 0
    scale, over = tl.load(note + 9 * C + at), tl.load(note + 10 * C + at)
    weight = (end_coarse - tl.load(note + 2 * C + at)) + (end_fine - tl.load(note + 3 * C + at)) + tl.load(note + at)
    weight = tl.where(at >= since, tl.exp2(weight - level) * tl.load(note + 6 * C + at), 0.0)
    for j in range(0, DV, TILE_V):
        values = unit_rows(v + token * v_stride, everywhere, v_stride, j, scale, over, DV, TILE_V) * weight[:, None]
        for i in range(0, DK, TILE_K):
            keys = matrix_rows(end_keys, token, everywhere, i + tl.arange(0, TILE_K), HEADS, DK, C)
            place, there = tile_at(matrix, program, i, j, DK, DV, TILE_K, TILE_V)
            tile = product(tl.trans(keys), values, PRECISION)
            square += tl.sum(tl.sum(tile * tile, 1), 0)
            tl.store(place, tile, mask=there)
    return square


@triton.jit(do_not_specialize=["block"])
def delta_carry(
    k, v, chunks, offset, position0, size0, scale0, square0, spoiled0, matrix, c, eff, end_keys, notes, links, hits,
    origins, score, k_stride, v_stride, tau, block,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr,
    TILE_V: tl.constexpr, CARRIED: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """One program a sequence and head. hits, origins [chunks, HEADS]: the first token that opens a state, and where in
    the last chunk the state before it started; -1 where its scores are written here."""
    program = tl.program_id(0)
    n, head = program // HEADS, program % HEADS
    at = tl.arange(0, C)
    k += head // GROUP * DK
    v += head * DV
    eff += head * DK
    end_keys += head * DK
    begin, end, first_chunk = tl.load(offset + n), tl.load(offset + n + 1), tl.load(chunks + n)
    position = at.to(tl.int64)
    opened, since = tl.full([], 0, tl.int32), tl.full([], -1, tl.int32)
    scale, square, spoiled = tl.full([], NONE, tl.float32), tl.full([], 0, tl.float32), tl.full([], -2, tl.int32)
    if CARRIED:
        opened, scale, square = tl.load(size0 + program), tl.load(scale0 + program), tl.load(square0 + program)
        position += tl.load(position0 + n)
        spoiled = tl.load(spoiled0 + program)
    for chunk in range(first_chunk, tl.load(chunks + n + 1)):
        here = chunk * HEADS + head.to(tl.int64)
        token = begin + (chunk - first_chunk) * C
        inside, token = token + at < end, token.to(tl.int64)
        note, link = notes + here * DELTA_NOTES * C, links + here * DELTA_LINKS * C
        tl.store(origins + here, since)
        new = opened == 0
        hit = tl.full([], 0, tl.int32)
        if since >= 0:
            hit = tl.load(link + 3 * C + since)
        if new:  # a sequence's first token
            tl.store(score + token * HEADS + head, FIRST)
        lasts = (since < 0) | ((hit == C) & (token + C < end))
        if (new == 0) & lasts:
            if since >= 0:
                old = notes + (here - HEADS) * DELTA_NOTES * C
                end_coarse, end_fine, scale = end_of(old, C)
                square = build(v, end_keys, old, matrix, program, since, token - C, v_stride, scale, end_coarse,
                               end_fine, HEADS, DK, DV, TILE_K, TILE_V, PRECISION, C)  # fmt: skip
                lost = tl.max(tl.load(links + (here - HEADS) * DELTA_LINKS * C + 2 * C + at), 0)
                spoiled = tl.where(lost >= since, -1, -2)
                tl.debug_barrier()  # other threads read what was written
            size, level, step = tl.load(note + at), tl.load(note + C + at), tl.load(note + 4 * C + at)
            sign, b = tl.load(note + 6 * C + at), tl.load(note + 5 * C + at)
            passed = tl.load(note + 2 * C + at - 1, mask=at > 0, other=0.0)
            passed += tl.load(note + 3 * C + at - 1, mask=at > 0, other=0.0)
            gone = square <= 0
            norm = tl.where(gone, NONE, scale + 0.5 * tl.log2(tl.where(gone, 1.0, square)))
            top = tl.maximum(level, norm + passed)
            mine = tl.exp2(level - top)
            now = tl.where(gone, 0.0, tl.exp2(scale + passed - top))
            end_coarse, end_fine, _level = end_of(note, C)
            rest = (end_coarse - tl.load(note + 2 * C + at)) + (end_fine - tl.load(note + 3 * C + at))
            faded = end_coarse + end_fine
            reached = tl.maximum(tl.max(rest + size, 0), tl.maximum(norm + faded, LOWEST))
            keep = tl.where(gone, 0.0, tl.exp2(tl.minimum(scale + faded - reached, 100.0)))
            written = tl.exp2(rest + size - reached) * sign
            erased = tl.exp2(rest + step + top - reached) * b
            scale_k, over_k = tl.load(note + 7 * C + at), tl.load(note + 8 * C + at)
            scale_v, over_v = tl.load(note + 9 * C + at), tl.load(note + 10 * C + at)
            x, y, grown = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.full([], 0, tl.float32)
            for j in range(0, DV, TILE_V):
                R = tl.zeros([C, TILE_V], tl.float32)
                for i in range(0, DK, TILE_K):
                    met = matrix_rows(eff, token, inside, i + tl.arange(0, TILE_K), HEADS, DK, C)
                    place, there = tile_at(matrix, program, i, j, DK, DV, TILE_K, TILE_V)
                    R += product(met, tl.load(place, mask=there, other=0.0), PRECISION)
                seen = from_tokens(c + here * C * C, v, note, token, end, j, v_stride, DV, TILE_K, TILE_V, PRECISION, C)
                seen = seen * mine[:, None] + R * now[:, None]
                values = unit_rows(v + token * v_stride, inside, v_stride, j, scale_v, over_v, DV, TILE_V)
                x += tl.sum(seen * values, 1)
                y += tl.sum(seen * seen, 1)
                row = values * written[:, None] - seen * erased[:, None]
                for i in range(0, DK, TILE_K):
                    keys = unit_rows(k + token * k_stride, inside, k_stride, i, scale_k, over_k, DK, TILE_K)
                    place, there = tile_at(matrix, program, i, j, DK, DV, TILE_K, TILE_V)
                    tile = tl.load(place, mask=there, other=0.0) * keep + product(tl.trans(keys), row, PRECISION)
                    grown += tl.sum(tl.sum(tile * tile, 1), 0)
                    tl.store(place, tile, mask=there)
            poisoned = tl.maximum(tl.load(link + 2 * C + at), spoiled)
            if since < 0:
                after = tl.maximum(top + step, size)
                own, past = tl.exp2(size - after), tl.exp2(top + step - after)
                added = own * own + 2 * own * past * sign * (1 - b) * x - past * past * b * (2 - b) * y
                start = tl.where(gone, 0.0, tl.exp2(norm - tl.sum(tl.where(at == 0, top, 0.0), 0)))
                spare = note + 11 * C + at  # three rows of notes have served
                tl.store(spare, past * past)
                tl.store(spare + C, added)
                tl.store(spare + 3 * C, after)
                tl.debug_barrier()  # other threads read what was written
                late = at > 0
                left = tl.load(spare - 1, mask=late, other=0.0)
                adds = tl.where(late, tl.load(spare + C - 1, mask=late, other=0.0), start * start)
                # row t of the table is over 2^top[t], which can be more than what the step before it leaves
                rise = tl.where(late, tl.exp2(2 * (tl.load(spare + 3 * C - 1, mask=late, other=0.0) - top)), 1.0)
                _left, whole = tl.associative_scan((left * rise, adds * rise), 0, composed)
                found = information(sign * x, whole, size - top, STATE)
                found = tl.where(poisoned >= -1, BAD, found)
                opening = opens(found, position + (chunk - first_chunk) * C, tau, block, BLOCK)
                hit = tl.min(tl.where(opening & inside, at, C), 0)
                tl.store(score + token * HEADS + head + at * HEADS, found, mask=inside & (at <= hit))
            scale, square = reached, grown
            spoiled = tl.where(tl.max(poisoned, 0) >= -1, -1, -2)
            tl.debug_barrier()  # other threads read the matrix at the next chunk
        tl.store(hits + here, hit)
        since = tl.full([], -1, tl.int32)
        if hit < C:
            since = tl.load(link + C + hit)
        opened = tl.full([], 1, tl.int32)
