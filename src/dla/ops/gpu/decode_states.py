"""Kernels of a decoding step on the states of a dynamic memory, which are held in slots (state/slots.py).

``step_decisions``, one program a head, scores the token against the current state, finds the pair to merge where a
boundary meets a full memory, writes the bookkeeping anew and what each state counts for in the read. ``step_states``,
one program a head and BV columns, follows: it merges, takes the token in and reads. All numbers stay on the device.

What the first hands to the second, for each head:
    plan     [5] int32     states after the step; the current one's slot; the slots of the merged pair, -1 if there is
                           none; whether the token opens a state
    shares   [3] float32   what decay leaves of the current state and of the pair
    weights  [K] float32   what each state counts for, oldest first: lam by slot number, routed, times the factor
"""

import triton
import triton.language as tl

from dla.ops.gpu.language import columns, moved, numbers
from dla.ops.rules import FIRST_SCORE, SHORT, TIE

FIRST: tl.constexpr = tl.constexpr(FIRST_SCORE)
TIES: tl.constexpr = tl.constexpr(TIE)
SHORTEST: tl.constexpr = tl.constexpr(SHORT)


@triton.jit
def information(product, norm, norm_k, norm_v, sign, size, STATE_SCORE: tl.constexpr):
    """I_t from k^T S v, |S|, |k|, |v| and beta, all float64, where nothing that float32 can hold overflows."""
    token = norm_k * norm_v * tl.abs(sign)
    whole = norm_k * norm_v * norm
    cos = tl.where(whole == 0, 0.0, product / tl.where(whole == 0, 1.0, whole))
    cos = tl.where(sign < 0, -cos, cos)
    if STATE_SCORE:  # of S with the token and S without it, both measured by the larger
        largest = tl.maximum(norm, token)
        largest = tl.where(largest == 0, 1.0, largest)
        a, b = norm / largest, token / largest
        square = a * a + 2 * a * b * cos + b * b
        cos = tl.where(square <= 0, 0.0, (a + b * cos) / tl.sqrt(tl.where(square <= 0, 1.0, square)))
    cos = tl.where(cos > 1, 1.0, tl.where(cos < -1, -1.0, cos))  # keeps NaN
    score = tl.sqrt(2 - 2 * cos)
    score = tl.where(token == 0, 0.0, tl.where(norm == 0, FIRST, score))
    return tl.where(size == 0, FIRST, score).to(tl.float32)


@triton.jit
def cheapest_pair(order, count, info, K, PLACES: tl.constexpr):
    """The lower place of the adjacent pair with the smallest density, of ties the oldest. All K slots are in use."""
    i = tl.arange(0, PLACES)
    pairs = i < K - 1
    this = tl.load(order + i, mask=pairs, other=0)
    after = tl.load(order + i + 1, mask=pairs, other=0)
    n = (tl.load(count + this) + tl.load(count + after)).to(tl.float64)
    cost = (tl.load(info + this) + tl.load(info + after)) / tl.where(n == 0, 1.0, n)
    pairs = pairs & (tl.abs(cost) < float("inf"))
    least = tl.min(tl.where(pairs, cost, float("inf")), 0)
    largest = tl.max(tl.where(pairs, tl.abs(cost), 0.0), 0)
    found = tl.min(tl.where(pairs & (cost <= least + TIES * largest), i, PLACES), 0)
    return tl.where(found == PLACES, 0, found)


