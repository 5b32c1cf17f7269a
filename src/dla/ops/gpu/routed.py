"""Routed reads of delta steps: the weights of states, for autograd to follow by themselves."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dla.ops.gpu.key_sums import key_sums_of
from dla.ops.gpu.reading import Reads
from dla.ops.gpu.routing_gradients import routing_gradients_of
from dla.ops.gpu.starts import Starts
from dla.ops.gpu.tiles import Tiles
from dla.ops.problem import OPERANDS, Problem


class RoutedWeights(torch.autograd.Function):
    """Weights [tokens, H, K] that ``routed_weights`` made already of q, k [tokens, Hk, dk], v, lam and route.

    What is large is saved as autograd's own, so that checkpointing lets go of it, or made again: the sums of keys.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, problem: Problem, starts: Starts, tiles: Tiles, *inputs: Tensor
    ) -> Tensor:  # fmt: skip
        ctx.problem = replace(problem, state=None, **dict.fromkeys(OPERANDS))  # type: ignore[arg-type]
        ctx.starts, ctx.tiles = starts, tiles
        ctx.carried = None if problem.state is None else problem.state.keys
        ctx.save_for_backward(*inputs)
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_weights: Tensor) -> Any:
        q, k, v, lam, route = ctx.saved_tensors  # once: under checkpointing they are made again for it
        unflat = ctx.problem.layout.unflat
        problem = replace(ctx.problem, lam=unflat(lam), route=unflat(route))
        sums = key_sums_of(k, ctx.carried, ctx.tiles)
        x = Reads("dynamic", q, k, v, None, 1.0, ctx.tiles, starts=ctx.starts, sums=sums, hard=ctx.starts)
        found = routing_gradients_of(problem, x, {"lam": d_weights.float().contiguous(), "q": 0, "k": 0})
        of_inputs = (found[name].to(y.dtype) for name, y in (("q", q), ("k", k), ("lam", lam), ("route", route)))
        d_q, d_k, d_lam, d_route = of_inputs
        return None, None, None, None, d_q, d_k, None, d_lam, d_route
