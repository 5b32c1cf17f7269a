"""The second kernel of decisions: from chunk to chunk of a sequence, the current state S and where it ends.

S = 2^scale * matrix, with |matrix|^2 = square. A token t of the chunk sees S, decayed by e^P since the chunk's start,
and the sum T of the chunk's tokens before it. With x, square and D as in decide_table.py,

    k^T (e^P S + T) v = e^P k^T S v + x[t, 0]
    |e^P S + T|^2     = e^2P |S|^2 + 2 e^P <S, T> + square[t, 0]
    <S, T>            = sum over s < t of e^D[t, s] n_s k_s^T S v_s

and the last is a running sum. The first token that opens a state, ``hit``, ends S; the chunk's last
start is then last[hit], and S at the next chunk the sum of the tokens from there on. Without a hit all tokens join S.
The matrix is worked on in tiles. A small one stays in registers (PARTS tiles side by side), a large one lies in memory.
"""

import triton
import triton.language as tl

from dla.ops.gpu.decide_candidates import LINKS, NOTES, opens
from dla.ops.gpu.decide_table import BAD, FIRST, LOWEST, NONE, information, rows, scaled
from dla.ops.gpu.language import product


@triton.jit
def tile_of(matrix, program, i, j, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr):
    """Where the tile at (i, j) of a program's matrix [DK, DV] lies, and what of it is there."""
    row, column = i + tl.arange(0, TILE_K), j + tl.arange(0, TILE_V)
    place = matrix + program.to(tl.int64) * DK * DV + row[:, None] * DV + column
    return place, (row < DK)[:, None] & (column < DV)


@triton.jit
def times(a, b, PRECISION: tl.constexpr):
    """a @ b with all digits of b, which is float32. Halves of eight digits meet it in three parts of eight digits."""
    if a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return product(a, low, PRECISION) + product(a, middle, PRECISION) + product(a, high, PRECISION)
    else:
        return product(a.to(tl.float32), b, PRECISION)


@triton.jit
def held(matrix, program, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr,
         PARTS: tl.constexpr, CARRIED: tl.constexpr):  # fmt: skip
    """The tiles of a matrix that stays in registers."""
    S = ()
    for i in tl.static_range(PARTS):
        if CARRIED:
            place, there = tile_of(matrix, program, 0, i * TILE_V, DK, DV, TILE_K, TILE_V)
            S += (tl.load(place, mask=there, other=0.0),)  # type: ignore[assignment]
        else:
            S += (tl.zeros([TILE_K, TILE_V], tl.float32),)  # type: ignore[assignment]
    return S


@triton.jit
def after_both(a, b, c, d):
    """x -> a x + b, then x -> c x + d."""
    return a * c, b * c + d


@triton.jit
def seen(k, v, S, PRECISION: tl.constexpr):
    """k_t^T S v_t [C] of tiles of k, S and v."""
    return tl.sum(times(k, S, PRECISION) * v.to(tl.float32), 1)


@triton.jit
def grown(k, v, S, keep, weight, PRECISION: tl.constexpr):
    """keep * S + the sum of weight_s k_s v_s^T."""
    return keep * S + times(tl.trans(k), v.to(tl.float32) * weight[:, None], PRECISION)


