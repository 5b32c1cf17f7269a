"""Gradients by way of routed reads: of lam, the sharpness, queries, and keys in the sums of states that queries see.

A weight w = lam exp(rho (cos - 1)), cos = q^ . c^, with the gradient d has

    dlam = d exp(..)     drho = d w (cos - 1)     dcos = d w rho
    dq   = sum over states of dcos (c^ - cos q^) / |q|          dc = sum over queries of dcos (q^ - cos c^) / |c|

The spans of a chunk are those of routing.py. c is the difference X_end - X_begin of sums of the keys before tokens, so
dc goes to +X_end and -X_begin, and a key's gradient is the sum of dX over all that is behind it. Who adds what:

    ``route_gradients``      a chunk of queries: dX at its own tokens, and at the starts before it that it meets
                             ("met"), behind the last of which stands the chunk's first token
    ``met_gradients``        a chunk of keys: what the range of chunks that meet a start in it, or right behind it, have
                             for that start; it adds these to its own
    ``sums_from_end``        the running sum

dX [x] of token x is that of the sum that x is the last in. A sum of no tokens of the call (what was carried in, and
what is before the first token) has none.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.key_sums import sums_before
from dla.ops.gpu.language import arithmetic, per_head, product, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.query_gradients import heads_each
from dla.ops.gpu.reading import Reads
from dla.ops.gpu.routing import SHORTEST, column_of, cosines, slots_seen, spans_seen
from dla.ops.gpu.running_back import from_end
from dla.ops.gpu.starts import Starts
from dla.ops.gpu.state_gradients import last_meeting
from dla.ops.gpu.streams import living
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.problem import Problem


@triton.jit
def ends_at(place, begin, end, there):
    """[places, spans]: 1 where a span's sum ends at a place, -1 where it begins there."""
    ends, begins = place[:, None] == end[None, :], place[:, None] == begin[None, :]
    return tl.where(there[None, :], ends.to(tl.float32) - begins.to(tl.float32), 0.0)


