"""The second kernel of decisions: from chunk to chunk of a sequence, the current state S and where it ends.

S = 2^scale * matrix, with |matrix|^2 = square. A token of the chunk sees S, decayed, and the chunk's tokens before it, T:

    x        = e^P k^T S v + x_own                    (P the decay from the chunk's start up to the token)
    |...|^2  = e^2P |S|^2 + 2 e^P <S, T> + square_own,   <S, T> = sum over s < t of e^D[t, s] n_s k_s^T S v_s

with x_own and square_own from the first kernel. The first token that opens a state, ``hit``, ends S; the chunk's last
start is then last[hit], and S at the next chunk the sum of the tokens from there on. Without a hit all tokens join S.
A matrix of one tile stays in registers, a larger one lies in memory and is worked on tile by tile.
"""

import triton
import triton.language as tl

from dla.ops.gpu.decide_candidates import LINKS, NOTES, opens
from dla.ops.gpu.decide_table import BAD, FIRST, LOWEST, NONE, between, information, rows, scaled, shares
from dla.ops.gpu.language import product


@triton.jit
def tile_of(matrix, program, i, j, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr):
    """Where the tile at (i, j) of a program's matrix [DK, DV] lies, and what of it is there."""
    row, column = i + tl.arange(0, TILE_K), j + tl.arange(0, TILE_V)
    place = matrix + program.to(tl.int64) * DK * DV + row[:, None] * DV + column
    return place, (row < DK)[:, None] & (column < DV)


@triton.jit
def seen(k, v, S, PRECISION: tl.constexpr):
    """k_t^T S v_t [C] of tiles of k, S and v."""
    return tl.sum(product(k.to(tl.float32), S, PRECISION) * v.to(tl.float32), 1)


@triton.jit
def grown(k, v, S, keep, weight, PRECISION: tl.constexpr):
    """keep * S + the sum of weight_s k_s v_s^T."""
    write = product(tl.trans(k.to(tl.float32)), v.to(tl.float32) * weight[:, None], PRECISION)
    return keep * S + write


@triton.jit(do_not_specialize=["block"])
def carry_kernel(
    k, v, chunks, offset, position0, size0, scale0, square0, spoiled0, matrix, links, notes, hits, score,
    k_stride, v_stride, tau, block,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr,
    TILE_V: tl.constexpr, CARRIED: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    HELD: tl.constexpr = TILE_K >= DK and TILE_V >= DV  # in registers
    program = tl.program_id(0)
    n, head = program // HEADS, program % HEADS
    at = tl.arange(0, C)
    k += head // GROUP * DK
    v += head * DV
    begin, end, first_chunk = tl.load(offset + n), tl.load(offset + n + 1), tl.load(chunks + n)
    position = at.to(tl.int64)
    opened, scale = tl.full([], 0, tl.int32), tl.full([], NONE, tl.float32)
    square, spoiled = tl.full([], 0, tl.float32), tl.full([], -2, tl.int32)
    S = tl.zeros([TILE_K, TILE_V], tl.float32)
    if CARRIED:
        opened, scale, square = tl.load(size0 + program), tl.load(scale0 + program), tl.load(square0 + program)
        position += tl.load(position0 + n)
        spoiled = tl.load(spoiled0 + program)
        if HELD:
            place, there = tile_of(matrix, program, 0, 0, DK, DV, TILE_K, TILE_V)
            S = tl.load(place, mask=there, other=0.0)
    for chunk in range(first_chunk, tl.load(chunks + n + 1)):
        here = chunk * HEADS + head.to(tl.int64)
        token = begin + (chunk - first_chunk) * C
        inside, token = token + at < end, token.to(tl.int64)
        note, link = notes + here * NOTES * C + at, links + here * LINKS * C + at
        size, level, coarse, fine = tl.load(note), tl.load(note + C), tl.load(note + 2 * C), tl.load(note + 3 * C)
        coarse_before = tl.load(note + 2 * C - 1, mask=at > 0, other=0.0)
        fine_before = tl.load(note + 3 * C - 1, mask=at > 0, other=0.0)
        over, scale_k, scale_v = tl.load(note + 6 * C), tl.load(note + 7 * C), tl.load(note + 8 * C)
        last, poisoned = tl.load(link + C), tl.maximum(tl.load(link + 2 * C), spoiled)

        # what tokens see of the matrix [C]
        if HELD:
            keys = scaled(rows(k + token * k_stride, inside, k_stride, 0, DK, TILE_K), scale_k)
            values = scaled(rows(v + token * v_stride, inside, v_stride, 0, DV, TILE_V), scale_v)
            y = seen(keys, values, S, PRECISION)
        else:
            y = tl.zeros([C], tl.float32)
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
        passed = coarse_before + fine_before
        top = tl.maximum(level, norm + passed)
        a, b = tl.where(zero, 0.0, tl.exp2(scale + passed - top)), tl.exp2(level - top)
        decay = between(coarse_before, fine_before, coarse, fine)
        inner = tl.sum(shares(decay, size, level) * y[None, :], 1)
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
        if HELD:
            S = grown(keys, values, S, keep, weight, PRECISION)
            square = tl.sum(tl.sum(S * S, 1), 0)
        else:
            square = tl.full([], 0, tl.float32)
            for i in range(0, DK, TILE_K):
                keys = scaled(rows(k + token * k_stride, inside, k_stride, i, DK, TILE_K), scale_k)
                for j in range(0, DV, TILE_V):
                    values = scaled(rows(v + token * v_stride, inside, v_stride, j, DV, TILE_V), scale_v)
                    place, there = tile_of(matrix, program, i, j, DK, DV, TILE_K, TILE_V)
                    old = tl.load(place, mask=there & (opened > 0), other=0.0)
                    new_tile = grown(keys, values, old, keep, weight, PRECISION)
                    square += tl.sum(tl.sum(new_tile * new_tile, 1), 0)
                    tl.store(place, new_tile, mask=there)
            tl.debug_barrier()  # other threads read it at the next chunk
        scale, spoiled = reached, tl.where(tl.max(poisoned, 0) >= start, -1, -2)
        opened = tl.full([], 1, tl.int32)
