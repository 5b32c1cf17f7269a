"""With the delta rule: squares and scores of a chunk's tokens, from x and y of the tables before, and what follows.

The states are those that could have started in this chunk (decide_delta_table.py), or in the one before (``OLD``,
decide_delta_window.py), some of them at a time.
"""

import triton
import triton.language as tl

from dla.ops.gpu.decide_candidates import locate, opens, twice
from dla.ops.gpu.decide_delta_table import DELTA_LINKS, DELTA_NOTES, decays_of, end_of
from dla.ops.gpu.decide_table import BAD, FAINTEST, information
from dla.ops.gpu.language import product

SMALLEST = tl.constexpr(2 * FAINTEST.value)  # a logarithm: what a square is at least, beside larger ones


@triton.jit
def left_by(x, y, size, level, after, step, b, sign):
    """What each step s adds to the square of the states that see x[s, j] and y[s, j], over 2^(2 after[s])."""
    own, past = size - after, level + step - after
    mixed = 2 * tl.exp2(own + past) * sign * (1 - b)
    return tl.exp2(2 * own)[:, None] + mixed[:, None] * x - (tl.exp2(2 * past) * b * (2 - b))[:, None] * y


@triton.jit
def passing(decay, after, level, C: tl.constexpr):
    """[t, s]: how much of what step s adds is left when t sees it; both over their levels."""
    at = tl.arange(0, C)
    left = tl.exp2(tl.maximum(2 * (decay + after[None, :] - level[:, None]), SMALLEST))
    return tl.where(at[None, :] < at[:, None], left, 0.0)


@triton.jit(do_not_specialize=["block"])
def delta_scores(
    g, first, end, sequence, offset, chunks, position0, scores, y, notes, links, tau, block,
    HEADS: tl.constexpr, TILE_K: tl.constexpr, DECAYS: tl.constexpr, CARRIED: tl.constexpr, BLOCK: tl.constexpr,
    STATE: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, DOUBLINGS: tl.constexpr, OLD: tl.constexpr,
):  # fmt: skip
    """scores [chunks, HEADS, C, C] of token t and start j, in the place of x."""
    at = tl.arange(0, C)
    program, chunk, head, token, inside = locate(first, end, HEADS, C)
    n = tl.load(sequence + chunk)
    if (not OLD) or (chunk > tl.load(chunks + n)):
        note, link = notes + program * DELTA_NOTES * C, links + program * DELTA_LINKS * C
        old, old_link = note - HEADS * DELTA_NOTES * C, link - HEADS * DELTA_LINKS * C
        step, coarse, fine, decay, _bad = decays_of(g, token, head, inside, HEADS, DECAYS, C)
        size, sign, b = tl.load(note + at), tl.load(note + 6 * C + at), tl.load(note + 5 * C + at)
        level, poisoned = tl.load(note + (14 if OLD else 1) * C + at), tl.load(link + 2 * C + at)
        after = tl.maximum(level + step, size)
        left = passing(decay, after, level, C)
        end_coarse, end_fine, end_level = end_of(note, C)
        to_end = (end_coarse - coarse) + (end_fine - fine) + after - end_level
        position = at.to(tl.int64)
        if BLOCK:
            position += token - tl.load(offset + n)
            if CARRIED:
                position += tl.load(position0 + n)
        for i in range(0, C, TILE_K):
            j = i + tl.arange(0, TILE_K)
            place = program * C * C + at[:, None] * C + j[None, :]
            x_, y_ = tl.load(scores + place), tl.load(y + place)
            added = left_by(x_, y_, size, level, after, step, b, sign)
            if OLD:
                lost = tl.max(tl.load(old_link + 2 * C + at), 0)
                bad = (poisoned >= -1)[:, None] | (j <= lost)[None, :]
                passed = tl.load(note + 2 * C + at - 1, mask=at > 0, other=0.0)
                passed += tl.load(note + 3 * C + at - 1, mask=at > 0, other=0.0)
                _c, _f, old_level = end_of(old, C)
                square = tl.load(old + 13 * C + j)[None, :] * tl.exp2(2 * (old_level + passed - level))[:, None]
                square += product(left, added, PRECISION)
            else:
                bad = j[None, :] <= poisoned[:, None]
                added = tl.where(at[:, None] >= j[None, :], added, 0.0)
                tl.store(note + 13 * C + j, tl.sum(added * tl.exp2(tl.maximum(2 * to_end, SMALLEST))[:, None], 0))
                square = product(left, added, PRECISION)
            score = tl.where(bad, BAD, information(sign[:, None] * x_, square, (size - level)[:, None], STATE))
            tl.store(scores + place, score)
            hit = opens(score, position[:, None], tau, block, BLOCK) & inside[:, None]
            if not OLD:
                hit = hit & (j[None, :] < at[:, None])
            tl.store(link + (3 if OLD else 0) * C + j, tl.min(tl.where(hit, at[:, None], C), 0))
        if not OLD:
            tl.debug_barrier()  # other threads read what was written
            following = tl.load(link + at)
            leads = tl.where(following < C, following, at)
            for _ in tl.static_range(DOUBLINGS):
                leads = twice(leads)
            tl.store(link + C + at, leads)
