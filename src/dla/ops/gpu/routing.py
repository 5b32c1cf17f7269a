"""Routed reads: the weight of every state that a query sees, lam_{t,slot} exp(rho_t (q_t . c / |q_t||c| - 1)).

c is the sum of the state's keys, a span [b, e) of tokens. The queries of one chunk meet few different spans. One is new
at each step s, the current state's, up to s; one more if two states merge at s, theirs; all others were there at the
chunk's start. A span stays until its own start ends, or the start at e ends (it takes in what follows), or, if it is
the current state's, until another token joins it. So it is seen by the queries of an interval:

    spans                         b                               e                       seen by t in
    at the chunk's start, of i    start i                         start i + 1, or the     [0, min(death_b, death_e))
                                                                  chunk's first token
    current at s                  last start alive at s           s + 1                   [s, min(death_b, death_e)), or
                                                                                          s if s + 1 opens nothing
    merged at s, where start j    last start before j alive at s  first start after j     [s, min(death_b, death_e))
    ends                                                          alive at s

One product of the queries with the spans' sums then has all that is needed, and every state of every query is one of
its entries: its slot is the number of starts up to b that are alive at t, less one.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.key_sums import KeySums, sums_before
from dla.ops.gpu.language import arithmetic, per_head, product, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
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
    H, KEY_HEADS, GROUP, DK, C: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[C, BS] of the chunk's queries with the sums of keys in [begin, end), and the lengths of both."""
    dot = tl.zeros([C, BS], tl.float32)
    q_square, c_square = tl.zeros([C], tl.float32), tl.zeros([BS], tl.float32)
    for d in range(0, DK, BK):
        column = d + tl.arange(0, BK)
        q_ = rows(q, q_stride, token, inside, column, DK, C).to(tl.float32)
        c_ = sums_before(sums, past, end, there, n, h, origin, carried, column, KEY_HEADS, GROUP, H, DK)
        c_ -= sums_before(sums, past, begin, there, n, h, origin, carried, column, KEY_HEADS, GROUP, H, DK)
        c_ = c_.to(tl.float32)
        dot += product(q_, tl.trans(c_), PRECISION)
        q_square += tl.sum(q_ * q_, 1)
        c_square += tl.sum(c_ * c_, 1)
    q_length, c_length = tl.maximum(tl.sqrt(q_square), SHORTEST), tl.maximum(tl.sqrt(c_square), SHORTEST)
    return dot / (q_length[:, None] * c_length[None, :]), q_length, c_length


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


@triton.jit
def listed(position, ends, i, found, BS: tl.constexpr):
    """Starts i, i + 1, ... of a list: where they are, and their deaths, which is -1 behind the last."""
    state = i + tl.arange(0, BS)
    p = tl.load(position + state, mask=state < found, other=0)
    return p, tl.load(ends + state, mask=state < found, other=-1)


@triton.jit
def neighbours(alive, at, wall, begin, end):
    """The last start before each wall and the first behind it, of those alive [spans, starts], and these so far."""
    before, behind = alive & (at[None, :] < wall[:, None]), alive & (at[None, :] > wall[:, None])
    begin = tl.maximum(begin, tl.max(tl.where(before, at[None, :], NOWHERE), 1))
    return begin, tl.minimum(end, tl.min(tl.where(behind, at[None, :], NEVER), 1))


