"""Gradients of keys and values: one pass over the chunks whose tokens are read.

With D the gradients of outputs, and dS that of the row behind the token's chunk (state_gradients.py),

    dV = sum of (Q K^T . decay . Lam)^T D  over the chunks that read these tokens as tokens,  + left . K dS
    dK = sum of (D V^T . decay . Lam)^T Q  over them,                                         + left . V dS^T

which is the same with other names. The chunks that read a chunk's tokens are itself and a range behind it, to the last
one in which a start inside of it lives; early chunks, whose starts may live longest, come first. dK is added up over
the heads of a key head as dQ is (query_gradients.py). reads [x] is v . dv of the chunks behind: what is read of x
there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import arithmetic, fade, matrix, per_head, product, rounded, rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.query_gradients import heads_each
from dla.ops.gpu.read_weights import cut_weights, gram, own_columns, own_decays, own_weights, part_cutting, sums_of_rows
from dla.ops.gpu.reading import Reads, common, used
from dla.ops.gpu.states import States


@triton.jit
def from_state(
    x, x_stride, token, inside, left, dS, number, onto, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BI: tl.constexpr, BO: tl.constexpr, KEYS: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """left . X dS^T of values X, or left . X dS of keys X: [C, BO]."""
    made = tl.zeros([C, BO], tl.float32)
    width: tl.constexpr = DV if KEYS else DK
    for i in range(0, width, BI):
        inner = i + tl.arange(0, BI)
        x_ = rows(x, x_stride, token, inside, inner, width, C)
        if KEYS:
            d = tl.trans(rounded(matrix(dS, number, onto, inner, DK, DV, True), FACTOR))
        else:
            d = rounded(matrix(dS, number, inner, onto, DK, DV, True), FACTOR)
        made += product(x_.to(FACTOR), d, PRECISION)
    return made * left[:, None]


@triton.jit(do_not_specialize=["scale", "carried", "K", "width", "tokens"])
def token_gradients(
    q, k, v, d_o, lam, dS, made, reads, G, total, death, birth, slot_before, position, parts, part_count, weight, until,
    first, stop, sequence, offset, lead, chunks, q_stride, k_stride, v_stride, lam_stride,
    scale, carried, K, width, tokens,
    H: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr, PIECES: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr, MEMORY: tl.constexpr, RECENCY: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One program a chunk of tokens and BO numbers of their keys or values, and EACH heads of one key head."""
    inner: tl.constexpr = DV if KEYS else DK
    outer: tl.constexpr = DK if KEYS else DV
    tiles: tl.constexpr = tl.cdiv(outer, BO)
    sums: tl.constexpr = tl.cdiv(GROUP, EACH)
    j, number = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    key_head, share = tl.program_id(1) // sums, tl.program_id(1) % sums
    onto = number * BO + tl.arange(0, BO)
    n, step = tl.load(sequence + j), tl.arange(0, C)
    before = tl.load(chunks + n)
    base = before + n * (carried + 1)
    here = carried + j - before
    token, inside = tokens_of(first, stop, j, C)
    time = token - tl.load(offset + n) + tl.load(lead + n)
    seen = (step[None, :] <= step[:, None]) & inside[:, None]
    q += key_head * DK
    k += key_head * DK
    d_stride: tl.constexpr = H * DV
    begin_head = key_head * GROUP + share * EACH
    sum_ = tl.zeros([C, BO], tl.float32)
    for turn in tl.range(0, tl.minimum(EACH, GROUP - share * EACH), disable_licm=True):
        h = begin_head + turn
        # the rows that meet as a product, X of a query and Y of a token, and what a query gives with it
        if KEYS:
            x, x_stride, y, y_stride, z, z_stride = d_o + h * DV, d_stride, v + h * DV, v_stride, q, q_stride
        else:
            x, x_stride, y, y_stride, z, z_stride = q, q_stride, k, k_stride, d_o + h * DV, d_stride
        left = tl.full([C], 1.0, tl.float32)  # of these tokens, at the chunk's end
        if G is not None:
            G_ = per_head(G + h, H, token, inside, 0.0, C)
            left = tl.exp(tl.where(inside, tl.min(G_, 0) - G_, 0.0))
        d = from_state(y, y_stride, token, inside, left, dS, (base + here + 1).to(tl.int64) * H + h, onto, DK, DV, C,
                       BI, BO, KEYS, FACTOR, PRECISION)  # fmt: skip
        if MEMORY == "dynamic":
            for later in tl.range(1, tl.load(until + j * H + h) - j, disable_licm=True):
                c = j + later
                place = c * H + h
                parts_c = parts + place.to(tl.int64) * K * 4
                part = part_cutting(parts_c, tl.load(part_count + place), here, BP)
                if part >= 0:
                    begun = tl.load(parts_c + (part - 1) * 4, mask=part > 0, other=-1) + 1
                    state = tl.load(parts_c + part * 4)
                    token_c, inside_c = tokens_of(first, stop, c, C)
                    A = gram(x, x_stride, token_c, inside_c, y, y_stride, token, inside, inner, C, BD, PRECISION)
                    Lam = cut_weights(weight + place.to(tl.int64) * K * C, position + place.to(tl.int64) * K, begun,
                                      state, (j - before) * C, C)  # fmt: skip
                    A = A * Lam
                    if G is not None:
                        lasting = tl.exp(per_head(G + h, H, token_c, inside_c, 0.0, C))
                        A = A * (lasting * fade(total + h, H, base + carried + c - before, base + here + 1))[:, None]
                        A = A * left[None, :]
                    length = tl.load(stop + c) - token_c
                    d += sums_of_rows(
                        tl.trans(A), z, z_stride, token_c, length, onto, outer, C, PIECES, FACTOR, PRECISION
                    )
        at = (token.to(tl.int64) + step) * H + h
        if (G is not None) and (not KEYS):
            v_ = rows(v + h * DV, v_stride, token, inside, onto, DV, C).to(tl.float32)
            tl.store(reads + number.to(tl.int64) * tokens * H + at, tl.sum(v_ * d, 1) * scale, mask=inside)
        A = gram(x, x_stride, token, inside, y, y_stride, token, inside, inner, C, BD, PRECISION)
        if G is not None:
            A = A * own_decays(G_, seen)
        if MEMORY != "single":
            column = own_columns(death, birth, slot_before, token, inside, time, h, width, H, C, MEMORY, RECENCY)
            A = A * own_weights(lam, lam_stride, column, seen, token, h, width, C)
        A, length = tl.trans(tl.where(seen, A, 0.0)), tl.load(stop + j) - token
        d += sums_of_rows(A, z, z_stride, token, length, onto, outer, C, PIECES, FACTOR, PRECISION)
        if KEYS:
            sum_ += d
        else:
            tl.store(made + at[:, None] * DV + onto[None, :], d * scale, mask=inside[:, None] & (onto < DV)[None, :])
    if KEYS:
        made += ((share.to(tl.int64) * tokens + token) * (H // GROUP) + key_head) * DK
        tl.store(made + step[:, None] * (H // GROUP * DK) + onto[None, :], sum_ * scale,
                 mask=inside[:, None] & (onto < DK)[None, :])  # fmt: skip


def token_gradients_of(
    x: Reads, d_o: Tensor, dS: Tensor, states: States, until: Tensor, keys: bool
) -> tuple[Tensor, Tensor | None]:
    """dk [sums, tokens, Hk, dk], to be added up; or dv [tokens, H, dv] and reads [tiles, tokens, H]. All float32."""
    (tokens, H, dv), (_, key_heads, dk) = x.v.shape, x.k.shape
    c = config(f"{'key' if keys else 'value'}_gradients_{x.memory}", x.v.dtype)
    inner, outer, each = (dv, dk, heads_each(x)) if keys else (dk, dv, 1)
    sums, device = triton.cdiv(H // key_heads, each), x.v.device
    BO = tile(outer, c["BO"])
    tiles, arguments = triton.cdiv(outer, BO), common(x, states)
    shape = (sums, tokens, key_heads, dk) if keys else (tokens, H, dv)
    made = torch.empty(shape, dtype=torch.float32, device=device)
    reads = None if keys else torch.empty(tiles, 0 if x.g is None else tokens, H, dtype=torch.float32, device=device)
    arguments |= {"d_o": d_o, "dS": dS, "made": made, "reads": reads, "until": until, "tokens": tokens, "KEYS": keys}
    arguments |= {
        "EACH": each,
        "BD": c["BD"],
        "BI": tile(inner, c["BI"]),
        "BO": BO,
        "BP": c["BP"],
        "PIECES": c["pieces"],
    }
    arguments |= arithmetic(x.v.dtype)
    launch(token_gradients, (x.tiles.count * tiles, key_heads * sums), used(token_gradients, arguments), c)
    return made, reads
