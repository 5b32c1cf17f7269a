"""The three memories, each as a plan over one plain recurrence: which kernels run, in their order."""

import torch
from torch import Tensor

from dla.ops.chunked.gate import soft_gate
from dla.ops.chunked.tokens import tokens_after
from dla.ops.decide.decided import Decided
from dla.ops.gpu.gate_alignment import aligned
from dla.ops.gpu.gradients import with_gradients
from dla.ops.gpu.levels import last_blocks
from dla.ops.gpu.reading import Lives, of_levels, of_single, of_states, of_streams
from dla.ops.gpu.spans import matrices_of
from dla.ops.gpu.streams import Streams
from dla.ops.problem import Problem
from dla.ops.state import DynamicState, LinearState, LogLinearState, State
from dla.ops.state.base import take_rows


def attend(problem: Problem, decided: Decided | None) -> tuple[Tensor, State | None]:
    """Outputs, which autograd can follow if a gradient is needed, and the state after the call, which it cannot."""
    lives, streams = (None, None) if decided is None else lives_of(problem, decided)
    gate = soft_gate(problem, decided, aligned) if problem.soft and decided is not None else None
    with torch.no_grad():
        if decided is None or lives is None:
            o, state = linear(problem) if problem.memory == "single" else log_linear(problem)
        elif streams is None or gate is None:
            o, state = dynamic(problem, decided, lives)
        else:
            o, state = gated(problem, lives, streams, gate), None
    if problem.needs_gradient:
        o = with_gradients(o, problem, lives, streams, gate)
    return o, state


@torch.no_grad()
def lives_of(problem: Problem, decided: Decided) -> tuple[Lives, Streams | None]:
    """When states live and, with the soft gate, its streams."""
    lives, layout = Lives.of(problem, decided), problem.layout
    if not problem.soft:
        return lives, None
    return lives, Streams.of(lives.death, layout.flat(decided.segmentation.boundary), layout)


def linear(problem: Problem) -> tuple[Tensor, State | None]:
    reading = of_single(problem)
    states = reading.states()
    o = problem.layout.unflat(reading.outputs(states))
    if not problem.wants_state:
        return o, None
    return o, LinearState(matrix=states.last(reading.tiles), length=problem.length())


def log_linear(problem: Problem) -> tuple[Tensor, State | None]:
    x = of_levels(problem)
    states = x.states()
    o = problem.layout.unflat(x.outputs(states))
    if not problem.wants_state:
        return o, None
    assert x.position is not None
    end = problem.length()
    width = max((n.bit_length() for n in end.tolist()), default=0)
    blocks = last_blocks(x.position, end, states.carried, width)
    made = matrices_of(x.k, x.v, *blocks, states, x.tiles)  # oldest first
    there = (end[:, None] >> torch.arange(width, device=problem.device)) & 1
    older = there.sum(1, keepdim=True) - there.cumsum(1)  # than the block of each bit
    place = torch.where(there == 1, older, width - 1)  # free places are the last, and zero
    return o, LogLinearState(levels=take_rows(made, place[:, None].expand(made.shape[:3])), length=end)


def gated(problem: Problem, lives: Lives, streams: Streams, gate: Tensor) -> Tensor:
    """``gate`` [tokens, H] is the soft gate's p; no state is carried with it."""
    stays, waits = (x.outputs(x.states()).float() for x in of_streams(problem, lives, streams, gate))
    return problem.layout.unflat((stays + waits).to(problem.v.dtype))


def dynamic(problem: Problem, decided: Decided, lives: Lives) -> tuple[Tensor, State | None]:
    made, layout, capacity = decided.segmentation, problem.layout, problem.rules.capacity
    x = of_states(problem, lives, ends=problem.wants_state and capacity is not None)
    assert x.starts is not None
    states = x.states()
    o = layout.unflat(x.outputs(states))
    if not problem.wants_state:
        return o, None
    if capacity is None:
        return o, tokens_after(problem, made)
    position, count = x.starts.position[x.tiles.count :], x.starts.count[x.tiles.count :]
    matrices = matrices_of(x.k, x.v, position, count, states, x.tiles)
    keys = None if x.sums is None else x.sums.between(position, count, x.tiles)
    counts, info = made.tally(None if problem.state is None else problem.state.info, capacity)
    return o, DynamicState.of_matrices(matrices, counts, info, keys, problem.length(), capacity)
