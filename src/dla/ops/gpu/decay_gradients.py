"""Gradients of g: running sums, from each sequence's end, of what every token reads less what is read of it.

What token s gives to query t has the factor exp(g of s + 1 .. t) once, so that it adds to the gradients of these g. With
all that t reads added at t, and all that is read of s taken off at s, the sum from u on has just the pairs s < u <= t.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit
def decay_gradients(net, d_g, first, stop, chunks, H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr):
    """One program a sequence and BH heads. net, d_g [tokens, H]"""
    n, head = tl.program_id(0), tl.program_id(1) * BH + tl.arange(0, BH)
    begin, end = tl.load(chunks + n), tl.load(chunks + n + 1)
    total = tl.zeros([BH], tl.float64)
    for back in range(end - begin):
        token, inside = tokens_of(first, stop, end - 1 - back, C)
        at = token.to(tl.int64) * H + tl.arange(0, C)[:, None] * H + head[None, :]
        there = inside[:, None] & (head < H)[None, :]
        x = tl.load(net + at, mask=there, other=0.0).to(tl.float64)
        tl.store(d_g + at, (total[None, :] + tl.cumsum(x, 0, reverse=True)).to(tl.float32), mask=there)
        total += tl.sum(x, 0)


def decay_gradients_of(net: Tensor, tiles: Tiles) -> Tensor:
    """dg [tokens, H] float32 of net [tokens, H]."""
    (tokens, H), c = net.shape, config("decay_gradients")
    d_g = torch.empty(tokens, H, dtype=torch.float32, device=net.device)
    arguments: dict[str, Any] = {"net": net, "d_g": d_g, "first": tiles.first, "stop": tiles.stop}
    arguments |= {"chunks": tiles.chunks, "H": H, "C": CHUNK, "BH": c["BH"]}
    launch(decay_gradients, (tiles.sequences, triton.cdiv(H, c["BH"])), arguments, c)
    return d_g
