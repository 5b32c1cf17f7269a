"""Routed reads of delta steps: the weights of states, for autograd to follow by themselves."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dla.ops.gpu.reading import Reads
from dla.ops.gpu.routing_gradients import routing_gradients_of
from dla.ops.problem import Problem


class RoutedWeights(torch.autograd.Function):
    """Weights [tokens, H, K] that ``routed_weights`` made already of q, k [tokens, Hk, dk], lam and route."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, problem: Problem, x: Reads, *inputs: Tensor) -> Tensor:
        ctx.problem, ctx.reading = problem, replace(x, weights=None)
        ctx.save_for_backward(*inputs)
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_weights: Tensor) -> Any:
        q, k, *_ = ctx.saved_tensors
        reading = replace(ctx.reading, q=q, k=k)
        found = routing_gradients_of(ctx.problem, reading, {"lam": d_weights.float().contiguous(), "q": 0, "k": 0})
        inputs = zip(("q", "k", "lam", "route"), ctx.saved_tensors, strict=True)
        return None, None, None, *(found[name].to(x.dtype) for name, x in inputs)
