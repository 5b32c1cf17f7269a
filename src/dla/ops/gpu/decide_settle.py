"""The third kernel of decisions: each chunk's boundaries, and the scores behind the first of them.

The boundaries are ``hit``, where the state carried into the chunk ends, and all that following on from there leads to.
The table of what tokens see is made again, and every token behind ``hit`` takes the column of the start before it. Of
one column the squares need no product of tables: tokens of a state have seen the same state grow. For merges,
boundaries are listed with the chunk's sum of scores before each, in units of 2^-32: sums of those are exact.
"""

import triton
import triton.language as tl

from dla.ops.gpu.decide_candidates import LINKS, locate, twice
from dla.ops.gpu.decide_table import BAD, grown_squares, information, larger, table
from dla.ops.segmentation import ALIVE

LIVES = tl.constexpr(ALIVE)
UNIT = tl.constexpr(2.0**32)  # of scores in sums
POISON = tl.constexpr(2.0**15)  # a score that is not a number, in sums


@triton.jit
def led_to(hit, step, C: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Which tokens open a state, if ``hit`` is the first and step [C] leads from each to the next; and the latest
    of them before each token, -1 where there is none."""
    at = tl.arange(0, C)
    step = tl.where(step < C, step, at)
    opens = at == hit
    for _ in tl.static_range(DOUBLINGS):
        reached = opens[:, None] & (step[:, None] == at[None, :])
        opens = opens | (tl.max(reached.to(tl.int32), 0) > 0)
        step = twice(step)
    start = tl.associative_scan(tl.where(opens, at, -1), 0, larger)
    return opens, tl.where(at > 0, tl.gather(start, tl.maximum(at - 1, 0), 0), -1)


@triton.jit
def list_boundaries(found, opens, inside, token, program, opened, sums, many, totals, C: tl.constexpr):
    """What ``merges`` needs of a chunk with these scores, in which these tokens open a state."""
    at = tl.arange(0, C)
    found = tl.where(inside, tl.where(found == found, found, POISON), 0.0)
    units = (found * UNIT).to(tl.int64)
    upto = tl.cumsum(units, 0)
    rank = tl.cumsum(opens.to(tl.int32), 0) - 1
    tl.store(opened + program * C + rank, (token + at).to(tl.int32), mask=opens)
    tl.store(sums + program * C + rank, upto - units, mask=opens)
    final = at == C - 1  # (where Triton 3.7 compiles sums as sums, it fails for Blackwell's GPUs)
    tl.store(many + program + 0 * at, rank + 1, mask=final)
    tl.store(totals + program + 0 * at, upto, mask=final)


@triton.jit
def settle(
    k, v, g, first, end, links, hits, score, boundary, death, opened, sums, many, totals,
    k_stride, v_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr,
    TILE_V: tl.constexpr, DECAYS: tl.constexpr, STATE: tl.constexpr, MERGES: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, DOUBLINGS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, C)
    program, _, head, token, inside = locate(first, end, HEADS, C)
    hit = tl.load(hits + program)
    opens, start = led_to(hit, tl.load(links + program * LINKS * C + at), C, DOUBLINGS)
    x, _, share, decay, decayed, size, level, _, _, _, _, _, poisoned = table(
        k, v, g, token, inside, head, k_stride, v_stride, HEADS, GROUP, DK, DV, TILE_K, TILE_V, DECAYS, PRECISION
    )  # fmt: skip
    mine = at[None, :] == start[:, None]
    seen = tl.sum(tl.where(mine, x, 0.0), 1)
    before = tl.where(opens, 0.0, seen)[None, :]  # what tokens that have joined saw, and the one that opened did not
    members = at[None, :] >= start[:, None]  # of those before t, which are in the state that t sees
    square = tl.sum(tl.where(members, grown_squares(before, share, decay, decayed, size, level), 0.0), 1)
    found = tl.where(poisoned >= start, BAD, information(seen, square, size - level, STATE))
    out = token * HEADS + head + at * HEADS
    tl.store(score + out, found, mask=inside & (at > hit))
    tl.store(boundary + out, opens, mask=inside)
    tl.store(death + out, tl.where(opens, LIVES, -1), mask=inside)
    if MERGES:
        found = tl.where(at > hit, found, tl.load(score + out, mask=inside & (at <= hit), other=0.0))
        list_boundaries(found, opens, inside, token, program, opened, sums, many, totals, C)
