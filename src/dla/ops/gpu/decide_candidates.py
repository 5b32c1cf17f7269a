"""The first kernel of decisions: were a state to start at token j of its chunk, which token would open the next one?

``following[j]`` is that token, C if there is none in the chunk, and ``last[j]`` the last start that following on from j
leads to. Neither depends on other chunks. On the way, what the second kernel needs of every token is noted.
"""

import triton
import triton.language as tl

from dla.ops.gpu.decide_table import information, squares, table

LINKS = tl.constexpr(3)  # rows of int32 a chunk and head: following, last, poisoned
# Rows of float32: size, level, running decay (coarse and fine), x and square of the state that starts with the chunk,
# one over the size of scaled rows, both scales, decay.
NOTES = tl.constexpr(10)


@triton.jit
def opens(score, position, tau, block, BLOCK: tl.constexpr):
    """Whether a token with this score, at this position in its sequence, opens a state."""
    if BLOCK:
        return position % block == 0
    else:
        return score >= tau


@triton.jit
def locate(first, end, HEADS: tl.constexpr, C: tl.constexpr):
    """The program's number, chunk and head, its first token, and which of its tokens are there.

    Heads are neighbours in the grid: those of a key head find its keys in the cache.
    """
    program = tl.program_id(0)
    chunk = program // HEADS
    token = tl.load(first + chunk)
    inside = token + tl.arange(0, C) < tl.load(end + chunk)
    return program.to(tl.int64), chunk, program % HEADS, token.to(tl.int64), inside


@triton.jit
def twice(step):
    """step[step[j]], for indices step [C]."""
    at = tl.arange(0, step.shape[0])
    return tl.sum(tl.where(step[:, None] == at[None, :], step[None, :], 0), 1)


@triton.jit(do_not_specialize=["block"])
def candidates(
    k, v, g, first, end, sequence, offset, position0, links, notes, k_stride, v_stride, tau, block,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr,
    TILE_V: tl.constexpr, DECAYS: tl.constexpr, CARRIED: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr, DOUBLINGS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, C)
    program, chunk, head, token, inside = locate(first, end, HEADS, C)
    x, x_own, share, decay, step, size, level, coarse, fine, over, scale_k, scale_v, poisoned = table(
        k, v, g, token, inside, head, k_stride, v_stride, HEADS, GROUP, DK, DV, TILE_K, TILE_V, DECAYS, PRECISION
    )  # fmt: skip
    link = links + program * LINKS * C + at
    tl.store(link + 2 * C, poisoned)
    note = notes + program * NOTES * C + at
    tl.store(note, size)
    tl.store(note + C, level)
    tl.store(note + 2 * C, coarse)
    tl.store(note + 3 * C, fine)
    tl.store(note + 4 * C, x_own)
    tl.store(note + 6 * C, over)
    tl.store(note + 7 * C, scale_k)
    tl.store(note + 8 * C, scale_v)
    tl.store(note + 9 * C, step)
    square = squares(x, share, decay, step, size, level, PRECISION)
    tl.store(note + 5 * C, tl.sum(tl.where(at[None, :] == 0, square, 0.0), 1))
    score = information(x, square, (size - level)[:, None], STATE)
    position = at.to(tl.int64)
    if BLOCK:
        n = tl.load(sequence + chunk)
        position += token - tl.load(offset + n)
        if CARRIED:
            position += tl.load(position0 + n)
        hit = opens(score, position[:, None], tau, block, BLOCK)
    else:
        hit = opens(score, position[:, None], tau, block, BLOCK) & (at[None, :] > poisoned[:, None])
    hit = hit & (at[None, :] < at[:, None]) & inside[:, None]
    following = tl.min(tl.where(hit, at[:, None], C), 0)
    last = tl.where(following < C, following, at)
    for _ in tl.static_range(DOUBLINGS):
        last = twice(last)
    tl.store(link, following)
    tl.store(link + C, last)
