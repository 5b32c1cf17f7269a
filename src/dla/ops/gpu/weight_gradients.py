"""Gradients of lam: what query_gradients.py says of states, and the chunk's own tokens, gathered by columns.

Every state and every own token of a chunk has at each query t one column of lam, and the gradient of lam there is the
sum over those that have it. net [t] is for gradients of g, as query_gradients.py has it of one state.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import arithmetic, per_head, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.read_weights import gram, own_columns, own_decays, own_weights
from dla.ops.gpu.reading import Reads, common, used
from dla.ops.gpu.states import States


@triton.jit(do_not_specialize=["scale", "K", "width", "count", "tiles"])
def weight_gradients(
    q, k, v, d_o, lam, d_weight, weight, columns, d_lam, net, G, death, birth, slot_before, part_count, parts,
    first, stop, sequence, offset, lead, q_stride, k_stride, v_stride, lam_stride,
    scale, K, width, count, tiles,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    BW: tl.constexpr, PRECISION: tl.constexpr, MEMORY: tl.constexpr, RECENCY: tl.constexpr,
):  # fmt: skip
    """One program a chunk, head and BW columns of lam."""
    c, number, h = tl.program_id(0) % count, tl.program_id(0) // count, tl.program_id(1)
    n, step = tl.load(sequence + c), tl.arange(0, C)
    token, inside = tokens_of(first, stop, c, C)
    time = token - tl.load(offset + n) + tl.load(lead + n)
    seen = (step[None, :] <= step[:, None]) & inside[:, None]
    P = gram(q + h // GROUP * DK, q_stride, token, inside, k + h // GROUP * DK, k_stride, token, inside, DK, C, BD,
             PRECISION)  # fmt: skip
    A = gram(d_o + h * DV, H * DV, token, inside, v + h * DV, v_stride, token, inside, DV, C, BD, PRECISION)
    A = tl.where(seen, A * P, 0.0)
    if G is not None:
        A = A * own_decays(per_head(G + h, H, token, inside, 0.0, C), seen)
    column = own_columns(death, birth, slot_before, token, inside, time, h, width, H, C, MEMORY, RECENCY)
    if G is not None:
        pairs = tl.where(
            step[None, :] < step[:, None], A * own_weights(lam, lam_stride, column, seen, token, h, width, C), 0.0
        )
        reads = tl.sum(pairs, 1) - tl.sum(pairs, 0)
    mine = number * BW + tl.arange(0, BW)
    d = tl.zeros([C, BW], tl.float32)
    column = tl.where(seen, column, -1)
    low = tl.min(tl.min(tl.where(seen, column, width), 1), 0)
    high = tl.max(tl.max(column, 1), 0)
    for i in range(tl.maximum(low, number * BW), tl.minimum(high + 1, number * BW + BW)):
        d += tl.where(mine[None, :] == i, tl.sum(tl.where(column == i, A, 0.0), 1)[:, None], 0.0)

    plan_head = c if MEMORY == "log_linear" else c * H + h
    many = tl.load(part_count + plan_head)
    states = tl.load(parts + (plan_head.to(tl.int64) * K + many - 1) * 4, mask=many > 0, other=-1) + 1
    at = (c * H + h).to(tl.int64) * K * C + step
    for i in range(states):
        d_w = tl.zeros([C], tl.float32)
        for j in range(tiles):
            d_w += tl.load(d_weight + (c * 0 + j).to(tl.int64) * count * H * K * C + at + i * C)
        from_ = tl.load(columns + at + i * C)
        d += tl.where(mine[None, :] == from_[:, None], d_w[:, None], 0.0)
        if G is not None:
            reads += d_w * tl.load(weight + at + i * C)

    if G is not None:
        tl.store(net + (token.to(tl.int64) + step) * H + h, reads * scale, mask=inside & (number == 0))
    there = inside[:, None] & (mine < width)[None, :]
    d_lam += (token.to(tl.int64) * H + h) * width
    tl.store(d_lam + step[:, None] * (H * width) + mine[None, :], d * scale, mask=there)


def weight_gradients_of(x: Reads, d_o: Tensor, d_weight: Tensor, states: States) -> tuple[Tensor, Tensor]:
    """dlam [tokens, H, width] float32, and net [1, tokens, H]."""
    assert x.weights is not None and x.plan is not None
    (tokens, H, width), c = x.weights.shape, config("weight_gradients", x.v.dtype)
    BW = min(c["BW"], triton.next_power_of_2(max(width, 2)))
    blocks, device, arguments = triton.cdiv(width, BW), x.v.device, common(x, states)
    d_lam = torch.empty(tokens, H, width, dtype=torch.float32, device=device)
    net = torch.empty(1, 0 if x.g is None else tokens, H, dtype=torch.float32, device=device)
    arguments |= {"d_o": d_o, "d_weight": d_weight, "columns": x.plan.column, "d_lam": d_lam, "net": net}
    arguments |= {"count": x.tiles.count, "tiles": len(d_weight), "BW": BW, "BD": c["BD"]}
    arguments |= {"PRECISION": arithmetic(x.v.dtype)["PRECISION"]}
    launch(weight_gradients, (x.tiles.count * blocks, H), used(weight_gradients, arguments), c)
    return d_lam, net