@triton.jit(do_not_specialize=["carried", "K", "width", "tokens"])
def route_gradients(
    q, lam, rho, sums, past, death, initial, position, ends, count, d_made, d_slots, d_rho, d_q, d_own, d_met,
    first, stop, sequence, offset, q_stride, lam_stride, width, carried, K, tokens,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, DK: tl.constexpr,
    C: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
    RECENCY: tl.constexpr, SPANS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One program a chunk and BK numbers of its queries, EACH heads of a key head and, for sums there, BS starts met.

    d_made, d_slots [tokens, H, K]; d_rho [tokens, H]; d_q, d_own [shares, tokens, KEY_HEADS, DK]; d_met [chunks, H,
    K + 1, DK]. PART says which of these are made: those of "queries" (d_slots, d_rho, d_q), of "own" or of "met" sums.
    It is launched for one kind of spans after the other, and adds to what is there from the first on.
    """
    tiles: tl.constexpr = tl.cdiv(DK, BK)
    shares: tl.constexpr = tl.cdiv(GROUP, EACH)
    c, number = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    key_head, share = tl.program_id(1) // shares, tl.program_id(1) % shares
    met = tl.program_id(2) * BS + tl.arange(0, BS)
    column = number * BK + tl.arange(0, BK)
    n, step = tl.load(sequence + c), tl.arange(0, C)
    origin, finish = tl.load(offset + n), tl.load(stop + c)
    token, inside = tokens_of(first, stop, c, C)
    t = token - origin + step
    made = tl.zeros([C, BK], tl.float32)
    q_ = rows(q + key_head * DK, q_stride, token, inside, column, DK, C).to(tl.float32)
    q_length = tl.full([C], 1.0, tl.float32)
    for turn in tl.range(0, tl.minimum(EACH, GROUP - share * EACH), disable_licm=True):
        h = key_head * GROUP + share * EACH + turn
        found = tl.load(count + c * H + h)
        place = (c * H + h).to(tl.int64) * K
        position_h, ends_h = position + place, ends + place
        own = per_head(death + h, H, token, inside, -1, C)
        sharpness = per_head(rho + h, H, token, inside, 0.0, C)
        at = (token.to(tl.int64) + step) * H + h  # [C]
        d_r, along = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        where = (c * H + h).to(tl.int64) * (K + 1) * DK + met[:, None] * DK + column[None, :]
        stored = (met <= found)[:, None] & (column < DK)[None, :]
        d = tl.zeros([BS, BK], tl.float32)  # of the sums at the starts met
        if SPANS != "first":
            if PART == "queries":
                d_r = tl.load(d_rho + at, mask=inside, other=0.0)
            if PART == "met":
                d = tl.load(d_met + where, mask=stored, other=0.0)
        mine = tl.load(position_h + met, mask=met < found, other=-1)
        mine = tl.where(met == found, token - origin, mine)
        many = finish - token
        if SPANS == "first":
            many = found
        for part in tl.range(0, many, BS, disable_licm=True):
            begin, end, since, until, there = spans_seen(
                death, initial, position_h, ends_h, found, own, t, token, finish, part, n, h, origin, carried,
                H, C, BS, SPANS,
            )  # fmt: skip
            if tl.max(there.to(tl.int32), 0) > 0:
                slot, live = slots_seen(position_h, ends_h, found, own, t, begin, C, BS, PRECISION)
                seen = inside[:, None] & there[None, :] & (t[:, None] >= since[None, :]) & (t[:, None] < until[None, :])
                seen = seen & (slot >= 0) & (slot < K)
                cos, q_length, c_length = cosines(
                    q + key_head * DK, sums, past, begin, end, there, token, inside, n, h, origin, carried, q_stride,
                    H, KEY_HEADS, GROUP, DK, C, BD, BS, PRECISION,
                )  # fmt: skip
                from_ = column_of(slot, live, width, RECENCY)
                w = tl.load(lam + (token.to(tl.int64) + step)[:, None] * lam_stride + h * width + from_, mask=seen,
                            other=0.0).to(tl.float32)  # fmt: skip
                d_slot = tl.load(d_made + at[:, None] * K + slot, mask=seen, other=0.0)
                d_slot = d_slot * tl.exp(sharpness[:, None] * (cos - 1))
                d_slot = tl.where(seen, d_slot, 0.0)
                d_w = d_slot * w
                d_cos = tl.where(seen, d_w * sharpness[:, None], 0.0)
                both = tl.where(seen, d_cos * cos, 0.0)
                c_ = sums_before(sums, past, end, there, n, h, origin, carried, column, KEY_HEADS, GROUP, H, DK)
                c_ -= sums_before(sums, past, begin, there, n, h, origin, carried, column, KEY_HEADS, GROUP, H, DK)
                unit_c = c_.to(tl.float32) / c_length[:, None]
                if PART == "queries":
                    tl.store(d_slots + at[:, None] * K + slot, d_slot, mask=seen & (number == 0))
                    d_r += tl.sum(d_w * (cos - 1), 1)
                    along += tl.sum(both, 1)
                    made += product(d_cos, unit_c, PRECISION)
                else:
                    turned = tl.where(c_length > SHORTEST, tl.sum(both, 0), 0.0)
                    d_c = product(tl.trans(d_cos / q_length[:, None]), q_, PRECISION)
                    d_c = (d_c - unit_c * turned[:, None]) / c_length[:, None]
                    if PART == "own":
                        made += product(ends_at(t + 1, begin, end, there), d_c, PRECISION)
                    else:
                        d += product(ends_at(mine, begin, end, there), d_c, PRECISION)
        if PART == "queries":
            made -= q_ * (tl.where(q_length > SHORTEST, along, 0.0) / q_length)[:, None]
            tl.store(d_rho + at, d_r, mask=inside & (number == 0))
        if PART == "met":
            tl.store(d_met + where, d, mask=stored)
    if PART != "met":
        at = ((share.to(tl.int64) * tokens + token) * KEY_HEADS + key_head) * DK
        at = at + step[:, None] * (KEY_HEADS * DK) + column[None, :]
        mask = inside[:, None] & (column < DK)[None, :]
        out = d_own
        if PART == "queries":
            out = d_q
            made = made / q_length[:, None]
        if SPANS != "first":
            made += tl.load(out + at, mask=mask, other=0.0)
        tl.store(out + at, made, mask=mask)


@triton.jit(do_not_specialize=["K", "tokens"])
def met_gradients(
    d_own, d_met, made, position, count, until, first, stop, sequence, offset, K, tokens,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, DK: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a chunk and BK numbers of its keys, and EACH heads of a key head: made [shares, tokens, ..]."""
    tiles: tl.constexpr = tl.cdiv(DK, BK)
    shares: tl.constexpr = tl.cdiv(GROUP, EACH)
    j, number = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    key_head, share = tl.program_id(1) // shares, tl.program_id(1) % shares
    column = number * BK + tl.arange(0, BK)
    step, origin = tl.arange(0, C), tl.load(offset + tl.load(sequence + j))
    token, inside = tokens_of(first, stop, j, C)
    at = ((share.to(tl.int64) * tokens + token) * KEY_HEADS + key_head) * DK
    at = at + step[:, None] * (KEY_HEADS * DK) + column[None, :]
    mask = inside[:, None] & (column < DK)[None, :]
    dX = tl.load(d_own + at, mask=mask, other=0.0)
    for turn in tl.range(0, tl.minimum(EACH, GROUP - share * EACH), disable_licm=True):
        h = key_head * GROUP + share * EACH + turn
        for later in tl.range(1, tl.load(until + j * H + h) - j, disable_licm=True):
            c = j + later
            found, place = tl.load(count + c * H + h), (c * H + h).to(tl.int64)
            here = tl.load(first + c) - origin
            for i in range(0, found + 1, BS):
                met = i + tl.arange(0, BS)
                mine = tl.load(position + place * K + met, mask=met < found, other=-1)
                mine = tl.where(met == found, here, mine)
                chosen = ((mine - 1)[None, :] == (token - origin + step)[:, None]) & inside[:, None]
                if tl.max(tl.max(chosen.to(tl.int32), 1), 0) > 0:
                    from_ = d_met + place * (K + 1) * DK + met[:, None] * DK + column[None, :]
                    d = tl.load(from_, mask=(met <= found)[:, None] & (column < DK)[None, :], other=0.0)
                    dX += product(chosen.to(tl.float32), d, PRECISION)
    tl.store(made + at, dX, mask=mask)


def routing_gradients_of(problem: Problem, x: Reads, found: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients, of which "lam" is that of the weights of states, with what routed reads add to them (q, k)."""
    assert x.sums is not None and x.hard is not None and problem.lam is not None and problem.route is not None
    layout, starts, tiles = problem.layout, x.hard, x.tiles
    lam, rho = layout.flat(problem.lam), layout.flat(problem.route).float().contiguous()
    (tokens, key_heads, dk), H, K, device = x.k.shape, x.v.shape[1], starts.states, x.k.device
    c, each, recency = config("route_gradients", x.v.dtype), heads_each(x), problem.slot_order == "recency"
    shares, BK = triton.cdiv(H // key_heads, each), tile(dk, c["BK"])
    d_q, d_own = (torch.empty(shares, tokens, key_heads, dk, dtype=torch.float32, device=device) for _ in range(2))
    d_met = torch.empty(tiles.count, H, K + 1, dk, dtype=torch.float32, device=device)
    d_slots = torch.zeros(tokens, H, K, dtype=torch.float32, device=device)
    d_rho = torch.empty(tokens, H, dtype=torch.float32, device=device)
    shared: dict[str, Any] = {"position": starts.position, "count": starts.count, "d_own": d_own, "d_met": d_met}
    shared |= {name: getattr(tiles, name) for name in ("first", "stop", "sequence", "offset")}
    shared |= {"K": K, "tokens": tokens, "H": H, "KEY_HEADS": key_heads, "GROUP": H // key_heads, "EACH": each}
    shared |= {"DK": dk, "C": CHUNK, "PRECISION": arithmetic(x.v.dtype)["PRECISION"]}
    arguments: dict[str, Any] = {
        "q": x.q,
        "lam": lam,
        "rho": rho,
        "sums": x.sums.sums,
        "past": x.sums.past,
        "death": starts.of_tokens,
    }
    arguments |= {"initial": starts.of_carried, "ends": starts.death, "d_made": found["lam"], "d_slots": d_slots}
    arguments |= {"d_rho": d_rho, "d_q": d_q, "q_stride": x.q.stride(0), "lam_stride": lam.stride(0)}
    arguments |= {"width": lam.shape[2], "carried": starts.carried, "RECENCY": recency}
    arguments |= {"BD": tile(dk, c["BD"]), "BK": BK, "BS": c["BS"]}
    grid, blocks = (tiles.count * triton.cdiv(dk, BK), key_heads * shares), triton.cdiv(K + 1, c["BS"])
    for spans in ("first", "current", "merged"):
        for part in ("queries", "own", "met"):
            kind = {"SPANS": spans, "PART": part}
            launch(route_gradients, (*grid, blocks if part == "met" else 1), shared | arguments | kind, c)

    c = config("met_gradients", x.v.dtype)
    BK, made = tile(dk, c["BK"]), torch.empty_like(d_own)
    sizes = {"until": last_meeting_beside(starts, tiles), "made": made, "BK": BK, "BS": c["BS"]}
    launch(met_gradients, (tiles.count * triton.cdiv(dk, BK), key_heads * shares), shared | sizes, c)
    keys = from_end(made.sum(0).flatten(1).contiguous(), tiles).view(tokens, key_heads, dk)
    by_column = of_columns(
        d_slots,
        layout.flat(problem.lam).shape[2],
        living(starts.of_tokens, starts.of_carried, layout) if recency else None,
    )
    return found | {"q": found["q"] + d_q.sum(0), "k": found["k"] + keys, "route": d_rho, "lam": by_column}


def last_meeting_beside(starts: Starts, tiles: Tiles) -> Tensor:
    """Behind the last chunk that meets a start in a chunk or at the first token behind it, or begins there itself."""
    chunk = torch.arange(tiles.count, dtype=torch.int32, device=tiles.first.device)[:, None]
    until, end = last_meeting(starts, tiles), tiles.chunks[tiles.sequence + 1][:, None]
    behind = torch.cat([until[1:], until[-1:]])
    return torch.maximum(until, behind).maximum(chunk + 2).minimum(end).int().contiguous()


def of_columns(d: Tensor, width: int, live: Tensor | None) -> Tensor:
    """By column of lam [tokens, H, width], of d [tokens, H, K] by slot; ``live`` [tokens, H] for recency."""
    if live is not None:
        place = live[..., None] - 1 - torch.arange(d.shape[2], device=d.device)
        d = torch.where(place >= 0, d.gather(2, place.clamp_min(0)), 0)
    if d.shape[2] < width:
        return torch.nn.functional.pad(d, (0, width - d.shape[2]))
    return torch.cat([d[..., : width - 1], d[..., width - 1 :].sum(-1, keepdim=True)], 2)
