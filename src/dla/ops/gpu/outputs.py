"""The outputs, from the plain recurrence at chunks' starts (states.py) and a plan of the states alive there (plan.py).

    o_t = scale sum_i lam_{t,slot(i)} q_t^T S_i

For the queries of a chunk, with Q, K, V its rows:

    its own tokens            (Q K^T . decay . Lam) V, Lam_{tx} = lam_{t, slot of x seen from t}, x <= t
    chunks that are cut       the same with their K and V; a token's weight is that of the last state begun before it
    whole chunks of a state   w_t q_t^T (S_b - decay S_a), a difference of float32 rows that is taken before it is
                              rounded to the inputs' dtype: behind one large token, rounded rows would say nothing
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import arithmetic, fade, matrix, per_head, product, rounded, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.plan import ReadPlan
from dla.ops.gpu.states import States
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.problem import MemoryKind


@triton.jit
def fits(
    q, k, q_stride, k_stride, token, inside, key, held, DK: tl.constexpr,
    C: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Q K^T [C, BX] of the queries from ``token`` and the keys from ``key`` on."""
    P = tl.zeros([C, BX], tl.float32)
    for d in range(0, DK, BK):
        column = d + tl.arange(0, BK)
        q_ = rows(q, q_stride, token, inside, column, DK, C)
        k_ = rows(k, k_stride, key, held, column, DK, BX)
        P += product(q_, tl.trans(k_), PRECISION)
    return P


