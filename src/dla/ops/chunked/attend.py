"""The second stage, in torch: outputs and the final state from decisions, by matmuls on chunks."""

import torch
from torch import Tensor

from dla.ops.chunked.chunks import Chunks, chunk_length
from dla.ops.chunked.engine import ChunkedAttention, Engine, Inputs
from dla.ops.chunked.gate import soft_gate
from dla.ops.chunked.lifetimes import LifetimePlanner, Lifetimes
from dla.ops.chunked.plans import LevelPlanner, SinglePlanner
from dla.ops.chunked.tokens import tokens_after
from dla.ops.decide.decided import Decided
from dla.ops.problem import Problem
from dla.ops.segmentation import Segmentation
from dla.ops.state import DynamicState, LinearState, LogLinearState, State
from dla.ops.state.base import newest_first, take_rows


def attend(problem: Problem, decided: Decided | None) -> tuple[Tensor, State | None]:
    """The outputs [B, T, H, dv] and, if wanted, the state after the last step."""
    if decided is None:
        return linear(problem) if problem.memory == "single" else log_linear(problem)
    return dynamic(problem, decided)


def linear(problem: Problem) -> tuple[Tensor, State | None]:
    _, _, dk, dv = problem.shape
    chunks = Chunks(problem.layout, chunk_length(problem.layout, dk * dv), problem.device)
    engine = Engine(chunks, SinglePlanner(), problem.dtype, problem.scale, wants_state=problem.wants_state)
    carry = empty_carry(problem, 1) if problem.state is None else problem.state.matrix[chunks.rows, :, None]
    o, (matrix,) = run(engine, problem, [carry])
    if not problem.wants_state:
        return o, None
    return o, LinearState(matrix=chunks.unsort(matrix)[:, :, 0].contiguous(), length=problem.length())


def log_linear(problem: Problem) -> tuple[Tensor, State | None]:
    assert problem.lam is not None
    (N, _, dk, dv), state, end = problem.shape, problem.state, problem.length()
    start = torch.zeros(N, dtype=torch.int64, device=problem.device) if state is None else state.length
    chunk = chunk_length(problem.layout, dk * dv, power=True)
    chunks = Chunks(problem.layout, chunk, problem.device, lead=(start % chunk).tolist())
    planner = LevelPlanner(start, end, problem.lam.shape[-1])
    carry = empty_carry(problem, planner.rows)
    if state is not None:
        rows = min(planner.rows, state.levels.shape[2])
        carry[:, :, :rows] = state.levels[chunks.rows, :, :rows]
    engine = Engine(chunks, planner, problem.dtype, problem.scale, wants_state=problem.wants_state)
    o, (levels,) = run(engine, problem, [carry])
    if not problem.wants_state:
        return o, None
    width = max((n.bit_length() for n in end.tolist()), default=0)
    return o, LogLinearState(levels=chunks.unsort(levels)[:, :, :width].contiguous(), length=end)


def dynamic(problem: Problem, decided: Decided) -> tuple[Tensor, State | None]:
    assert problem.lam is not None
    (_, _, dk, dv), capacity = problem.shape, problem.rules.capacity
    lifetimes = Lifetimes.of(decided.segmentation, problem.layout)
    if capacity is None and not problem.routed:
        lifetimes = lifetimes.sharing(problem.lam.shape[-1], problem.slot_order == "recency")
    states = capacity or problem.lam.shape[-1]
    moved = states * dk * dv // 4  # moving many states at once is cheaper than one by one
    whole = problem.g is None and problem.beta is None
    chunks = Chunks(problem.layout, chunk_length(problem.layout, moved, most=128, whole=whole), problem.device)
    planner = LifetimePlanner(lifetimes, chunks, problem.soft, problem.routed)
    keeps = problem.wants_state and capacity is not None
    engine = Engine(chunks, planner, problem.dtype, problem.scale, problem.slot_order, wants_state=keeps)
    gate = soft_gate(problem, decided) if problem.soft else None
    o, after = run(engine, problem, carry_in(problem, lifetimes, planner, chunks), gate)
    if not problem.wants_state:
        return o, None
    if capacity is None:
        return o, tokens_after(problem, decided.segmentation)
    return o, carry_out(problem, decided.segmentation, after, chunks, capacity)


def carry_in(problem: Problem, lifetimes: Lifetimes, planner: LifetimePlanner, chunks: Chunks) -> list[Tensor]:
    """The states to start from, newest first, one row of chunks a sequence: matrices and, if routed, key sums."""
    N, H, dk, _ = problem.shape
    if problem.state is None:
        matrices, keys = empty_carry(problem, planner.rows), None
        if problem.routed:
            keys = matrices.new_zeros(N, H, planner.rows, dk)
    else:
        carried = problem.state.counts.shape[2]
        matrices, keys = problem.state.held.carried(lifetimes.carried_places(carried), planner.rows)
        matrices, keys = matrices[chunks.rows], None if keys is None else keys[chunks.rows]
    return [matrices] if keys is None else [matrices, keys]


def carry_out(problem: Problem, made: Segmentation, after: list[Tensor], chunks: Chunks, capacity: int) -> DynamicState:
    info = None if problem.state is None else problem.state.info
    count, sums = made.tally(info, capacity)
    places = newest_first((count > 0).sum(-1), after[0].shape[2])
    matrices, *keys = (take_rows(x, places, chunks.rows.argsort()) for x in after)
    return DynamicState.of_matrices(matrices, count, sums, keys[0] if keys else None, problem.length(), capacity)


def empty_carry(problem: Problem, rows: int) -> Tensor:
    N, H, dk, dv = problem.shape
    return torch.zeros(N, H, rows, dk, dv, dtype=problem.dtype, device=problem.device)


def run(
    engine: Engine, problem: Problem, carry: list[Tensor], gate: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The engine on a problem's inputs (the gate is flat already): outputs [B, T, H, dv] and the last carry."""
    *flat, route = (problem.flat(x) for x in problem.operands())
    tensors = [*flat, gate, route]
    inputs = Inputs(*tensors)  # type: ignore[arg-type]
    engine.fit(inputs)
    carry = [c.detach() for c in carry]
    if problem.needs_gradient and 0 < engine.chunks.steps <= engine.group:
        o, after = engine.run_at_once(inputs, carry)
    else:
        o, *after = ChunkedAttention.apply(engine, problem.needs_gradient, carry, *tensors)
    return problem.layout.unflat(o), after