@triton.jit(do_not_specialize=["block"])
def carry(
    k, v, chunks, offset, position0, size0, scale0, square0, spoiled0, matrix, links, notes, hits, score,
    k_stride, v_stride, tau, block,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr,
    TILE_V: tl.constexpr, CARRIED: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    n, head = program // HEADS, program % HEADS
    at = tl.arange(0, C)
    k += head // GROUP * DK
    v += head * DV
    begin, end, first_chunk = tl.load(offset + n), tl.load(offset + n + 1), tl.load(chunks + n)
    position = at.to(tl.int64)
    opened, scale = tl.full([], 0, tl.int32), tl.full([], NONE, tl.float32)
    square, spoiled = tl.full([], 0, tl.float32), tl.full([], -2, tl.int32)
    S = held(matrix, program, DK, DV, TILE_K, TILE_V, PARTS, CARRIED)
    if CARRIED:
        opened, scale, square = tl.load(size0 + program), tl.load(scale0 + program), tl.load(square0 + program)
        position += tl.load(position0 + n)
        spoiled = tl.load(spoiled0 + program)
    for chunk in range(first_chunk, tl.load(chunks + n + 1)):
        here = chunk * HEADS + head.to(tl.int64)
        token = begin + (chunk - first_chunk) * C
        inside, token = token + at < end, token.to(tl.int64)
        note, link = notes + here * NOTES * C + at, links + here * LINKS * C + at
        size, level, coarse, fine = tl.load(note), tl.load(note + C), tl.load(note + 2 * C), tl.load(note + 3 * C)
        over, scale_k, scale_v = tl.load(note + 6 * C), tl.load(note + 7 * C), tl.load(note + 8 * C)
        last, poisoned = tl.load(link + C), tl.maximum(tl.load(link + 2 * C), spoiled)

        # what tokens see of the matrix [C]
        y = tl.zeros([C], tl.float32)
        if PARTS:
            keys = scaled(rows(k + token * k_stride, inside, k_stride, 0, DK, TILE_K), scale_k)
            for i in tl.static_range(PARTS):
                values = scaled(rows(v + token * v_stride, inside, v_stride, i * TILE_V, DV, TILE_V), scale_v)
                y += seen(keys, values, S[i], PRECISION)
        else:
            for i in range(0, DK, TILE_K):
                keys = scaled(rows(k + token * k_stride, inside, k_stride, i, DK, TILE_K), scale_k)
                for j in range(0, DV, TILE_V):
                    values = scaled(rows(v + token * v_stride, inside, v_stride, j, DV, TILE_V), scale_v)
                    place, there = tile_of(matrix, program, i, j, DK, DV, TILE_K, TILE_V)
                    y += seen(keys, values, tl.load(place, mask=there & (opened > 0), other=0.0), PRECISION)
        y *= over

        # scores against S with the tokens before, all over 2^top
        zero = square <= 0
        norm = tl.where(zero, NONE, scale + 0.5 * tl.log2(tl.where(zero, 1.0, square)))
        late = at > 0
        passed = tl.load(note + 2 * C - 1, mask=late, other=0.0) + tl.load(note + 3 * C - 1, mask=late, other=0.0)
        top = tl.maximum(level, norm + passed)
        a, b = tl.where(zero, 0.0, tl.exp2(scale + passed - top)), tl.exp2(level - top)
        stays = tl.load(note + C - 1, mask=late, other=NONE) + tl.load(note + 9 * C - 1, mask=late, other=0.0)
        joins = tl.exp2(tl.load(note - 1, mask=late, other=NONE) - level) * tl.gather(y, tl.maximum(at - 1, 0), 0)
        _, inner = tl.associative_scan((tl.exp2(stays - level), joins), 0, after_both)
        whole = a * a * square + 2 * a * b * inner + b * b * tl.load(note + 5 * C)
        found = information(a * y + b * tl.load(note + 4 * C), whole, size - top, STATE)
        found = tl.where(poisoned >= -1, BAD, found)
        new = (opened == 0) & (at == 0)  # a sequence's first token
        found = tl.where(new, FIRST, found)
        opening = opens(found, position + (chunk - first_chunk) * C, tau, block, BLOCK) | new
        hit = tl.min(tl.where(opening & inside, at, C), 0)
        tl.store(hits + here, hit)
        tl.store(score + token * HEADS + head + at * HEADS, found, mask=inside & (at <= hit))

        # S at the next chunk, over 2^scale
        ended = hit < C
        start = tl.where(ended, tl.sum(tl.where(at == hit, last, 0), 0), -1)
        final = notes + here * NOTES * C + C - 1
        coarse_end, fine_end = tl.load(final + 2 * C), tl.load(final + 3 * C)
        weight = tl.where(at >= start, (coarse_end - coarse) + (fine_end - fine) + size, NONE)
        faded = coarse_end + fine_end
        reached = tl.maximum(tl.max(weight, 0), tl.where(ended, LOWEST, tl.maximum(norm + faded, LOWEST)))
        keep = tl.where(ended | zero, 0.0, tl.exp2(tl.minimum(scale + faded - reached, 100.0)))
        weight = tl.exp2(weight - reached) * over
        square = tl.full([], 0, tl.float32)
        if PARTS:
            if start >= C - TAIL:  # where boundaries are frequent, S is what few tokens leave
                newest = C - TAIL + tl.arange(0, TAIL)
                note_late = notes + here * NOTES * C + newest
                gone = (coarse_end - tl.load(note_late + 2 * C)) + (fine_end - tl.load(note_late + 3 * C))
                share = tl.exp2(gone + tl.load(note_late) - reached) * tl.load(note_late + 6 * C)
                share = tl.where(newest >= start, share, 0.0)
                few, first = token + newest < end, token + C - TAIL
                late_keys = scaled(rows(k + first * k_stride, few, k_stride, 0, DK, TILE_K), tl.load(note_late + 7 * C))
                late_S = ()
                for i in tl.static_range(PARTS):
                    few_values = rows(v + first * v_stride, few, v_stride, i * TILE_V, DV, TILE_V)
                    few_values = scaled(few_values, tl.load(note_late + 8 * C)).to(tl.float32) * share[:, None]
                    late_S += (times(tl.trans(late_keys), few_values, PRECISION),)  # type: ignore[assignment]
                S = late_S
            else:
                new_S = ()
                for i in tl.static_range(PARTS):
                    values = scaled(rows(v + token * v_stride, inside, v_stride, i * TILE_V, DV, TILE_V), scale_v)
                    new_S += (grown(keys, values, S[i], keep, weight, PRECISION),)  # type: ignore[assignment]
                S = new_S
            for i in tl.static_range(PARTS):
                square += tl.sum(tl.sum(S[i] * S[i], 1), 0)
        else:
            for i in range(0, DK, TILE_K):
                keys = scaled(rows(k + token * k_stride, inside, k_stride, i, DK, TILE_K), scale_k)
                for j in range(0, DV, TILE_V):
                    values = scaled(rows(v + token * v_stride, inside, v_stride, j, DV, TILE_V), scale_v)
                    place, there = tile_of(matrix, program, i, j, DK, DV, TILE_K, TILE_V)
                    tile = tl.load(place, mask=there & (opened > 0), other=0.0)
                    tile = grown(keys, values, tile, keep, weight, PRECISION)
                    square += tl.sum(tl.sum(tile * tile, 1), 0)
                    tl.store(place, tile, mask=there)
            tl.debug_barrier()  # other threads read it at the next chunk
        scale, spoiled = reached, tl.where(tl.max(poisoned, 0) >= start, -1, -2)
        opened = tl.full([], 1, tl.int32)