@triton.jit
def read(
    q, q_stride, token, inside, S, later, earlier, left, there, column,
    DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Q (S_later - left S_earlier) [C, BV]; ``there``: whether there is an earlier one."""
    o = tl.zeros([C, BV], tl.float32)
    for d in range(0, DK, BK):
        row = d + tl.arange(0, BK)
        q_ = rows(q, q_stride, token, inside, row, DK, C)
        S_ = matrix(S, later, row, column, DK, DV, True)
        S_ -= left * matrix(S, earlier, row, column, DK, DV, there)
        o += product(q_.to(FACTOR), rounded(S_, FACTOR), PRECISION)
    return o


@triton.jit
def bit_length(x):
    """Of whole numbers below 2^24: from the exponent of the float."""
    return tl.where(x > 0, (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit(do_not_specialize=["scale", "carried", "K", "width"])
def outputs(
    q, k, v, lam, o, S, G, total, death, birth, slot_before, position, parts, part_count, weight,
    first, stop, sequence, offset, lead, chunks, q_stride, k_stride, v_stride, lam_stride, scale, carried, K, width,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
    MEMORY: tl.constexpr, RECENCY: tl.constexpr,
):  # fmt: skip
    """One program a chunk, head and BV columns of its outputs."""
    tiles: tl.constexpr = tl.cdiv(DV, BV)
    c, h = tl.program_id(0) // tiles, tl.program_id(1)
    column = tl.program_id(0) % tiles * BV + tl.arange(0, BV)
    n, step, step_x = tl.load(sequence + c), tl.arange(0, C), tl.arange(0, BX)
    before = tl.load(chunks + n)  # the sequence's first chunk
    here = carried + c - before  # the row before this chunk
    base = before + n * (carried + 1)  # and the sequence's first row
    token, inside = tokens_of(first, stop, c, C)
    q += h // GROUP * DK
    k += h // GROUP * DK
    v += h * DV
    S += h.to(tl.int64) * DK * DV
    if G is not None:
        G += h
        total += h
        G_ = per_head(G, H, token, inside, 0.0, C)  # [C]

    o_ = tl.zeros([C, BV], tl.float32)  # of the past, as it reads at the chunk's start
    if MEMORY == "single":
        row = (base + here) * H
        o_ = read(q, q_stride, token, inside, S, row, row, 0.0, False, column, DK, DV,
                  C, BK, BV, FACTOR, PRECISION)  # fmt: skip
    else:
        plan_head = c if MEMORY == "log_linear" else c * H + h
        if MEMORY == "dynamic":
            death += h
            if birth is not None:
                birth += h
            slot_before += h
            position += plan_head.to(tl.int64) * K
        parts += plan_head.to(tl.int64) * K * 4
        weight += (c * H + h).to(tl.int64) * K * C + step  # [C]
        state = -1
        for part in range(tl.load(part_count + plan_head)):
            begun = state + 1
            state = tl.load(parts + part * 4)
            begin, end = tl.load(parts + part * 4 + 2), tl.load(parts + part * 4 + 3)
            if MEMORY == "dynamic":
                cut = tl.load(parts + part * 4 + 1)
                if cut >= 0:
                    cut_token = tl.load(first + before + cut - carried)
                    cut_length = tl.load(stop + before + cut - carried) - cut_token  # C, since another chunk follows it
                    for x in range(0, cut_length, BX):
                        key, held = cut_token + x, x + step_x < cut_length
                        P = fits(q, k, q_stride, k_stride, token, inside, key, held, DK, C, BX, BK, PRECISION)
                        w = tl.load(weight + (begun - 1) * C, mask=begun > 0, other=0.0)[:, None]
                        Lam = tl.broadcast_to(w, [C, BX])
                        for i in range(begun, state + 1):
                            inner = tl.load(position + i) - (cut - carried) * C - x
                            Lam = tl.where(step_x[None, :] >= inner, tl.load(weight + i * C)[:, None], Lam)
                        if G is not None:
                            G_end = tl.load(G + (cut_token + C - 1).to(tl.int64) * H)
                            left = tl.exp(G_end - per_head(G, H, key, held, 0.0, BX))
                            P = P * (left * fade(total, H, base + here, base + cut + 1))[None, :]
                        v_ = rows(v, v_stride, key, held, column, DV, BX)
                        o_ += product(rounded(P * Lam, FACTOR), v_.to(FACTOR), PRECISION)
            if end > begin:
                left = 1.0
                w = tl.load(weight + state * C)
                if G is not None:
                    left = fade(total, H, base + end, base + begin)
                    w = w * fade(total, H, base + here, base + end)
                o_ += w[:, None] * read(
                    q, q_stride, token, inside, S, (base + end) * H, (base + begin) * H, left, begin > 0, column,
                    DK, DV, C, BK, BV, FACTOR, PRECISION,
                )  # fmt: skip

    if G is not None:
        o_ = o_ * tl.exp(G_)[:, None]
    if MEMORY != "single":
        lam += h * width + token.to(tl.int64) * lam_stride
        time = token - tl.load(offset + n) + tl.load(lead + n)  # of the first query
    if MEMORY == "dynamic":
        slot_upto = per_head(slot_before, H, token, inside, 0, C)  # [C]
    length = tl.load(stop + c) - token
    for x in range(0, length, BX):
        key, held = token + x, x + step_x < length
        P = fits(q, k, q_stride, k_stride, token, inside, key, held, DK, C, BX, BK, PRECISION)
        seen = (x + step_x[None, :] <= step[:, None]) & inside[:, None]
        if G is not None:
            G_key = per_head(G, H, key, held, 0.0, BX)
            P = P * tl.exp(tl.where(seen, G_[:, None] - G_key[None, :], 0.0))
        if MEMORY == "log_linear":  # times are then positions of the whole sequence, of which chunks are aligned pieces
            slot = bit_length(((time + step) % C)[:, None] ^ ((time + x + step_x) % C)[None, :])
        if MEMORY == "dynamic":
            d = per_head(death, H, key, held, -1, BX)
            alive = seen & (d[None, :] > (time + step)[:, None])
            if birth is not None:
                alive = alive & (per_head(birth, H, key, held, 0, BX)[None, :] <= (time + step)[:, None])
            alive = alive.to(tl.int32)
            upto = tl.cumsum(alive, 1)
            slot = slot_upto[:, None] - upto if RECENCY else slot_upto[:, None] + upto
            slot_upto = slot_upto - tl.sum(alive, 1) if RECENCY else slot_upto + tl.sum(alive, 1)
        if MEMORY != "single":
            slot = tl.minimum(tl.maximum(slot, 0), width - 1)
            P = P * tl.load(lam + step[:, None] * lam_stride + slot, mask=seen, other=0.0)
        v_ = rows(v, v_stride, key, held, column, DV, BX)
        o_ += product(rounded(tl.where(seen, P, 0.0), FACTOR), v_.to(FACTOR), PRECISION)
    o += (token.to(tl.int64) * H + h) * DV
    tl.store(o + step[:, None] * (H * DV) + column[None, :], rounded(o_ * scale, o.dtype.element_ty),
             mask=inside[:, None] & (column < DV)[None, :])  # fmt: skip


def outputs_of(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None, scale: float, memory: MemoryKind, states: States, tiles: Tiles,
    plan: ReadPlan | None = None, death: Tensor | None = None, recency: bool = False, birth: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """o [tokens, H, dv] of q, k [tokens, Hk, dk], v [tokens, H, dv], lam [tokens, H, width], death [tokens, H]."""
    (_, H, dv), dk, c = v.shape, k.shape[2], config(f"outputs_{memory}", v.dtype)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    BK, BV = tile(dk, c["BK"]), tile(dv, c["BV"])
    names = ("position", "parts", "part_count", "weight", "slot_before")
    arguments: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "lam": lam,
        "o": o,
        "S": states.S,
        "G": states.G,
        "total": states.total,
    }
    arguments |= {
        "death": death,
        "birth": birth,
        **{name: None if plan is None else getattr(plan, name) for name in names},
    }
    arguments |= {name: getattr(tiles, name) for name in ("first", "stop", "sequence", "offset", "lead", "chunks")}
    arguments |= {f"{name}_stride": x.stride(0) for name, x in (("q", q), ("k", k), ("v", v))}
    arguments |= {"lam_stride": 0 if lam is None else lam.stride(0), "width": 0 if lam is None else lam.shape[2]}
    arguments |= {"scale": scale, "carried": states.carried, "K": 0 if plan is None else plan.states}
    arguments |= {"H": H, "GROUP": H // k.shape[1], "DK": dk, "DV": dv, "C": CHUNK, "BX": c["BX"], "BK": BK, "BV": BV}
    arguments |= {"MEMORY": memory, "RECENCY": recency}
    grid = (tiles.count * triton.cdiv(dv, BV), H)
    arguments |= arithmetic(v.dtype)
    launch(outputs, grid, arguments, c)
    return o
