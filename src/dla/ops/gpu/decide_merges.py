"""The fourth kernel of decisions: which starts end, and when. One warp a head, a lane a state (or more), oldest first.

A boundary opens a state. If the list is full, the adjacent pair with the smallest density of scores is merged before,
the older of those that tie. Sums of scores are integers in units of 2^-32, so that equal ones are equal however they
came about; tokens are counted in floats, which are exact to 2^24. Densities are not negative: as floats they order
like their bits.

Boundaries come one after another, so that what counts is how long one takes. Hence a boundary is dealt with when the
next one is known, and with it all tokens of the state that it opens; and densities are kept. While the smallest is
looked for, those of three states in a row are computed: after a merge of pair p, pairs p - 1 and p are such.

    states      a   b   c   d   e            pair 1 is merged:   a   b+c   d   e
    densities   ab  bc  cd  de                                   abc bcd   de
    of three    abc bcd cde
"""

import triton
import triton.language as tl

from dla.ops.gpu.decide_settle import UNIT
from dla.ops.rules import TIE

TIES = tl.constexpr(TIE)
NEVER = tl.constexpr(0x7F800000)
MOST = tl.constexpr(4 * UNIT.value)  # above all densities: scores are at most two, but for those not a number


@triton.jit
def density(tokens, info):
    return info.to(tl.float32) / tl.maximum(tokens, 1.0)


@triton.jit
def cheapest(cost, pairs, LANES: tl.constexpr):
    """The oldest of the first ``pairs`` pairs that tie for the smallest cost."""
    lane = tl.arange(0, LANES)
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
    younger, second = tl.minimum(lane + 1, LANES - 1), tl.minimum(lane + 2, LANES - 1)
    begin = tl.load(offset + n)
    size = tl.full([], 0, tl.int32)
    tokens, start, info = tl.zeros([LANES], tl.float32), lane - CAPACITY, tl.zeros([LANES], tl.int64)
    # the newest state, which is not in the list yet: its start, its tokens and scores up to ``token``
    newest, has, scores = tl.full([], 0, tl.int32), tl.full([], 0, tl.float32), tl.full([], 0, tl.int64)
    if CARRIED:  # states carried in stand before token 0
        size = tl.maximum(tl.load(size0 + program) - 1, 0)
        held = program.to(tl.int64) * CAPACITY
        tokens = tl.load(count0 + held + lane, mask=lane < size, other=0).to(tl.float32)
        info = tl.load(info0 + held + lane, mask=lane < size, other=0)
        newest, has = size - CAPACITY, tl.load(count0 + held + size).to(tl.float32)
        scores = tl.load(info0 + held + size)
    cost = density(tokens + tl.gather(tokens, younger, 0), info + tl.gather(info, younger, 0))
    token, base, summed = begin, tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    last = tl.load(chunks + n + 1)
    for chunk in range(tl.load(chunks + n), last + 1):  # the one behind the last stands for the sequence's end
        there = chunk < last
        here = tl.where(there, chunk, last - 1) * HEADS + head.to(tl.int64)
        entry = tl.where(there, opened + here * C, offset + n + 1)
        for i in range(tl.where(there, tl.load(many + here), 1)):
            following, upto = tl.load(entry + i), base + tl.load(sums + here * C + i)
            has, scores = has + (following - token).to(tl.float32), scores + upto - summed
            # the newest state comes into the list; a full one merges a pair
            is_new = lane == size
            tokens, info = tl.where(is_new, has, tokens), tl.where(is_new, scores, info)
            start = tl.where(is_new, newest, start)
            full = size == CAPACITY
            pair = tl.where(full, cheapest(cost, size - 1, LANES), LANES)
            next_tokens, next_info = tl.gather(tokens, younger, 0), tl.gather(info, younger, 0)
            next_start = tl.gather(start, younger, 0)
            two_tokens, two_info = tokens + next_tokens, info + next_info
            three = density(two_tokens + tl.gather(tokens, second, 0), two_info + tl.gather(info, second, 0))
            cost = tl.where(lane == size - 1, density(two_tokens, two_info), cost)
            next_cost = tl.gather(cost, younger, 0)
            ends = lane == pair + 1
            step = (token if PACKED else token - begin) + 0 * lane
            tl.store(death + start.to(tl.int64) * HEADS + head, step, mask=ends & (start >= 0))
            if CARRIED:
                place = initial_death + program.to(tl.int64) * CAPACITY + (start + CAPACITY)
                tl.store(place, step, mask=ends & (start < 0))
            tokens = tl.where(lane < pair, tokens, tl.where(lane == pair, two_tokens, next_tokens))
            info = tl.where(lane < pair, info, tl.where(lane == pair, two_info, next_info))
            start = tl.where(lane <= pair, start, next_start)
            cost = tl.where(lane < pair - 1, cost, tl.where(lane <= pair, three, next_cost))
            size += ((has > 0) & (size < CAPACITY)).to(tl.int32)  # before a sequence's first token there is none
            newest, token, summed = following, following, upto
            has, scores = tl.full([], 0, tl.float32), tl.full([], 0, tl.int64)
        base += tl.load(totals + here)
