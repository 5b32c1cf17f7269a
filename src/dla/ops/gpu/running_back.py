"""Running sums from each sequence's end.

Gradients of g are such sums: what token s gives to query t has the factor exp(g of s + 1 .. t) once, so that it adds to
the gradients of these g. With all that t reads added at t, and all that is read of s taken off at s, the sum from u on
has just the pairs s < u <= t. Where ``crossing`` says what the pairs on both sides of a chunk's end come to, a chunk
begins with that: the rounding of what is behind it then stays there.

Gradients of keys are such sums too, where it is sums of the keys before tokens that are used (routing_gradients.py).
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
def sums_from_end(x, made, crossing, first, stop, chunks, H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr):
    """One program a sequence and BH of H columns. x, made [tokens, H]"""
    n, head = tl.program_id(0), tl.program_id(1) * BH + tl.arange(0, BH)
    begin, end = tl.load(chunks + n), tl.load(chunks + n + 1)
    total = tl.zeros([BH], tl.float64)
    for back in range(end - begin):
        c = end - 1 - back
        token, inside = tokens_of(first, stop, c, C)
        if crossing is not None:
            total = tl.load(crossing + c * H + head, mask=head < H, other=0.0).to(tl.float64)
        at = token.to(tl.int64) * H + tl.arange(0, C)[:, None] * H + head[None, :]
        there = inside[:, None] & (head < H)[None, :]
        x_ = tl.load(x + at, mask=there, other=0.0).to(tl.float64)
        tl.store(made + at, (total[None, :] + tl.cumsum(x_, 0, reverse=True)).to(tl.float32), mask=there)
        total += tl.sum(x_, 0)


def from_end(x: Tensor, tiles: Tiles, crossing: Tensor | None = None) -> Tensor:
    """[tokens, H] float32 of x [tokens, H] and crossing [chunks, H]; the sums are float64."""
    (tokens, H), c = x.shape, config("sums_from_end")
    made = torch.empty(tokens, H, dtype=torch.float32, device=x.device)
    arguments: dict[str, Any] = {"x": x, "made": made, "crossing": crossing, "first": tiles.first, "stop": tiles.stop}
    arguments |= {"chunks": tiles.chunks, "H": H, "C": CHUNK, "BH": c["BH"]}
    launch(sums_from_end, (tiles.sequences, triton.cdiv(H, c["BH"])), arguments, c)
    return made