@triton.jit(do_not_specialize=["tau", "block"])
def step_decisions(
    q, k, v, lam, g, beta, route, score, boundary, merged,  # of the token; the last three are decisions to follow
    matrices, factor, order, count, info, key_sums, length,  # the memory
    plan, shares, weights,
    tau, block, H, GROUP, K, dk, dv, width,
    STATE_SCORE: tl.constexpr, RECENCY: tl.constexpr,
    PLACES: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The decisions of one head, and its bookkeeping after them."""
    head = tl.program_id(0).to(tl.int64)
    key_head = head // H * (H // GROUP) + head % H // GROUP
    order, factor, count, info = order + head * K, factor + head * K, count + head * K, info + head * K
    i, rows = tl.arange(0, PLACES), tl.arange(0, BK)
    places = i < K
    held = tl.load(count + i, mask=places, other=0)  # [PLACES] by slot, as all of these
    size = tl.sum((held > 0).to(tl.int32), 0)
    newest = tl.load(order + tl.maximum(size - 1, 0))
    k_ = numbers(k, key_head, rows, dk)

    if score is not None:
        now = tl.load(score + head).to(tl.float32)
        opens = tl.load(boundary + head) != 0
        pair = tl.load(merged + head).to(tl.int32)
    else:
        wide_k = k_.to(tl.float64)
        product, norm, norm_v = 0.0 * tl.sum(wide_k, 0), 0.0 * tl.sum(wide_k, 0), 0.0 * tl.sum(wide_k, 0)
        for first in range(0, dv, BV):
            cols = first + tl.arange(0, BV)
            inside = (rows < dk)[:, None] & (cols < dv)[None, :] & (size > 0)
            S = tl.load(matrices + columns(head * K + newest, rows, cols, dk, dv), mask=inside, other=0.0)
            S = S.to(tl.float64)  # [BK, BV]
            v_ = numbers(v, head, cols, dv).to(tl.float64)  # [BV]
            product += tl.sum(tl.sum(wide_k[:, None] * S, 0) * v_, 0)
            norm += tl.sum(tl.sum(S * S, 0), 0)
            norm_v += tl.sum(v_ * v_, 0)
        sign = 1.0
        if beta is not None:
            sign = tl.load(beta + head).to(tl.float64)
        norm_k = tl.sqrt(tl.sum(wide_k * wide_k, 0))
        now = information(product, tl.sqrt(norm), norm_k, tl.sqrt(norm_v), sign, size, STATE_SCORE)
        by_rule = (now >= tau) & (block == 0) | (block > 0) & (tl.load(length + head // H) % tl.maximum(block, 1) == 0)
        opens = by_rule | (size == 0)
        pair = tl.where(opens & (size == K), cheapest_pair(order, count, info, K, PLACES), -1)

    # who is where after the step
    merges = pair >= 0
    after = size - merges.to(tl.int32) + opens.to(tl.int32)
    source = tl.where(merges & (i > pair), i + 1, i)
    source = tl.where(merges & (i == K - 1), pair + 1, source)  # the slot that the merge frees goes to the end
    slot = tl.load(order + source, mask=places, other=0)
    last = after - 1
    from_place = tl.where(merges & (last > pair), last + 1, last)
    from_place = tl.where(merges & (last == K - 1), pair + 1, from_place)
    current = tl.load(order + from_place)
    into, gone = tl.load(order + tl.maximum(pair, 0)), tl.load(order + tl.maximum(pair, 0) + 1)
    into, gone = tl.where(merges, into, -1), tl.where(merges, gone, -1)

    # tokens, scores and factors of every slot: the pair is added up, then the token comes in
    fade = 1.0
    if g is not None:
        fade = tl.exp(tl.load(g + head).to(tl.float32))
    some_gone = tl.maximum(gone, 0)
    share_into = fade * tl.load(factor + tl.maximum(into, 0))
    share_gone = fade * tl.load(factor + some_gone)
    n = tl.where(i == into, held + tl.load(count + some_gone), tl.where(i == gone, 0, held))
    n = tl.where(i == current, tl.where(opens, 0, n) + 1, n)
    scores = tl.load(info + i, mask=places, other=0.0)
    scores = tl.where(i == into, scores + tl.load(info + some_gone), tl.where(i == gone, 0.0, scores))
    scores = tl.where(i == current, tl.where(opens, 0.0, scores) + now.to(tl.float64), scores)
    fades = fade * tl.load(factor + i, mask=places, other=0.0)
    fades = tl.where((i == into) | (i == current), 1.0, fades)
    of_state = fade * tl.load(factor + slot, mask=places, other=0.0)  # the same, oldest first
    of_state = tl.where((slot == into) | (slot == current), 1.0, of_state)
    tl.debug_barrier()  # all threads have read
    tl.store(count + i, n, mask=places)
    tl.store(info + i, scores, mask=places)
    tl.store(factor + i, fades, mask=places)
    tl.store(order + i, slot, mask=places)

    # what each state counts for
    live = i < after
    number = i
    if RECENCY:
        number = after - 1 - i
    number = tl.minimum(tl.maximum(number, 0), width - 1)
    weight = tl.load(lam + head * width + number, mask=live, other=0.0).to(tl.float32) * of_state
    if route is not None:
        sums = key_sums + head * K * dk
        some_into = tl.maximum(into, 0)
        joined = numbers(sums, some_into, rows, dk) + numbers(sums, some_gone, rows, dk)
        keys = tl.where(opens, 0.0, numbers(sums, current, rows, dk)) + k_
        tl.debug_barrier()
        tl.store(sums + some_into * dk + rows, joined, mask=(rows < dk) & merges)
        tl.store(sums + current * dk + rows, keys, mask=rows < dk)
        tl.debug_barrier()
        inside = live[:, None] & (rows < dk)[None, :]
        c = tl.load(sums + slot[:, None] * dk + rows[None, :], mask=inside, other=0.0)  # [PLACES, BK]
        q_ = numbers(q, key_head, rows, dk)
        lengths = tl.maximum(tl.sqrt(tl.sum(c * c, 1)), SHORTEST) * tl.maximum(tl.sqrt(tl.sum(q_ * q_, 0)), SHORTEST)
        cos = tl.sum(c * q_[None, :], 1) / lengths
        weight *= tl.exp(tl.load(route + head).to(tl.float32) * (cos - 1))
    tl.store(weights + head * K + i, weight, mask=places)
    plan, shares = plan + head * 5, shares + head * 3
    tl.store(plan, after)
    tl.store(plan + 1, current)
    tl.store(plan + 2, into)
    tl.store(plan + 3, gone)
    tl.store(plan + 4, opens.to(tl.int32))
    tl.store(shares, fade)
    tl.store(shares + 1, share_into)
    tl.store(shares + 2, share_gone)


@triton.jit(do_not_specialize=["scale"])
def step_states(
    q, k, v, beta, matrices, order, plan, shares, weights, o, scale, H, GROUP, K, dk, dv,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's states: matrices [N, H, K, dk, dv] after the step, and what the query reads."""
    head = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    key_head = head // H * (H // GROUP) + head % H // GROUP
    q_ = numbers(q, key_head, rows, dk)  # [BK]
    k_ = numbers(k, key_head, rows, dk)
    w = numbers(v, head, cols, dv)  # [BV]
    inside = (rows < dk)[:, None] & (cols < dv)[None, :]
    plan, shares = plan + head * 5, shares + head * 3
    states, current, into, gone = tl.load(plan), tl.load(plan + 1), tl.load(plan + 2), tl.load(plan + 3)
    b = 0.0
    if beta is not None:
        b = tl.load(beta + head).to(tl.float32)
        w = b * w
    read = tl.zeros([BK, BV], tl.float32)  # the matrices times their weights
    for i in range(states - 1):
        slot = tl.load(order + head * K + i)
        at = matrices + columns(head * K + slot, rows, cols, dk, dv)
        S = tl.load(at, mask=inside, other=0.0)
        if beta is not None:
            S = moved(S, k_, b)
        if slot == into:
            younger = tl.load(matrices + columns(head * K + gone, rows, cols, dk, dv), mask=inside, other=0.0)
            if beta is not None:
                younger = moved(younger, k_, b)
            S = tl.load(shares + 1) * S + tl.load(shares + 2) * younger
        if beta is not None or slot == into:
            tl.store(at, S, mask=inside)
        read += tl.load(weights + head * K + i) * S
    at = matrices + columns(head * K + current, rows, cols, dk, dv)
    S = tl.load(at, mask=inside & (tl.load(plan + 4) == 0), other=0.0)
    if beta is not None:
        S = moved(S, k_, b)
    S = tl.load(shares) * S + k_[:, None] * w[None, :]
    read += tl.load(weights + head * K + states - 1) * S
    tl.debug_barrier()  # the current state may stand where the younger of the pair was
    tl.store(at, S, mask=inside)
    answer = scale * tl.sum(q_[:, None] * read, 0)
    tl.store(o + head * dv + cols, answer.to(o.dtype.element_ty), mask=cols < dv)
