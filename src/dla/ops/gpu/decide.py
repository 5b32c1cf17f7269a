"""The first stage in Triton, for scalar decays: scores and boundaries by chunks, merges by density.

Four kernels. ``candidates`` asks in every chunk, for each token as a start, which token opens the next state;
``carry`` goes from chunk to chunk with the current state and finds where it ends; ``settle`` follows the candidates
from there, which gives each chunk's boundaries and scores; ``merges`` goes from boundary to boundary and ends starts.
"""

from typing import Any

import torch
from torch import Tensor

from dla.ops.decide.decided import Decided, Seen
from dla.ops.gpu import runtime
from dla.ops.problem import Problem
from dla.ops.segmentation import ALIVE, Segmentation

MOST_STATES = 64  # two a lane of one warp


def unable(problem: Problem) -> str | None:
    """Why these kernels cannot decide."""
    rules = problem.rules
    if (reason := runtime.unable(problem)) is not None:
        return reason
    if problem.given is not None:  # for the soft gate, which needs what was decided from
        return None
    if rules.capacity is not None and rules.capacity > MOST_STATES:
        return f"Triton merges at most {MOST_STATES} states, the capacity is {rules.capacity}"
    if rules.capacity is not None and rules.merge != "density":
        return f"Triton merges by density, this is {rules.merge}"
    return None


@torch.no_grad()
def decide(problem: Problem) -> Decided:
    """Decide every step of every sequence."""
    from dla.ops.gpu.decide_launches import run  # triton is optional

    if problem.given is not None:
        return Decided(problem.given, seen_of(problem, problem.given.boundary))
    layout, state, device = problem.layout, problem.state, problem.device
    shape = (layout.batch, layout.time, problem.v.shape[2])
    score = torch.empty(shape, dtype=torch.float32, device=device)
    boundary = torch.empty(shape, dtype=torch.bool, device=device)
    death = torch.empty(shape, dtype=torch.int32, device=device)
    before = {} if state is None else carried(state)
    run(problem, {"score": score, "boundary": boundary, "death": death, **before})
    lengths = layout.lengths if layout.packed else None
    counts = None if state is None else state.counts
    made = Segmentation(score, boundary, death, lengths, counts, before.get("initial_death"))
    return Decided(made, seen_of(problem, boundary) if problem.soft else None)


def seen_of(problem: Problem, boundary: Tensor) -> Seen:
    """What the soft gate needs of boundaries [B, T, H], which may be given ones."""
    from dla.ops.gpu.decide_delta_seen import delta_seen_of
    from dla.ops.gpu.decide_seen import plain_seen_of

    if problem.rules.block is not None:  # they make the gate by themselves
        k, v = (problem.layout.flat(x).float() for x in (problem.k, problem.v))
        return Seen.empty(k, v)
    return plain_seen_of(problem, boundary) if problem.beta is None else delta_seen_of(problem, boundary)


def carried(state: Any) -> dict[str, Tensor]:
    """What decisions need of the states carried in; the current ones as 2^scale times a matrix near one.

    A matrix that is not finite is zero, and told in ``spoiled0`` as in ``poisoned`` of decide_table.py.
    """
    size, counts, current = state.size, state.counts, state.held.current().float()
    largest = current.abs().amax((2, 3))
    finite = largest.isfinite()
    _, exponent = torch.frexp(torch.where(finite, largest, 1))
    matrix = torch.where(finite[..., None, None], current, 0)
    matrix = torch.ldexp(matrix, -exponent[..., None, None])
    alive = torch.arange(counts.shape[2], device=counts.device) < size[..., None]
    return {
        "matrix": matrix.contiguous(),
        "scale0": exponent.float(),
        "spoiled0": torch.where(finite, -2, -1).int(),
        "square0": matrix.square().sum((2, 3)),
        "size0": size.int().contiguous(),
        "count0": counts.int().contiguous(),
        "info0": (state.info.double() * 2.0**32).round().long().contiguous(),
        "position0": state.length.contiguous(),
        "initial_death": torch.where(alive, ALIVE, -1).int(),
    }
