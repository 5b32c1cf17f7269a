"""The first kernel of decisions: were a state to start at token j of its chunk, which token would open the next one?

``following[j]`` is that token, C if there is none in the chunk, and ``last[j]`` the last start that following on from j
leads to. Neither depends on other chunks. On the way, what the second kernel needs of every token is noted.
"""

import triton
import triton.language as tl

from dla.ops.gpu.decide_table import information, table

LINKS = tl.constexpr(3)  # rows of int32 a chunk and head: following, last, poisoned
NOTES = tl.constexpr(9)  # rows of float32: size, level, running decay (coarse and fine), x and square of the chunk's own
# tokens from its first on, one over the size of scaled rows, both scales


@triton.jit
def opens(score, position, tau, block, BLOCK: tl.constexpr):
    """Whether a token with this score, at this position in its sequence, opens a state."""
    if BLOCK:
        return position % block == 0
    else:  # noqa: RET505 - for Triton both are branches
        return score >= tau


@triton.jit
def locate(first, end, sequence, offset, position0, HEADS: tl.constexpr, CARRIED: tl.constexpr, C: tl.constexpr):
    """The program's number and head, its chunk's tokens, which of them are there, and their positions in the sequence.

    Heads are neighbours in the grid: those of a key head find its keys in the cache.
    """
    program = tl.program_id(0)
    chunk = program // HEADS
    n = tl.load(sequence + chunk)
    token = tl.load(first + chunk) + tl.arange(0, C)
    position = token - tl.load(offset + n)
    if CARRIED:
        position += tl.load(position0 + n)
    return program.to(tl.int64), program % HEADS, token.to(tl.int64), token < tl.load(end + chunk), position


@triton.jit
def twice(step):
    """step[step[j]], for indices step [C]."""
    at = tl.arange(0, step.shape[0])
    return tl.sum(tl.where(step[:, None] == at[None, :], step[None, :], 0), 1)


@triton.jit(do_not_specialize=["block"])
def candidates_kernel(
    k, v, g, first, end, sequence, offset, position0, links, notes, k_stride, v_stride, tau, block,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr,
    TILE_V: tl.constexpr, DECAYS: tl.constexpr, CARRIED: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr, DOUBLINGS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, C)
    program, head, token, inside, position = locate(first, end, sequence, offset, position0, HEADS, CARRIED, C)
    x, square, size, level, coarse, fine, over, scale_k, scale_v, poisoned = table(
        k, v, g, token, inside, head, k_stride, v_stride, HEADS, GROUP, DK, DV, TILE_K, TILE_V, DECAYS, PRECISION
    )  # fmt: skip
    score = information(x, square, (size - level)[:, None], STATE)
    hit = opens(score, position[:, None], tau, block, BLOCK)
    if not BLOCK:
        hit = hit & (at[None, :] > poisoned[:, None])
    hit = hit & (at[None, :] < at[:, None]) & inside[:, None]
    following = tl.min(tl.where(hit, at[:, None], C), 0)
    last = tl.where(following < C, following, at)
    for _ in tl.static_range(DOUBLINGS):
        last = twice(last)
    link = links + program * LINKS * C + at
    tl.store(link, following)
    tl.store(link + C, last)
    tl.store(link + 2 * C, poisoned)
    note = notes + program * NOTES * C + at
    tl.store(note, size)
    tl.store(note + C, level)
    tl.store(note + 2 * C, coarse)
    tl.store(note + 3 * C, fine)
    tl.store(note + 4 * C, tl.sum(tl.where(at[None, :] == 0, x, 0.0), 1))
    tl.store(note + 5 * C, tl.sum(tl.where(at[None, :] == 0, square, 0.0), 1))
    tl.store(note + 6 * C, over)
    tl.store(note + 7 * C, scale_k)
    tl.store(note + 8 * C, scale_v)
