"""Gradients of the second stage in Triton, for scalar decays.

What is kept for them are the inputs and the decisions; states are made again. They are the largest arrays, and but for
one state with decays no two of them are there at once: the states are read by the pass over queries, their gradients
by that over tokens.

    states.py             the states between chunks, and the plan of who reads what
    query_gradients.py    dq, and what is said about the weights of states
    weight_gradients.py   dlam
    state_gradients.py    the gradients of the states, which take their place
    token_gradients.py    dk, dv
    running_back.py       dg, from sums that the others made
    routing_gradients.py  what routed reads add, which dg has no part in: decays do not enter their weights

dq and dk of a key head are sums over its heads. A program adds up a few heads, and there are at most MOST_SUMS such
sums to be added in turn, in all no larger than the values in float32: nothing is added atomically, so that no bit
changes from call to call. With the soft gate all this is done for each of its two streams.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dla.ops.gpu.query_gradients import query_gradients_of
from dla.ops.gpu.reading import Lives, Reads, of_levels, of_single, of_states, of_streams, side_by_side
from dla.ops.gpu.routing_gradients import routing_gradients_of
from dla.ops.gpu.running_back import from_end
from dla.ops.gpu.state_gradients import readers, state_gradients_of
from dla.ops.gpu.streams import Streams
from dla.ops.gpu.token_gradients import token_gradients_of
from dla.ops.gpu.weight_gradients import weight_gradients_of
from dla.ops.problem import Problem

NAMES = ("q", "k", "v", "lam", "g", "route")  # inputs of a problem that have gradients


class TritonAttention(torch.autograd.Function):
    """Outputs that the kernels made already, with their gradients; ``decided``: deaths, and the gate's streams."""

    @staticmethod
    def forward(
        ctx: Any, o: Tensor, problem: Problem, lives: Lives | None, streams: Streams | None, *inputs: Tensor | None
    ) -> Tensor:
        ctx.problem = replace(problem, **dict.fromkeys(NAMES))  # type: ignore[arg-type]
        ctx.lives, ctx.streams = lives, streams
        ctx.save_for_backward(*inputs)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor) -> Any:
        saved = ctx.saved_tensors
        *operands, gate = saved
        problem = replace(ctx.problem, **dict(zip(NAMES, operands, strict=True)))
        found = gradients(problem, ctx.lives, ctx.streams, gate, d_o)
        inputs = [
            None if x is None or not needed else found[name].view(x.shape).to(x.dtype)
            for name, x, needed in zip((*NAMES, "gate"), saved, ctx.needs_input_grad[4:], strict=True)
        ]
        return None, None, None, None, *inputs


def with_gradients(
    o: Tensor, problem: Problem, lives: Lives | None, streams: Streams | None = None, gate: Tensor | None = None
) -> Tensor:
    """The outputs of a problem, for autograd to follow."""
    inputs = [getattr(problem, name) for name in NAMES]
    kept = replace(problem, state=problem.state if lives is None else None)
    return TritonAttention.apply(o, kept, lives, streams, *inputs, gate)


def gradients(
    problem: Problem, lives: Lives | None, streams: Streams | None, gate: Tensor | None, d_o: Tensor
) -> dict[str, Tensor]:
    """By the names of the inputs, on the flat token axis."""
    if lives is None:
        readings = [of_single(problem) if problem.memory == "single" else of_levels(problem, columns=True)]
    elif streams is None or gate is None:
        readings = [of_states(problem, lives, columns=True)]
    else:
        readings = of_streams(problem, lives, streams, gate, columns=True)
    d_o = side_by_side(problem.layout.flat(d_o.to(problem.v.dtype))).contiguous()  # type: ignore[union-attr]
    found: dict[str, Tensor] = {}
    for i, x in enumerate(readings):
        one = of_reading(x, d_o)
        if gate is not None:
            d_v, v = one["v"], problem.layout.flat(problem.v)
            one["v"] = d_v * (gate if i else 1 - gate)[..., None]
            one["gate"] = (d_v * v).sum(-1) * (1 if i else -1)
        found = {name: found[name] + y if name in found else y for name, y in one.items()}
    if problem.g is not None:
        found["g"] = from_end(found["net"], readings[0].tiles, found.get("crossing"))
    if problem.route is not None:
        found = routing_gradients_of(problem, readings[0], found)
    return found


def of_reading(x: Reads, d_o: Tensor) -> dict[str, Tensor]:
    """q, k [tokens, Hk, dk], v [tokens, H, dv], lam [tokens, H, width] and net [tokens, H], dg's part; float32."""
    found: dict[str, Tensor] = {}
    states = x.states()
    d_q, d_weight, net = query_gradients_of(x, d_o, states)
    found["q"] = d_q.sum(0)
    del d_q
    if x.memory != "single":
        states = replace(states, S=states.S[:0])  # its decays are needed still
    if d_weight is not None:
        found["lam"], net = weight_gradients_of(x, d_o, d_weight, states)
        del d_weight
    of_tokens, of_rows = readers(x)
    dS, crossing = state_gradients_of(x, d_o, states, of_rows)
    if crossing is not None:
        found["crossing"] = crossing.sum(0) * x.scale
    found["v"], is_read = token_gradients_of(x, d_o, dS, states, of_tokens, keys=False)
    if x.g is not None and is_read is not None:
        found["net"] = net.sum(0) - is_read.sum(0)
    found["k"] = token_gradients_of(x, d_o, dS, states, of_tokens, keys=True)[0].sum(0)
    return found