@triton.jit
def spans_seen(
    death, initial, position, ends, found, own, t, token, finish, part, n, h, origin, carried,
    H: tl.constexpr, C: tl.constexpr, BS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """BS spans of one kind from number ``part`` on: [begin, end) seen by t in [since, until), and which are there.

    own [C] are the deaths of the chunk's starts, t [C] its times, ``token`` its first token and ``finish`` its end;
    position and ends have the ``found`` starts that are alive before it.
    """
    span = part + tl.arange(0, BS)
    since = token - origin + span
    if SPANS == "first":
        there, last, since = span < found, span + 1 == found, since - span
        begin, until = listed(position, ends, part, found, BS)
        end = tl.where(last, since, tl.load(position + span + 1, mask=there & (span + 1 < found), other=0))
        until = tl.minimum(until, death_at(end, there, death, initial, origin, n, h, carried, H))
    else:
        there = token + span < finish
        wall = since + 1  # behind the step itself: the start before is the current state's
        if SPANS == "merged":
            wall = tl.max(tl.where(own[None, :] == since[:, None], t[None, :], NOWHERE), 1)
            for i in range(0, found, BS):
                p, d = listed(position, ends, i, found, BS)
                wall = tl.maximum(wall, tl.max(tl.where(d[None, :] == since[:, None], p[None, :], NOWHERE), 1))
            there = there & (wall > NOWHERE)
        alive = (own[None, :] > since[:, None]) & (t[None, :] <= since[:, None])
        begin, end = tl.full([BS], NOWHERE, tl.int32), tl.full([BS], NEVER, tl.int32)
        begin, end = neighbours(alive, t, wall, begin, end)
        for i in range(0, found, BS):
            p, d = listed(position, ends, i, found, BS)
            begin, end = neighbours(d[None, :] > since[:, None], p, wall, begin, end)
        there = there & (begin > NOWHERE)
        begin = tl.where(there, begin, 0)
        if SPANS == "merged":
            there = there & (end < NEVER)
            end = tl.where(there, end, 0)
            joins = death_at(end, there, death, initial, origin, n, h, carried, H)
        else:
            end = since + 1
            joins = tl.load(death + (origin + end).to(tl.int64) * H + h, mask=origin + end < finish, other=NEVER)
        until = tl.minimum(death_at(begin, there, death, initial, origin, n, h, carried, H), joins)
        until = tl.where(joins < 0, since + 1, until)
    return begin, end, since, until, there


@triton.jit
def slots_seen(position, ends, found, own, t, begin, C: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr):
    """The slots of spans at every t [C, BS]: the starts alive then, counted up to each span's; and how many live."""
    alive_then = (own[None, :] > t[:, None]) & (t[None, :] <= t[:, None])
    live = tl.sum(alive_then.to(tl.int32), 1)
    slot = alive_upto(alive_then, t, begin, PRECISION) - 1
    for i in range(0, found, BS):
        p, d = listed(position, ends, i, found, BS)
        slot += alive_upto(d[None, :] > t[:, None], p, begin, PRECISION)
        live += tl.sum((d[None, :] > t[:, None]).to(tl.int32), 1)
    return slot, live


@triton.jit
def column_of(slot, live, width, RECENCY: tl.constexpr):
    """Of lam, for the slots [C, BS] of states of which ``live`` [C] live."""
    column = live[:, None] - 1 - slot if RECENCY else slot
    return tl.minimum(tl.maximum(column, 0), width - 1)


@triton.jit(do_not_specialize=["carried", "K", "width", "blocks"])
def routes(
    q, lam, rho, sums, past, death, initial, position, ends, count, made, first, stop, sequence, offset,
    q_stride, lam_stride, width, carried, K, blocks,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr, RECENCY: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """One program a chunk, BS of its spans of one kind, and head: their entries of made [tokens, H, K]."""
    c, part, h = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BS, tl.program_id(1)
    n, found = tl.load(sequence + c), tl.load(count + c * H + h)
    origin = tl.load(offset + n)
    position += (c * H + h).to(tl.int64) * K
    ends += (c * H + h).to(tl.int64) * K
    q += h // GROUP * DK
    token, inside = tokens_of(first, stop, c, C)
    step = tl.arange(0, C)
    t = token - origin + step  # [C] times of queries
    own = per_head(death + h, H, token, inside, -1, C)
    begin, end, since, until, there = spans_seen(
        death, initial, position, ends, found, own, t, token, tl.load(stop + c), part, n, h, origin, carried, H, C, BS,
        SPANS,
    )  # fmt: skip
    if tl.max(there.to(tl.int32), 0) > 0:
        slot, live = slots_seen(position, ends, found, own, t, begin, C, BS, PRECISION)
        seen = inside[:, None] & there[None, :] & (t[:, None] >= since[None, :]) & (t[:, None] < until[None, :])
        cos, _, _ = cosines(q, sums, past, begin, end, there, token, inside, n, h, origin, carried, q_stride,
                            H, KEY_HEADS, GROUP, DK, C, BK, BS, PRECISION)  # fmt: skip
        lam += token.to(tl.int64) * lam_stride + h * width
        column = column_of(slot, live, width, RECENCY)
        w = tl.load(lam + step[:, None] * lam_stride + column, mask=seen, other=0.0).to(tl.float32)
        w = w * tl.exp(per_head(rho + h, H, token, inside, 0.0, C)[:, None] * (cos - 1))
        made += (token.to(tl.int64) * H + h) * K
        tl.store(made + step[:, None] * (H * K) + slot, w, mask=seen & (slot >= 0) & (slot < K))


def routed_weights(
    q: Tensor, lam: Tensor, route: Tensor, sums: KeySums, starts: Starts, tiles: Tiles, recency: bool
) -> Tensor:
    """[tokens, H, K] float32 by state, oldest first; what stands behind the states that live means nothing.

    q [tokens, Hk, dk], lam [tokens, H, width], route [tokens, H]
    """
    (tokens, H, width), (_, key_heads, dk), K, c = lam.shape, q.shape, starts.states, config("routes")
    made = torch.empty(tokens, H, K, dtype=torch.float32, device=q.device)
    arguments: dict[str, Any] = {
        "q": q,
        "lam": lam,
        "rho": route,
        "sums": sums.sums,
        "past": sums.past,
        "death": starts.of_tokens,
    }
    arguments |= {"initial": starts.of_carried, "position": starts.position, "ends": starts.death}
    arguments |= {"count": starts.count, "made": made, "first": tiles.first, "stop": tiles.stop}
    arguments |= {"sequence": tiles.sequence, "offset": tiles.offset, "q_stride": q.stride(0)}
    arguments |= {"lam_stride": lam.stride(0), "width": width, "carried": starts.carried, "K": K}
    arguments |= {"H": H, "KEY_HEADS": key_heads, "GROUP": H // key_heads, "DK": dk, "C": CHUNK}
    arguments |= {"BK": tile(dk, c["BK"]), "BS": c["BS"], "RECENCY": recency}
    arguments["PRECISION"] = arithmetic(torch.float32)["PRECISION"]
    for spans, most in (("first", K), ("current", CHUNK), ("merged", CHUNK)):
        blocks = triton.cdiv(most, c["BS"])
        kind = arguments | {"SPANS": spans, "blocks": blocks}
        launch(routes, (tiles.count * blocks, H), kind, c)
    return made
