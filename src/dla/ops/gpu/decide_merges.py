"""The fourth kernel of decisions: which starts end, and when. One warp a head, one lane a state (or two), oldest first.

At a boundary the tokens since the one before are counted to the current state. If the list is full, the adjacent pair
with the smallest density of scores is merged, the older of those that tie; then the new state is appended. Sums of
scores are integers in units of 2^-32. Densities are not negative: as floats they order like their bits.
"""

import triton
import triton.language as tl

from dla.ops.gpu.decide_settle import UNIT
from dla.ops.rules import TIE

TIES = tl.constexpr(TIE)
NEVER = tl.constexpr(0x7F800000)
MOST = tl.constexpr(4 * UNIT.value)  # above all densities: scores are at most two, but for those not a number


@triton.jit
def cheapest(tokens, info, pairs, LANES: tl.constexpr):
    """The oldest of the first ``pairs`` pairs that tie for the smallest density, of their sums of tokens and scores."""
    lane = tl.arange(0, LANES)
    cost = info.to(tl.float32) / tl.maximum(tokens, 1).to(tl.float32)
    fit = (lane < pairs) & (cost < MOST)
    bits = cost.to(tl.int32, bitcast=True)
    least = tl.min(tl.where(fit, bits, NEVER), 0).to(tl.float32, bitcast=True)
    largest = tl.max(tl.where(fit, bits, 0), 0).to(tl.float32, bitcast=True)
    pair = tl.min(tl.where(fit & (cost <= least + TIES * largest), lane, LANES), 0)
    return tl.where(pair < LANES, pair, 0)


@triton.jit
def merges(
    chunks, offset, opened, sums, many, totals, size0, count0, info0, death, initial_death,
    HEADS: tl.constexpr, CAPACITY: tl.constexpr, LANES: tl.constexpr, CARRIED: tl.constexpr, PACKED: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    n, head = program // HEADS, program % HEADS
    lane = tl.arange(0, LANES)
    younger = tl.minimum(lane + 1, LANES - 1)
    begin = tl.load(offset + n)
    size = tl.full([], 0, tl.int32)
    tokens, start, info = tl.zeros([LANES], tl.int32), lane - CAPACITY, tl.zeros([LANES], tl.int64)
    if CARRIED:  # states carried in stand before token 0
        size = tl.load(size0 + program)
        held = program.to(tl.int64) * CAPACITY + lane
        tokens = tl.load(count0 + held, mask=lane < CAPACITY, other=0)
        info = tl.load(info0 + held, mask=lane < CAPACITY, other=0)
    counted, summed, base = begin, tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for chunk in range(tl.load(chunks + n), tl.load(chunks + n + 1)):
        here = chunk * HEADS + head.to(tl.int64)
        for i in range(tl.load(many + here)):
            token, upto = tl.load(opened + here * C + i), base + tl.load(sums + here * C + i)
            current = lane == size - 1
            tokens += tl.where(current, token - counted, 0)
            info += tl.where(current, upto - summed, 0)
            counted, summed = token, upto
            # a full list merges a pair
            next_tokens, next_info = tl.gather(tokens, younger, 0), tl.gather(info, younger, 0)
            next_start = tl.gather(start, younger, 0)
            full = size == CAPACITY
            pair = tl.where(full, cheapest(tokens + next_tokens, info + next_info, size - 1, LANES), LANES)
            ends = lane == pair + 1
            step = (token if PACKED else token - begin) + 0 * lane
            tl.store(death + start.to(tl.int64) * HEADS + head, step, mask=ends & (start >= 0))
            if CARRIED:
                place = initial_death + program.to(tl.int64) * CAPACITY + (start + CAPACITY)
                tl.store(place, step, mask=ends & (start < 0))
            tokens = tl.where(lane == pair, tokens + next_tokens, tl.where(lane > pair, next_tokens, tokens))
            info = tl.where(lane == pair, info + next_info, tl.where(lane > pair, next_info, info))
            start = tl.where(lane > pair, next_start, start)
            # the boundary's token opens a state
            size = tl.where(full, size - 1, size)
            new = lane == size
            tokens, info, start = tl.where(new, 0, tokens), tl.where(new, 0, info), tl.where(new, token, start)
            size += 1
        base += tl.load(totals + here)
