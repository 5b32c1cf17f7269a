"""With the delta rule: each chunk's boundaries and scores, taken from the tables of the kernels before."""

import triton
import triton.language as tl

from dla.ops.gpu.decide_candidates import locate
from dla.ops.gpu.decide_delta_table import DELTA_LINKS
from dla.ops.gpu.decide_settle import LIVES, led_to, list_boundaries


@triton.jit
def delta_settle(
    first, end, links, hits, origins, own_scores, old_scores, score, boundary, death, opened, sums, many, totals,
    HEADS: tl.constexpr, MERGES: tl.constexpr, C: tl.constexpr, DOUBLINGS: tl.constexpr,
):  # fmt: skip
    """Tokens up to the first boundary see the state that was current at the chunk's start, the others one from here."""
    at = tl.arange(0, C)
    program, _, head, token, inside = locate(first, end, HEADS, C)
    hit, origin = tl.load(hits + program), tl.load(origins + program)
    opens, start = led_to(hit, tl.load(links + program * DELTA_LINKS * C + at), C, DOUBLINGS)
    table, out = program * C * C + at * C, token * HEADS + head + at * HEADS
    found = tl.load(score + out, mask=inside & (at <= hit) & (origin < 0), other=0.0)
    old = tl.load(old_scores + table + origin, mask=inside & (at <= hit) & (origin >= 0), other=0.0)
    own = tl.load(own_scores + table + start, mask=inside & (at > hit), other=0.0)
    found = tl.where(at > hit, own, tl.where(origin >= 0, old, found))
    tl.store(score + out, found, mask=inside)
    tl.store(boundary + out, opens, mask=inside)
    tl.store(death + out, tl.where(opens, LIVES, -1), mask=inside)
    if MERGES:
        list_boundaries(found, opens, inside, token, program, opened, sums, many, totals, C)
