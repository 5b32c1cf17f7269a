"""The three stages of the reference over batches, heads and packed sequences: loops around one head, nothing more."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dla.ops.decide.decided import Decided
from dla.ops.decide.step import Decision, Token, advance
from dla.ops.problem import OPERANDS, Problem
from dla.ops.reference.baselines import linear_head, log_linear_head
from dla.ops.reference.core import Slot, remember
from dla.ops.reference.extended import attend_head
from dla.ops.segmentation import Segmentation
from dla.ops.state import DynamicState, LinearState, LogLinearState, State


def heads_of(problem: Problem) -> Iterator[tuple[tuple[int, int], slice, list[Any]]]:
    """Every sequence and head, its part of the flat token axis, and its operands [T_n, ...], as ``OPERANDS``."""
    layout, H = problem.layout, problem.shape[1]
    for n, (start, length) in enumerate(zip(layout.offsets, layout.lengths, strict=True)):
        for h in range(H):
            part, found = slice(start, start + length), []
            for name, x in zip(OPERANDS, problem.operands(), strict=True):
                head = h // problem.group if name in ("q", "k") else h
                found.append(None if x is None else layout.flat(x)[part, head].to(problem.dtype))
            yield (n, h), part, found


def join(parts: list[Tensor], problem: Problem, like: Tensor) -> Tensor:
    """Per (sequence, head) [T_n, ...] -> [B, T, H, ...], shaped as ``like``"""
    H = problem.shape[1]
    rows = [torch.stack(parts[i : i + H], 1) for i in range(0, len(parts), H)]
    return problem.layout.unflat(torch.cat(rows)) if rows else torch.zeros_like(like, dtype=problem.dtype)


def decode(problem: Problem) -> tuple[Tensor, State | None]:
    return attend(problem, decide(problem) if problem.memory == "dynamic" else None)


@torch.no_grad()
def decide(problem: Problem) -> Decided:
    if problem.given is not None:
        return Decided(problem.given)
    score, boundary, merged = [], [], []
    memories = memories_of(problem)
    for head, _, (_, k, v, _, g, beta, _) in heads_of(problem):
        steps = list(remember(k, v, g, beta, memories[head], problem.rules))
        score.append(torch.tensor([step.score.item() for step in steps], dtype=problem.dtype))
        boundary.append(torch.tensor([step.boundary for step in steps], dtype=torch.bool))
        merged.append(torch.tensor([step.merged for step in steps], dtype=torch.int64))
    parts = [join(x, problem, problem.v[..., 0]).to(problem.device) for x in (score, boundary, merged)]
    layout, counts = problem.layout, None if problem.state is None else problem.state.counts
    lengths = layout.lengths if layout.packed else None
    return Decided(Segmentation.from_merges(parts[0], parts[1].bool(), parts[2].long(), lengths, counts))


def attend(problem: Problem, decided: Decided | None) -> tuple[Tensor, State | None]:
    """Outputs and the final state."""
    if decided is None:
        o, state = linear(problem) if problem.memory == "single" else log_linear(problem)
    else:
        o, state = dynamic(problem, decided)
    return o.to(problem.v.dtype), state


def linear(problem: Problem) -> tuple[Tensor, State | None]:
    state, outputs = LinearState.empty(problem.shape, problem.dtype, problem.device), []
    for head, _, (q, k, v, _, g, beta, _) in heads_of(problem):
        S = (state if problem.state is None else problem.state).matrix[head].clone()
        o, S = linear_head(q, k, v, g, beta, problem.scale, S)
        outputs.append(o)
        state.matrix[head] = S.detach()
    state.length = problem.length()
    return join(outputs, problem, problem.v), state


def log_linear(problem: Problem) -> tuple[Tensor, State | None]:
    outputs, length = [], problem.length()
    longest = max(length.tolist(), default=0)
    state = LogLinearState.empty(problem.shape, problem.dtype, problem.device, tokens=longest)
    for head, _, (q, k, v, lam, g, beta, _) in heads_of(problem):
        position, levels = 0, {}
        if problem.state is not None:
            position = int(problem.state.length[head[0]])
            live = [i for i in range(position.bit_length()) if position >> i & 1]
            levels = {i + 1: problem.state.levels[*head, i] for i in live}
        o, final = log_linear_head(q, k, v, lam, g, beta, problem.scale, levels, position)
        outputs.append(o)
        for level, S in final.items():
            state.levels[*head, level - 1] = S.detach()
    state.length = length
    return join(outputs, problem, problem.v), state


def dynamic(problem: Problem, decided: Decided) -> tuple[Tensor, State | None]:
    made = decided.segmentation
    layout, capacity, outputs, memories = problem.layout, problem.rules.capacity, [], memories_of(problem)
    flat = [layout.flat(x) for x in (made.score, made.boundary, made.merged)]
    for head, part, (q, k, v, lam, g, beta, route) in heads_of(problem):
        given = list(zip(*(x[part, head[1]].tolist() for x in flat), strict=True))
        outputs.append(attend_head(q, k, v, lam, g, beta, route, problem, memories[head], given))
    o = join(outputs, problem, problem.v)
    if not problem.wants_state:
        return o, None
    return o, tokens_after(problem, made) if capacity is None else matrices_after(problem, memories, capacity)


def memories_of(problem: Problem) -> dict[tuple[int, int], list[Slot]]:
    """The carried states of every sequence and head."""
    N, H, _, _ = problem.shape
    if (state := problem.state) is None:
        return {(n, h): [] for n in range(N) for h in range(H)}
    S, count, info, size = state.dense(), state.counts.tolist(), state.info.tolist(), state.size.tolist()
    keys = S[..., 0] if state.keys is None else state.keys  # [N, H, K, dk], of no use unless routed
    return {
        (n, h): [Slot(S[n, h, i], count[n][h][i], info[n][h][i], keys[n, h, i]) for i in range(size[n][h])]
        for n in range(N)
        for h in range(H)
    }


def matrices_after(problem: Problem, memories: dict[tuple[int, int], list[Slot]], capacity: int) -> DynamicState:
    N, H, dk, dv = problem.shape
    matrices = torch.zeros(N, H, capacity, dk, dv, dtype=problem.dtype, device=problem.device)
    count = torch.zeros(N, H, capacity, dtype=torch.int64, device=problem.device)
    info, keys = count.double(), torch.zeros_like(matrices[..., 0])
    for head, memory in memories.items():
        for i, slot in enumerate(memory):
            where = (*head, i)
            matrices[where], keys[where] = slot.S.detach(), slot.keys.detach()
            count[where], info[where] = slot.count, slot.info
    return DynamicState.of_matrices(matrices, count, info, keys if problem.routed else None, problem.length(), capacity)


@torch.no_grad()
def tokens_after(problem: Problem, made: Segmentation) -> DynamicState:
    """Every token seen, its key after all later transitions: one sequence at a time, token by token."""
    layout, state = problem.layout, problem.state
    if state is None:
        state = DynamicState.empty(problem.shape, None, problem.routed, problem.dtype, problem.device)
    states = []
    for n, start in enumerate(layout.offsets):
        states.append(state.select([n]))
        for t in range(start, start + layout.lengths[n]):
            one: dict[str, Any] = {
                name: None if x is None else layout.flat(x)[None, t : t + 1]
                for name, x in zip(OPERANDS, problem.operands(), strict=True)
            }
            token = Token.of(replace(problem, **one))
            score, opens = (layout.flat(x)[None, t] for x in (made.score, made.boundary))
            none = torch.full_like(opens, -1, dtype=torch.int64)
            advance(states[-1], token, problem.rules, Decision(score, opens, none))
    return DynamicState.cat(states) if states else state.clone()
