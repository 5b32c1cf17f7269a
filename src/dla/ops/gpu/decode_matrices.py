"""Kernels of a decoding step on matrices that need no decision: one a head, or one a Fenwick level.

A program has one head's columns [dk, BV] of all its matrices, for columns never meet in a step:
S <- e^g (S - beta k (k^T S)) + k v^T, o = scale sum_i lam_i q^T S_i. The reads are added up as matrices, and the query
meets their sum once.
"""

import triton
import triton.language as tl

from dla.ops.gpu.language import columns, moved, numbers


@triton.jit(do_not_specialize=["scale"])
def step_one(q, k, v, g, beta, matrix, o, scale, H, GROUP, dk, dv, BK: tl.constexpr, BV: tl.constexpr):
    """The token of one head on its only state: matrix [N, H, dk, dv]."""
    head = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    key_head = head // H * (H // GROUP) + head % H // GROUP
    q_ = numbers(q, key_head, rows, dk)  # [BK]
    k_ = numbers(k, key_head, rows, dk)
    w = numbers(v, head, cols, dv)  # [BV]
    inside = (rows < dk)[:, None] & (cols < dv)[None, :]
    at = matrix + columns(head, rows, cols, dk, dv)
    S = tl.load(at, mask=inside, other=0.0)  # [BK, BV]
    if beta is not None:
        b = tl.load(beta + head).to(tl.float32)
        S, w = moved(S, k_, b), b * w
    if g is not None:
        S *= tl.exp(tl.load(g + head).to(tl.float32))
    S += k_[:, None] * w[None, :]
    tl.store(at, S, mask=inside)
    read = scale * tl.sum(q_[:, None] * S, 0)
    tl.store(o + head * dv + cols, read.to(o.dtype.element_ty), mask=cols < dv)


@triton.jit(do_not_specialize=["scale", "L"])
def step_levels(
    q, k, v, lam, g, beta, levels, length, o, scale, H, GROUP, dk, dv, width, L, BK: tl.constexpr, BV: tl.constexpr
):
    """The token of one head on its levels [N, H, L, dk, dv]: row i is level i + 1, live where bit i of length is set.

    The token is level 0 while it is read. After that it and the levels below the lowest zero bit are one block, which
    goes to that bit's row; rows that are not live stay zero.
    """
    head = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    key_head = head // H * (H // GROUP) + head % H // GROUP
    q_ = numbers(q, key_head, rows, dk)  # [BK]
    k_ = numbers(k, key_head, rows, dk)
    w = numbers(v, head, cols, dv)  # [BV]
    inside = (rows < dk)[:, None] & (cols < dv)[None, :]
    seen = tl.load(length + head // H)
    fade = 1.0
    if g is not None:
        fade = tl.exp(tl.load(g + head).to(tl.float32))
    b = 0.0
    if beta is not None:
        b = tl.load(beta + head).to(tl.float32)
        w = b * w
    block = k_[:, None] * w[None, :]  # [BK, BV] the token, and the levels that it closes
    read = tl.load(lam + head * width).to(tl.float32) * block  # the matrices times their weights
    closes = seen >= 0  # whether the bits so far are all set
    top = 0
    for i in range(L):
        live = ((seen >> i) & 1) == 1
        closes = closes & live
        if live:
            at = levels + columns(head * L + i, rows, cols, dk, dv)
            S = tl.load(at, mask=inside, other=0.0)
            if beta is not None:
                S = moved(S, k_, b)
            S *= fade
            read += tl.load(lam + head * width + tl.minimum(i + 1, width - 1)).to(tl.float32) * S
            if closes:
                block += S
                S = tl.zeros_like(S)
            tl.store(at, S, mask=inside)
        top += closes.to(tl.int32)
    if top < L:
        tl.store(levels + columns(head * L + top, rows, cols, dk, dv), block, mask=inside)
    answer = scale * tl.sum(q_[:, None] * read, 0)
    tl.store(o + head * dv + cols, answer.to(o.dtype.element_ty), mask=cols < dv)
