"""One token of every sequence taken into a dynamic memory: score, boundary, transition, merge, write."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dla.ops.decide.merges import COSTS, cheapest_pair
from dla.ops.decide.scores import information, safe_norm, unit
from dla.ops.problem import Problem
from dla.ops.rules import FIRST_SCORE, Rules
from dla.ops.state import DynamicState


@dataclass
class Token:
    """One token of every sequence, for every head: [N, H, ...] in the dtype of the states."""

    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    q: Tensor | None = None
    lam: Tensor | None = None
    route: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem) -> "Token":
        """The only token of a decoding step."""

        def take(x: Tensor | None, group: int = 1) -> Tensor | None:
            if x is None:
                return None
            x = x[:, 0].to(problem.dtype)
            return x if group == 1 else x.repeat_interleave(group, 1)

        names = ("v", "g", "beta", "lam", "route")
        given = {name: take(getattr(problem, name)) for name in names}
        return cls(q=take(problem.q, problem.group), k=take(problem.k, problem.group), **given)  # type: ignore[arg-type]

    @property
    def written(self) -> Tensor:
        """[N, H, dv] what goes to the state beside k."""
        return self.v if self.beta is None else self.beta[..., None] * self.v


@dataclass
class Decision:
    """Of one step, each [N, H]."""

    score: Tensor
    boundary: Tensor
    merged: Tensor


def advance(
    state: DynamicState, token: Token, rules: Rules, given: Decision | None = None, active: Tensor | None = None
) -> Decision:
    """Take a token into ``state``, in place, by its own decision or a given one.

    Sequences that are not ``active`` [N] stay as they are; their k, v, g and beta must be zero.
    """
    if given is None:
        score, boundary = decide(state, token, rules)
    else:
        score, boundary = given.score, given.boundary
    lives = torch.ones_like(boundary) if active is None else active[:, None].expand_as(boundary)
    boundary = boundary & lives
    state.held.move(token.k, token.g, token.beta)
    merged = choose_pair(state, boundary, rules) if given is None else given.merged
    if bool((merged >= 0).any()):
        state.held.merge(merged)
    state.held.write(token.k, token.written, score, boundary, lives)
    return Decision(score, boundary, merged)


def decide(state: DynamicState, token: Token, rules: Rules) -> tuple[Tensor, Tensor]:
    """Score and boundary of every head [N, H]."""
    current, empty = state.held.current(), state.size == 0
    norm_k, norm_v = safe_norm(token.k), safe_norm(token.v)
    product = ((unit(token.k, norm_k)[..., None, :] @ current)[..., 0, :] * unit(token.v, norm_v)).sum(-1)
    score = information(product, norm_k, norm_v, token.beta, safe_norm(current, dims=2), rules.score)
    score = torch.where(empty, FIRST_SCORE, score)
    by_rule = score >= rules.tau if rules.block is None else (state.length % rules.block == 0)[:, None]
    return score, by_rule | empty


def choose_pair(state: DynamicState, boundary: Tensor, rules: Rules) -> Tensor:
    """The pair [N, H] to merge where a boundary meets a full memory, -1 elsewhere."""
    none = torch.full(boundary.shape, -1, dtype=torch.int64, device=boundary.device)
    full = none.bool() & False if rules.capacity is None else boundary & (state.size == rules.capacity)
    if not bool(full.any()):
        return none
    return torch.where(full, cheapest_pair(COSTS[rules.merge](state.counts, state.info, state.dense)), none)
