"""The operators, one head and one token at a time: the definition that every other backend is tested against.

Layout of the ``*_head`` functions: q, k [T, dk]; v [T, dv]; lam [T, slots]; g, beta, route [T] or None. They compute in
the dtype they are given and are differentiable by autograd; decisions, the state inside a score and the memory they
start from are constants.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from dla.ops.rules import FIRST_SCORE, FLAT, TIE, Rules


@dataclass
class Slot:
    """One state of the memory."""

    read: Tensor  # [dk, dv] what queries see (differs from `hard` under the soft gate only)
    hard: Tensor  # [dk, dv] the sum of its tokens, which scores and merge costs see
    count: int
    info: float  # sum of its tokens' scores
    keys: Tensor  # [dk] sum of its tokens' keys, for routed reads

    def __add__(self, other: "Slot") -> "Slot":
        return Slot(
            self.read + other.read,
            self.hard + other.hard,
            self.count + other.count,
            self.info + other.info,
            self.keys + other.keys,
        )


@dataclass
class Decisions:
    """What the memory decided at each step: Segmentation for one head."""

    score: list[float]
    boundary: list[bool]
    merged: list[int]


def transition(S: Tensor, k: Tensor, g: Tensor | None, beta: Tensor | None) -> Tensor:
    """A_t S with A_t = exp(g) (I - beta k k^T)."""
    if beta is not None:
        S = S - beta * torch.outer(k, k @ S)
    return S if g is None else g.exp() * S


def information(k: Tensor, v: Tensor, beta: Tensor | None, S: Tensor, kind: str) -> Tensor:
    """I_t = sqrt(2 - 2 cos), of the token against S, or of S with the token against S without it."""
    S = S.detach()
    token = torch.outer(k, v) if beta is None else beta * torch.outer(k, v)
    norm_token, norm_S = norm(token), norm(S)
    if norm_token == 0:
        return token.new_zeros(())
    left, norm_left = (token, norm_token) if kind == "token" else (S + token, norm(S + token))
    if norm_left == 0 or norm_S == 0:
        return token.new_tensor(FIRST_SCORE)
    cos = ((left / norm_left) * (S / norm_S)).sum()
    if 1 - cos < FLAT:
        cos = cos.detach()
    return (2 - 2 * cos.clamp(-1, 1)).sqrt()


def merge_costs(memory: list[Slot], rule: str) -> list[float]:
    """The cost of merging each adjacent pair."""
    costs = []
    for a, b in pairwise(memory):
        if rule == "density":
            cost = (a.info + b.info) / (a.count + b.count)
        elif rule == "similarity":
            norm_a, norm_b = norm(a.hard), norm(b.hard)
            cost = 0.0 if norm_a == 0 or norm_b == 0 else -((a.hard / norm_a) * (b.hard / norm_b)).sum().item()
        else:
            gap = norm(a.hard / a.count - b.hard / b.count).item() ** 2
            cost = gap * a.count * b.count / (a.count + b.count)
        costs.append(cost)
    return costs


def cheapest_pair(costs: list[float]) -> int:
    """The oldest pair among those that tie for the smallest finite cost."""
    finite = [c for c in costs if math.isfinite(c)]
    if not finite:
        return 0
    limit = min(finite) + TIE * max(map(abs, finite))
    return next(i for i, c in enumerate(costs) if math.isfinite(c) and c <= limit)


def dynamic_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    rules: Rules,
    slot_order: str = "chronological",
    route: Tensor | None = None,
    temperature: float | None = None,
    scale: float = 1.0,
    memory: list[Slot] | None = None,
    decisions: Decisions | None = None,
) -> tuple[Tensor, list[Slot], Decisions]:
    """Dynamic linear attention of one head: outputs [T, dv], the memory after the last step, the decisions."""
    memory = [replace(slot) for slot in memory or []]
    position = sum(slot.count for slot in memory)  # of the next token, from the start of its sequence
    pending = v.new_zeros(k.shape[1], v.shape[1])  # the soft gate's P: written, not yet in a state
    outputs, made = [], Decisions([], [], [])

    for t in range(k.shape[0]):
        k_t, v_t = k[t], v[t]
        g_t, beta_t = None if g is None else g[t], None if beta is None else beta[t]
        token = torch.outer(k_t, v_t) if beta_t is None else beta_t * torch.outer(k_t, v_t)

        # 1. score against the current state, 2. boundary
        if memory:
            score = information(k_t, v_t, beta_t, memory[-1].hard, rules.score)
            boundary = bool(score >= rules.tau) if rules.block is None else position % rules.block == 0
        else:
            score, boundary = token.new_tensor(FIRST_SCORE), True
        first, info = not memory, score.item()
        if decisions is not None:
            info, boundary = decisions.score[t], decisions.boundary[t]

        # 3. transition of every state
        for slot in memory:
            slot.read = transition(slot.read, k_t, g_t, beta_t)
            slot.hard = transition(slot.hard, k_t, g_t, beta_t).detach()
        pending = transition(pending, k_t, g_t, beta_t)

        # 4. join the current state, or make room and open a new one
        if temperature is None or rules.block is not None or first:
            p = token.new_tensor(float(boundary))
        else:
            p = ((score - rules.tau) / temperature).sigmoid()
        pending = pending + p * token
        if memory:
            memory[-1].read = memory[-1].read + (1 - p) * token
        merged = -1
        if boundary:
            if decisions is not None:
                merged = decisions.merged[t]
            elif len(memory) == rules.capacity:
                merged = cheapest_pair(merge_costs(memory, rules.merge))
            if merged >= 0:
                memory[merged : merged + 2] = [memory[merged] + memory[merged + 1]]
            memory.append(Slot(pending, token.detach(), 1, info, k_t))
            pending = torch.zeros_like(pending)
        else:
            current = memory[-1]
            current.hard = current.hard + token.detach()
            current.count, current.info, current.keys = current.count + 1, current.info + info, current.keys + k_t

        # 5. read
        o_t = torch.zeros_like(v_t)
        for i, slot in enumerate(memory):
            index = i if slot_order == "chronological" else len(memory) - 1 - i
            weight = lam[t, min(index, lam.shape[1] - 1)]
            if route is not None:
                weight = weight * (route[t] * (unit(q[t]) @ unit(slot.keys) - 1)).exp()
            S = slot.read + pending if slot is memory[-1] else slot.read
            o_t = o_t + weight * (q[t] @ S)
        outputs.append(scale * o_t)
        made.score.append(info)
        made.boundary.append(boundary)
        made.merged.append(merged)
        position += 1
    return stacked(outputs, v), memory, made


def log_linear_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    scale: float = 1.0,
    levels: dict[int, Tensor] | None = None,
    position: int = 0,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Log-linear attention of one head: outputs [T, dv] and the Fenwick levels that the next token will see."""
    levels, outputs = dict(levels or {}), []
    for t in range(k.shape[0]):
        g_t, beta_t = None if g is None else g[t], None if beta is None else beta[t]
        levels = {level: transition(S, k[t], g_t, beta_t) for level, S in levels.items()}
        levels[0] = torch.outer(k[t], v[t]) if beta_t is None else beta_t * torch.outer(k[t], v[t])
        o_t = torch.zeros_like(v[t])
        for level, S in levels.items():
            o_t = o_t + lam[t, min(level, lam.shape[1] - 1)] * (q[t] @ S)
        outputs.append(scale * o_t)
        # seen from the next position, every level up to its lowest set bit is one block
        position += 1
        top = (position & -position).bit_length()
        block = sum((levels.pop(level) for level in range(top) if level in levels), torch.zeros_like(levels[0]))
        levels[top] = block
    return stacked(outputs, v), levels


def linear_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    scale: float = 1.0,
    S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention of one head with one state: outputs [T, dv] and the state."""
    S, outputs = v.new_zeros(k.shape[1], v.shape[1]) if S is None else S, []
    for t in range(k.shape[0]):
        g_t, beta_t = None if g is None else g[t], None if beta is None else beta[t]
        S = transition(S, k[t], g_t, beta_t)
        S = S + (torch.outer(k[t], v[t]) if beta_t is None else beta_t * torch.outer(k[t], v[t]))
        outputs.append(scale * (q[t] @ S))
    return stacked(outputs, v), S


def norm(x: Tensor) -> Tensor:
    """The Frobenius norm, without overflow or underflow of the squares."""
    largest = x.detach().abs().max()
    return largest * (x / largest).norm() if 0 < largest < torch.inf else x.norm()


def unit(x: Tensor) -> Tensor:
    """x divided by max(its norm, 1e-6)."""
    return x / x.norm().clamp_min(1e-6)


def stacked(outputs: list[Tensor], v: Tensor) -> Tensor:
    return torch.stack(outputs) if outputs else v.new_zeros(0, v.shape[1])
