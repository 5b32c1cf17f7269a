"""Routed reads: the weight of every state that a query sees, lam_{t,slot} exp(rho_t (q_t . c / |q_t||c| - 1)).

c is the sum of the state's keys, a span [b, e) of tokens. The queries of one chunk meet few different spans. One is new
at each step s, the current state's, up to s; one more if two states merge at s, theirs; all others were there at the
chunk's start. A span stays until its own start ends, or the start at e ends (it takes in what follows), or, if it is
the current state's, until another token joins it. So it is seen by the queries of an interval:

    spans                         b                               e                       seen by t in
    at the chunk's start, of i    start i                         start i + 1, or the     [0, min(death_b, death_e))
                                                                  chunk's first token
    current at s                  last start alive at s           s + 1                   [s, min(death_b, death_e)), or s
                                                                                          alone if s + 1 opens nothing
    merged at s, where start j    last start before j alive at s  first start after j     [s, min(death_b, death_e))
    ends                                                          alive at s

One product of the queries with the spans' sums then has all that is needed, and every state of every query is one of
its entries: its slot is the number of starts up to b that are alive at t, less one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.key_sums import KeySums, sums_before
from dla.ops.gpu.language import arithmetic, per_head, product, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.slots import alive_in_chunk
from dla.ops.gpu.starts import Starts
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.rules import SHORT
from dla.ops.segmentation import ALIVE

SHORTEST: tl.constexpr = tl.constexpr(SHORT)
NEVER: tl.constexpr = tl.constexpr(ALIVE)
NOWHERE: tl.constexpr = tl.constexpr(-(2**31))  # before every start


@triton.jit
def cosines(
    q, sums, past, begin, end, there, token, inside, n, h, origin, carried, q_stride,
    H, KEY_HEADS, GROUP, DK, C: tl.constexpr, BK: tl.constexpr, SPANS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[C, SPANS] of the chunk's queries with the sums of keys in [begin, end)."""
    dot = tl.zeros([C, SPANS], tl.float32)
    q_square, c_square = tl.zeros([C], tl.float32), tl.zeros([SPANS], tl.float32)
    for d in range(0, DK, BK):
        column = d + tl.arange(0, BK)
        q_ = rows(q, q_stride, token, inside, column, DK, C).to(tl.float32)
        c_ = sums_before(sums, past, end, there, n, h, origin, carried, column, KEY_HEADS, GROUP, H, DK)
        c_ -= sums_before(sums, past, begin, there, n, h, origin, carried, column, KEY_HEADS, GROUP, H, DK)
        c_ = c_.to(tl.float32)
        dot += product(q_, tl.trans(c_), PRECISION)
        q_square += tl.sum(q_ * q_, 1)
        c_square += tl.sum(c_ * c_, 1)
    lengths = tl.maximum(tl.sqrt(q_square), SHORTEST)[:, None] * tl.maximum(tl.sqrt(c_square), SHORTEST)[None, :]
    return dot / lengths


@triton.jit
def put_weights(made, lam, lam_stride, width, rho, cos, slot, seen, live, token, K, H, h, C: tl.constexpr, RECENCY: tl.constexpr):
    """Write lam exp(rho (cos - 1)) into made [tokens, H, K] at [t, slot], for the spans that are seen from t."""
    column = live[:, None] - 1 - slot if RECENCY else slot
    column = tl.minimum(tl.maximum(column, 0), width - 1)
    step = tl.arange(0, C)[:, None]
    w = tl.load(lam + token.to(tl.int64) * lam_stride + step * lam_stride + h * width + column, mask=seen, other=0.0)
    w = w.to(tl.float32) * tl.exp(rho[:, None] * (cos - 1))
    tl.store(made + (token.to(tl.int64) * H + h) * K + step * (H * K) + slot, w, mask=seen & (slot >= 0) & (slot < K))


