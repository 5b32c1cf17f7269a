"""How a token lies to the state that it sees, for the soft gate: k^T S v of unit vectors, and the norms of k and v.

With what was seen, S^T k / |k| and S v / |v| (decide_seen.py), the product is a sum over one row, and so are both its
gradients, for S counts as constant; unit vectors are made where they are needed and kept nowhere:

    product = k/|k| . S v      dk = d (S v   - (k/|k| . S v)   k/|k|) / |k| + d|k| k/|k|
                               dv = d (S^T k - (v/|v| . S^T k) v/|v|) / |v| + d|v| v/|v|
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.decide.decided import Seen
from dla.ops.gpu.configs import config
from dla.ops.gpu.launch import launch
from dla.ops.gpu.reading import side_by_side


@triton.jit
def row_norms(x):
    """[BT] of rows, as ``safe_norm`` has them: no square overflows or underflows."""
    largest = tl.max(tl.abs(x), 1)
    largest = tl.where((largest > 0) & (largest < float("inf")), largest, 1.0)
    scaled = x / largest[:, None]
    return largest * tl.sqrt(tl.sum(scaled * scaled, 1))


@triton.jit
def some_rows(x, stride, first, tokens, column, width, BT: tl.constexpr):
    """x at BT tokens from ``first`` and at all columns, in float32; zero outside."""
    at = tl.arange(0, BT)
    place = x + first.to(tl.int64) * stride + at[:, None] * stride + column[None, :]
    return tl.load(place, mask=(first + at < tokens)[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def unit_rows(x, norm):
    """Rows over their norms, zero where that is zero; and one over the norms, one there."""
    over = 1 / tl.where(norm == 0, 1.0, norm)
    return x * over[:, None], over


@triton.jit(do_not_specialize=["tokens"])
def gate_alignment(
    k, v, state_v, product, norm_k, norm_v, k_stride, v_stride, tokens,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program BT tokens and a head: product, norm_k, norm_v [tokens, H]."""
    first, h, at = tl.program_id(0) * BT, tl.program_id(1), tl.arange(0, BT)
    key, value = tl.arange(0, BK), tl.arange(0, BV)
    k_ = some_rows(k + h // GROUP * DK, k_stride, first, tokens, key, DK, BT)
    norm = row_norms(k_)
    unit_k, _ = unit_rows(k_, norm)
    seen = some_rows(state_v + h * DK, H * DK, first, tokens, key, DK, BT)
    place, there = (first + at).to(tl.int64) * H + h, first + at < tokens
    tl.store(product + place, tl.sum(unit_k * seen, 1), mask=there)
    tl.store(norm_k + place, norm, mask=there)
    tl.store(norm_v + place, row_norms(some_rows(v + h * DV, v_stride, first, tokens, value, DV, BT)), mask=there)


@triton.jit(do_not_specialize=["tokens"])
def gate_alignment_back(
    k, v, state_k, state_v, d_product, d_norm_k, d_norm_v, d_k, d_v, k_stride, v_stride, tokens,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program BT tokens and a key head: d_k [tokens, Hk, DK], the sum of its heads, and d_v [tokens, H, DV]."""
    first, head, at = tl.program_id(0) * BT, tl.program_id(1), tl.arange(0, BT)
    key, value, heads = tl.arange(0, BK), tl.arange(0, BV), H // GROUP
    there = first + at < tokens
    k_ = some_rows(k + head * DK, k_stride, first, tokens, key, DK, BT)
    unit_k, over_k = unit_rows(k_, row_norms(k_))
    d_k_ = tl.zeros([BT, BK], tl.float32)
    for member in range(GROUP):
        h = head * GROUP + member
        place = (first + at).to(tl.int64) * H + h
        d = tl.load(d_product + place, mask=there, other=0.0)
        d_size = tl.load(d_norm_k + place, mask=there, other=0.0)
        seen = some_rows(state_v + h * DK, H * DK, first, tokens, key, DK, BT)
        d_k_ += seen * (d * over_k)[:, None] + unit_k * (d_size - d * over_k * tl.sum(unit_k * seen, 1))[:, None]
        v_ = some_rows(v + h * DV, v_stride, first, tokens, value, DV, BT)
        unit_v, over_v = unit_rows(v_, row_norms(v_))
        d_size = tl.load(d_norm_v + place, mask=there, other=0.0)
        seen = some_rows(state_k + h * DV, H * DV, first, tokens, value, DV, BT)
        d_v_ = seen * (d * over_v)[:, None] + unit_v * (d_size - d * over_v * tl.sum(unit_v * seen, 1))[:, None]
        tl.store(d_v + place[:, None] * DV + value[None, :], d_v_, mask=there[:, None] & (value < DV)[None, :])
    out = ((first + at).to(tl.int64) * heads + head)[:, None] * DK + key[None, :]
    tl.store(d_k + out, d_k_, mask=there[:, None] & (key < DK)[None, :])


class Alignment(torch.autograd.Function):
    """product, norm_k, norm_v [tokens, H] float32 of k [tokens, Hk, dk], v [tokens, H, dv] and what was seen."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, state_k: Tensor, state_v: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(k, v, state_k, state_v)
        made = tuple(torch.empty(v.shape[:2], dtype=torch.float32, device=v.device) for _ in range(3))
        run(
            gate_alignment,
            k,
            v,
            v.shape[1],
            dict(zip(("product", "norm_k", "norm_v"), made, strict=True), state_v=state_v),
        )
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_product: Tensor, d_norm_k: Tensor, d_norm_v: Tensor) -> Any:
        k, v, state_k, state_v = ctx.saved_tensors
        d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        given = {"state_k": state_k, "state_v": state_v, "d_k": d_k, "d_v": d_v}
        given |= {"d_product": d_product.contiguous(), "d_norm_k": d_norm_k.contiguous()}
        run(gate_alignment_back, k, v, k.shape[1], given | {"d_norm_v": d_norm_v.contiguous()})
        return d_k, d_v, None, None


def run(kernel: Any, k: Tensor, v: Tensor, heads: int, given: dict[str, Tensor]) -> None:
    """One of the two kernels, over all tokens and so many heads."""
    (tokens, H, dv), (_, key_heads, dk), c = v.shape, k.shape, config(kernel.__name__)
    arguments: dict[str, Any] = {"k": k, "v": v, "k_stride": k.stride(0), "v_stride": v.stride(0), "tokens": tokens}
    arguments |= {"H": H, "GROUP": H // key_heads, "DK": dk, "DV": dv, "BT": c["BT"], **given}
    arguments |= {"BK": triton.next_power_of_2(dk), "BV": triton.next_power_of_2(dv)}
    launch(kernel, (triton.cdiv(tokens, c["BT"]), heads), arguments, c)


def aligned(k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, ...]:
    """As ``dla.ops.chunked.gate.aligned``."""
    k_, v_ = side_by_side(k), side_by_side(v)
    made: tuple[Tensor, ...] = Alignment.apply(k_, v_, seen.state_k.contiguous(), seen.state_v.contiguous())
    return made
