"""Sums over what comes later, for the gradient of decays.

What token t reads of token s is multiplied by e^{G_t - G_s}, G the running sum of g. So the gradient of G_t is what t
reads in all, less what is read of t in all: dO_t . O_t - dV_t . v_t. That of g_t is the sum of these from t on.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import rows, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit
def delta_sums(x, sums, first, stop, chunks, H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr):
    """One program a sequence and BH heads: sums [tokens, H], in float64 on the way, since most of it cancels."""
    n, head = tl.program_id(0), tl.program_id(1) * BH + tl.arange(0, BH)
    begin, end = tl.load(chunks + n), tl.load(chunks + n + 1)
    later = tl.zeros([BH], tl.float64)
    for back in range(end - begin):
        token, inside = tokens_of(first, stop, end - 1 - back, C)
        x_ = rows(x, H, token, inside, head, H, C).to(tl.float64)  # [C, BH]
        made = tl.cumsum(x_, 0, reverse=True) + later[None, :]
        at = token.to(tl.int64) * H + tl.arange(0, C)[:, None] * H + head[None, :]
        tl.store(sums + at, made.to(tl.float32), mask=inside[:, None] & (head < H)[None, :])
        later += tl.sum(x_, 0)


def sums_from(x: Tensor, tiles: Tiles) -> Tensor:
    """Sums of x [tokens, H] float32 from each token to its sequence's last."""
    H, c = x.shape[1], config("delta_sums")
    sums = torch.empty_like(x)
    arguments: dict[str, Any] = {"x": x, "sums": sums, "first": tiles.first, "stop": tiles.stop, "chunks": tiles.chunks}
    launch(delta_sums, (tiles.sequences, triton.cdiv(H, c["BH"])), arguments | {"H": H, "C": CHUNK, "BH": c["BH"]}, c)
    return sums
