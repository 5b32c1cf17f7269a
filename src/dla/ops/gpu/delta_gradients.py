"""The walk of delta_walk.py as an operation that has gradients."""

from typing import Any

import torch
from torch import Tensor

from dla.ops.gpu.delta_chunks import chunk_matrices_of
from dla.ops.gpu.delta_plan import Runs
from dla.ops.gpu.delta_walk import Operation, Span, walk
from dla.ops.gpu.states import running_sums
from dla.ops.gpu.tiles import Tiles


class DeltaAttention(torch.autograd.Function):
    """Outputs [tokens, H, dv] and the states after the last token [N, H, K, dk, dv], which have no gradient.

    q, k [tokens, Hk, dk], v [tokens, H, dv], g and beta [tokens, H], weight [chunks, H, K + CHUNK, CHUNK] by state or
    token and query; S [N, H, K, dk, dv] float32, the states before the first token, is overwritten.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, weight: Tensor | None,
        scale: float, tiles: Tiles, runs: Runs, S: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        G = None if g is None else running_sums(g, tiles)
        x = Operation(q, k, v, beta, G, scale, tiles, runs, chunk_matrices_of(q, k, beta, tiles))
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        walk(x, weight, None, S, Span.whole(tiles), o)
        ctx.mark_non_differentiable(S)
        return o, S
