"""The scan in torch: ``advance`` token by token, all sequences and heads at once."""

from dataclasses import replace

import torch
from torch import Tensor

from dla.ops.decide.decided import Decided, Seen
from dla.ops.decide.scores import safe_norm, unit
from dla.ops.decide.step import Decision, Token, advance
from dla.ops.problem import Problem
from dla.ops.segmentation import Segmentation
from dla.ops.state import DynamicState


@torch.no_grad()
def decide(problem: Problem) -> Decided:
    """Decide every step of every sequence, or follow the given decisions to see what the soft gate needs."""
    layout, rules, given = problem.layout, problem.rules, problem.given
    operands = [None if x is None else layout.flat(x).to(problem.dtype) for x in
                (problem.k, problem.v, problem.g, problem.beta)]  # fmt: skip
    if given is None:
        score = problem.v.new_zeros(layout.batch * layout.time, problem.v.shape[2], dtype=problem.dtype)
        boundary = torch.zeros_like(score, dtype=torch.bool)
    else:
        score, boundary = layout.flat(given.score), layout.flat(given.boundary)
    merged = torch.full_like(boundary, -1, dtype=torch.int64)
    seen = Seen.empty(operands[0], operands[1]) if problem.soft else None  # type: ignore[arg-type]
    if given is not None or rules.capacity is None:  # only the current state matters, and two slots keep it apart
        rules = replace(rules, capacity=2, merge="density")
    assert rules.capacity is not None
    state = _scratch(problem, rules.capacity)
    offset = torch.tensor(layout.offsets, dtype=torch.int64, device=problem.device)
    length = torch.tensor(layout.lengths, dtype=torch.int64, device=problem.device)
    for t in range(max(layout.lengths, default=0)):
        active = length > t
        at, now = torch.where(active, offset + t, 0), (offset + t)[active]
        k, v, g, beta = (None if x is None else _masked(x[at], active) for x in operands)
        token = Token(k.repeat_interleave(problem.group, 1), v, g, beta)  # type: ignore[union-attr, arg-type]
        if seen is not None:
            _look(seen, state, token, now, active)
        follow = None
        if given is not None:
            opens = boundary[at] & active[:, None]
            follow = Decision(score[at], opens, torch.where(opens & (state.size == 2), 0, -1))
        decision = advance(state, token, rules, follow, active)
        if given is None:
            for store, x in ((score, decision.score), (boundary, decision.boundary), (merged, decision.merged)):
                store[now] = x[active]
    if given is not None:
        return Decided(given, seen)
    if problem.rules.capacity is None:
        merged.fill_(-1)
    score, boundary, merged = (layout.unflat(x) for x in (score, boundary, merged))
    counts = None if problem.state is None else problem.state.counts
    lengths = layout.lengths if layout.packed else None
    return Decided(Segmentation.from_merges(score, boundary, merged, lengths, counts), seen)


def _scratch(problem: Problem, capacity: int) -> DynamicState:
    """A memory to work on, with as much of the carried one as decisions need."""
    state: DynamicState | None = problem.state
    if state is None:
        return DynamicState.empty(problem.shape, capacity, False, problem.dtype, problem.device)
    return state.clone() if state.capacity == capacity else state.current_only(capacity)


def _masked(x: Tensor, active: Tensor) -> Tensor:
    """x [N, ...], zero for the sequences that have ended."""
    return x.masked_fill(~active.view(-1, *[1] * (x.dim() - 1)), 0)


def _look(seen: Seen, state: DynamicState, token: Token, now: Tensor, active: Tensor) -> None:
    S = state.held.current()
    seen.state_k[now] = (unit(token.k, safe_norm(token.k))[:, :, None] @ S)[:, :, 0][active]
    seen.state_v[now] = (S @ unit(token.v, safe_norm(token.v))[..., None])[..., 0][active]
    seen.norm[now] = safe_norm(S, dims=2)[active]
