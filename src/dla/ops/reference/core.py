"""The dynamic memory of one head, one token at a time, with the hard gate: the definition in the order of the paper.

Layout: q, k [T, dk]; v [T, dv]; lam [T, slots]; g, beta [T] or None. Everything is computed in the dtype it comes in
and is differentiable by autograd; decisions, the state inside a score and the memory at the beginning are constants.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dla.ops.reference.rules import COSTS, INFORMATION, cheapest_pair
from dla.ops.rules import FIRST_SCORE, Rules, SlotOrder


@dataclass
class Slot:
    """One state of the memory."""

    S: Tensor  # [dk, dv] the sum of its tokens, each after all transitions since
    count: int
    info: float  # sum of its tokens' scores
    keys: Tensor  # [dk] sum of its tokens' keys, for routed reads

    def __add__(self, other: "Slot") -> "Slot":
        return Slot(self.S + other.S, self.count + other.count, self.info + other.info, self.keys + other.keys)


@dataclass
class Step:
    """What was decided about one token."""

    token: Tensor  # [dk, dv]
    score: Tensor  # differentiable in k_t and v_t (and beta_t)
    boundary: bool
    merged: int = -1  # lower index of the pair that made room


def transition(S: Tensor, k: Tensor, g: Tensor | None, beta: Tensor | None) -> Tensor:
    """A_t S with A_t = exp(g) (I - beta k k^T)."""
    if beta is not None:
        S = S - beta * torch.outer(k, k @ S)
    return S if g is None else g.exp() * S


def write(k: Tensor, v: Tensor, beta: Tensor | None) -> Tensor:
    """The token's own state."""
    return torch.outer(k, v) if beta is None else beta * torch.outer(k, v)


def at(x: Tensor | None, t: int) -> Tensor | None:
    return None if x is None else x[t]


def remember(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    memory: list[Slot],
    rules: Rules,
    given: list[tuple[float, bool, int]] | None = None,
) -> Iterator[Step]:
    """Take the tokens into ``memory``, oldest state first, one at a time; ``given`` are decisions to follow."""
    position = sum(slot.count for slot in memory)  # of the next token, from the start of its sequence
    for t in range(k.shape[0]):
        k_t, v_t, g_t, beta_t = k[t], v[t], at(g, t), at(beta, t)
        token = write(k_t, v_t, beta_t)

        # 1. score against the current state, 2. boundary
        step = Step(token, token.new_tensor(FIRST_SCORE), True)
        if memory:
            step.score = INFORMATION[rules.score](token, memory[-1].S.detach())
            step.boundary = bool(step.score >= rules.tau) if rules.block is None else position % rules.block == 0
        info = step.score.item()
        if given is not None:
            info, step.boundary, step.merged = given[t]

        # 3. transition of every state
        for slot in memory:
            slot.S = transition(slot.S, k_t, g_t, beta_t)

        # 4. join the current state, or make room and open a new one
        new = Slot(token, 1, info, k_t)
        if step.boundary:
            if given is None and len(memory) == rules.capacity:
                step.merged = cheapest_pair([COSTS[rules.merge](a, b) for a, b in pairwise(memory)])
            if (i := step.merged) >= 0:
                memory[i : i + 2] = [memory[i] + memory[i + 1]]
            memory.append(new)
        else:
            memory[-1] = memory[-1] + new
        position += 1
        yield step


def read(q_t: Tensor, states: list[Tensor], weights: list[Tensor]) -> Tensor:
    """5. The states, each with its weight."""
    return sum((w * (q_t @ S) for w, S in zip(weights, states, strict=True)), q_t.new_zeros(states[0].shape[1]))


def slot_weights(lam_t: Tensor, size: int, slot_order: SlotOrder) -> list[Tensor]:
    """The weight of every state, oldest first."""
    slots = {"chronological": range(size), "recency": range(size - 1, -1, -1)}[slot_order]
    return [lam_t[min(i, len(lam_t) - 1)] for i in slots]