@triton.jit
def death_at(position, there, death, initial, origin, n, h, carried, H):
    """Of the starts at these positions."""
    d = tl.load(death + (origin + position).to(tl.int64) * H + h, mask=there & (position >= 0), other=-1)
    if initial is not None:
        old = tl.load(initial + (n * H + h) * carried + carried + position, mask=there & (position < 0), other=-1)
        d = tl.where(position < 0, old, d)
    return d


@triton.jit
def alive_upto(alive, at, begin, PRECISION: tl.constexpr):
    """[t, span]: how many of the starts at ``at`` that are alive at t [t, start] are not behind the span's begin."""
    before = (at[:, None] <= begin[None, :]).to(tl.float16)
    return product(alive.to(tl.float16), before, PRECISION).to(tl.int32)


@triton.jit(do_not_specialize=["carried", "K", "width"])
def routes(
    q, lam, rho, sums, past, death, initial, position, ends, count, made, first, stop, sequence, offset,
    q_stride, lam_stride, width, carried, K,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr, RECENCY: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head: made [tokens, H, K]."""
    c, h = tl.program_id(0), tl.program_id(1)
    n, listed = tl.load(sequence + c), (c * H + h).to(tl.int64) * K
    origin = tl.load(offset + n)
    token, inside = tokens_of(first, stop, c, C)
    t, found = token - origin + tl.arange(0, C), tl.load(count + c * H + h)
    q += h // GROUP * DK
    rho_ = per_head(rho + h, H, token, inside, 0.0, C)
    own = per_head(death + h, H, token, inside, -1, C)  # [C]
    alive = alive_in_chunk(death + h, token, inside, t, H, C)  # [t, x]

    # how many live at t, the current one's start, and the start that ends at t
    live = tl.sum(alive.to(tl.int32), 1)
    current = tl.max(tl.where(alive, t[None, :], NOWHERE), 1)
    ended = tl.max(tl.where(own[None, :] == t[:, None], t[None, :], NOWHERE), 1)
    for i in range(0, found, BS):
        state = i + tl.arange(0, BS)
        p = tl.load(position + listed + state, mask=state < found, other=0)[None, :]
        d = tl.load(ends + listed + state, mask=state < found, other=-1)[None, :]
        live += tl.sum((d > t[:, None]).to(tl.int32), 1)
        current = tl.maximum(current, tl.max(tl.where(d > t[:, None], p, NOWHERE), 1))
        ended = tl.maximum(ended, tl.max(tl.where(d == t[:, None], p, NOWHERE), 1))
    # its neighbours
    begin = tl.max(tl.where(alive & (t[None, :] < ended[:, None]), t[None, :], NOWHERE), 1)
    end = tl.min(tl.where(alive & (t[None, :] > ended[:, None]), t[None, :], NEVER), 1)
    for i in range(0, found, BS):
        state = i + tl.arange(0, BS)
        p = tl.load(position + listed + state, mask=state < found, other=0)[None, :]
        alive_then = tl.load(ends + listed + state, mask=state < found, other=-1)[None, :] > t[:, None]
        begin = tl.maximum(begin, tl.max(tl.where(alive_then & (p < ended[:, None]), p, NOWHERE), 1))
        end = tl.minimum(end, tl.min(tl.where(alive_then & (p > ended[:, None]), p, NEVER), 1))
    merges = inside & (ended > NOWHERE) & (begin > NOWHERE) & (end < NEVER)
    begin, end = tl.where(merges, begin, 0), tl.where(merges, end, 0)
    runs = inside & (current > NOWHERE)
    current = tl.where(runs, current, 0)

    # slots of both, counted over all starts
    slot_current = alive_upto(alive, t, current, PRECISION) - 1  # [t, s]
    slot_merged = alive_upto(alive, t, begin, PRECISION) - 1
    upto = tl.zeros([C], tl.int32)
    for i in range(0, found, BS):
        state = i + tl.arange(0, BS)
        there = state < found
        p = tl.load(position + listed + state, mask=there, other=0)
        d = tl.load(ends + listed + state, mask=there, other=-1)
        alive_then = d[None, :] > t[:, None]  # [t, BS]
        slot_current += alive_upto(alive_then, p, current, PRECISION)
        slot_merged += alive_upto(alive_then, p, begin, PRECISION)
        # the spans at the chunk's start
        slot = upto[:, None] + tl.cumsum(alive_then.to(tl.int32), 1) - 1
        upto += tl.sum(alive_then.to(tl.int32), 1)
        last = state + 1 == found
        e = tl.where(last, token - origin, tl.load(position + listed + state + 1, mask=there & ~last, other=0))
        until = tl.minimum(d, death_at(e, there, death, initial, origin, n, h, carried, H))
        seen = inside[:, None] & (t[:, None] < until[None, :])
        cos = cosines(q, sums, past, p, e, there, token, inside, n, h, origin, carried, q_stride,
                      H, KEY_HEADS, GROUP, DK, C, BK, BS, PRECISION)  # fmt: skip
        put_weights(made, lam, lam_stride, width, rho_, cos, slot, seen, live, token, K, H, h, C, RECENCY)

    until = death_at(current, runs, death, initial, origin, n, h, carried, H)
    after = per_head(death + h, H, token + 1, token + 1 + tl.arange(0, C) < tl.load(stop + c), NEVER, C)
    until = tl.where(after < 0, t + 1, tl.minimum(until, after))
    seen = runs[None, :] & inside[:, None] & (t[:, None] >= t[None, :]) & (t[:, None] < until[None, :])
    cos = cosines(q, sums, past, current, t + 1, runs, token, inside, n, h, origin, carried, q_stride,
                  H, KEY_HEADS, GROUP, DK, C, BK, C, PRECISION)  # fmt: skip
    put_weights(made, lam, lam_stride, width, rho_, cos, slot_current, seen, live, token, K, H, h, C, RECENCY)

    if tl.max(merges.to(tl.int32), 0) > 0:
        until = death_at(begin, merges, death, initial, origin, n, h, carried, H)
        until = tl.minimum(until, death_at(end, merges, death, initial, origin, n, h, carried, H))
        seen = merges[None, :] & inside[:, None] & (t[:, None] >= t[None, :]) & (t[:, None] < until[None, :])
        cos = cosines(q, sums, past, begin, end, merges, token, inside, n, h, origin, carried, q_stride,
                      H, KEY_HEADS, GROUP, DK, C, BK, C, PRECISION)  # fmt: skip
        put_weights(made, lam, lam_stride, width, rho_, cos, slot_merged, seen, live, token, K, H, h, C, RECENCY)


def routed_weights(
    q: Tensor, lam: Tensor, route: Tensor, sums: KeySums, starts: Starts, tiles: Tiles, recency: bool
) -> Tensor:
    """[tokens, H, K] float32 by state, oldest first; what stands behind the states that live means nothing.

    q [tokens, Hk, dk], lam [tokens, H, width], route [tokens, H]
    """
    (tokens, H, width), (_, key_heads, dk), c = lam.shape, q.shape, config("routes")
    made = torch.empty(tokens, H, starts.states, dtype=torch.float32, device=q.device)
    arguments = {"q": q, "lam": lam, "rho": route, "sums": sums.sums, "past": sums.past, "death": starts.of_tokens}
    arguments |= {"initial": starts.of_carried, "position": starts.position, "ends": starts.death}
    arguments |= {"count": starts.count, "made": made, "first": tiles.first, "stop": tiles.stop}
    arguments |= {"sequence": tiles.sequence, "offset": tiles.offset, "q_stride": q.stride(0)}
    arguments |= {"lam_stride": lam.stride(0), "width": width, "carried": starts.carried, "K": starts.states}
    arguments |= {"H": H, "KEY_HEADS": key_heads, "GROUP": H // key_heads, "DK": dk, "C": CHUNK}
    arguments |= {"BK": tile(dk, c["BK"]), "BS": c["BS"], "RECENCY": recency}
    arguments["PRECISION"] = arithmetic(torch.float32)["PRECISION"]
    launch(routes, (tiles.count, H), arguments, warps=c["warps"], stages=c["stages"])
    return made
