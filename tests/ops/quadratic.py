"""The three operators a second time, as masks over QK^T: slow, float64, and unlike a recurrence.

Every operator here is ``o = scale * (P * Lambda) V`` with two explicit T x T matrices per head:

    P[t, s]      = q_t^T (A_t A_{t-1} ... A_{s+1}) w_s,   w_s = beta_s k_s (or k_s), from a table of dense products
    Lambda[t, s] = the weight with which step t reads the slot that holds token s

``decide`` takes the boundaries and merges from states that are summed up from their tokens at every step, and from the
RMSNorm form of the score. Nothing is carried from one step to the next but which token belongs to which state.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Decisions:
    """What ``segment`` returns, and the costs among which each merge was chosen, by (batch, time, head)."""

    score: Tensor  # [B, T, H]
    boundary: Tensor  # [B, T, H] bool
    merged: Tensor  # [B, T, H] int64, -1 for none
    costs: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)


class HeldState(NamedTuple):
    """One state of a memory, summed up from its tokens."""

    matrix: Tensor  # [dk, dv]
    count: int
    score: float
    keys: Tensor  # [dk]


class Head(NamedTuple):
    """The inputs of one head of one sequence, float64."""

    q: Tensor | None  # [T, dk]
    k: Tensor  # [T, dk]
    v: Tensor  # [T, dv]
    g: Tensor | None  # [T]
    beta: Tensor | None  # [T]

    @property
    def write(self) -> Tensor:
        """w_s, the left factor of the token state w_s v_s^T: [T, dk]."""
        return self.k if self.beta is None else self.beta[:, None] * self.k


# --- decisions -------------------------------------------------------------------------------------------------------


def decide(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    tau: float = 0.6,
    capacity: int | None = 30,
    merge: str = "density",
    score: str = "token",
    block: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Decisions:
    """Scores, boundaries and merges, [B, T, H] each."""
    batch, time, heads = v.shape[:3]
    found = Decisions(
        torch.zeros(batch, time, heads, dtype=torch.float64),
        torch.zeros(batch, time, heads, dtype=torch.bool),
        torch.full((batch, time, heads), -1),
    )
    with torch.no_grad():
        for b, start, end, h in _heads(v, cu_seqlens):
            head = _head(None, k, v, g, beta, b, start, end, h)
            for t, (info, boundary, merged, costs) in enumerate(_decide(head, tau, capacity, merge, score, block)):
                found.score[b, start + t, h] = info
                found.boundary[b, start + t, h] = boundary
                found.merged[b, start + t, h] = merged
                if merged >= 0:
                    found.costs[b, start + t, h] = costs
    return found


def _decide(
    head: Head, tau: float, capacity: int | None, merge: str, score: str, block: int | None
) -> Iterator[tuple[float, bool, int, list[float]]]:
    products, scores = _products(head), []
    memory: list[list[int]] = []  # the tokens of every state, oldest first
    for t in range(len(head.k)):
        info = math.sqrt(2) if t == 0 else float(_information(head, products, memory[-1], t, score))
        scores.append(info)
        boundary = t == 0 or (info >= tau if block is None else t % block == 0)
        merged, costs = -1, []
        if boundary:
            if len(memory) == capacity:
                costs = _costs(head, products, memory, scores, t, merge)
                merged = _cheapest(costs)
                memory[merged : merged + 2] = [memory[merged] + memory[merged + 1]]
            memory.append([t])
        else:
            memory[-1].append(t)
        yield info, boundary, merged, costs


def _information(head: Head, products: Tensor, current: list[int], t: int, score: str) -> Tensor:
    """The score of token t against the state of the tokens ``current`` as it stood after step t - 1.

    Differentiable in token t alone, and not where 1 - cos = I^2 / 2 < 1e-6.
    """
    token = torch.outer(head.write[t], head.v[t])
    if not token.any():
        return token.new_zeros(())
    state = _state(head, products, current, t - 1).detach()
    new = token if score == "token" else state + token
    if not state.any() or not new.any():
        return token.new_tensor(math.sqrt(2))  # cos = 0
    difference = _rms_norm(new) - _rms_norm(state)
    if difference.detach().norm() ** 2 / state.numel() / 2 < 1e-6:
        difference = difference.detach()
    return difference.norm() / _rms_norm(state).norm()


def _rms_norm(x: Tensor) -> Tensor:
    x = x / x.detach().abs().max()  # keeps tiny matrices from vanishing when squared
    return x / x.square().mean().sqrt()


def _costs(
    head: Head, products: Tensor, memory: list[list[int]], scores: list[float], t: int, merge: str
) -> list[float]:
    states = [_state(head, products, tokens, t) for tokens in memory]
    costs = []
    for i in range(len(memory) - 1):
        (a, b), (n, m) = states[i : i + 2], map(len, memory[i : i + 2])
        if merge == "density":
            cost = sum(scores[s] for s in memory[i] + memory[i + 1]) / (n + m)
        elif merge == "similarity":
            cost = -float((_rms_norm(a) * _rms_norm(b)).mean()) if a.any() and b.any() else 0.0
        else:
            cost = n * m / (n + m) * float((a / n - b / m).square().sum())
        costs.append(cost)
    return costs


def _cheapest(costs: list[float]) -> int:
    limit = min(costs) + 1e-6 * max(map(abs, costs))
    return next(i for i, cost in enumerate(costs) if cost <= limit)


# --- states from their tokens ----------------------------------------------------------------------------------------


def _products(head: Head) -> Tensor:
    """M[t, s] = A_t A_{t-1} ... A_{s+1}: the identity for s = t, zero for s > t. [T, T, dk, dk]"""
    time, dk = head.k.shape
    eye = torch.eye(dk, dtype=torch.float64)
    a = eye.expand(time, dk, dk)
    if head.beta is not None:
        a = a - head.write[:, :, None] * head.k[:, None, :]
    if head.g is not None:
        a = a * head.g.exp()[:, None, None]
    columns: list[Tensor] = []
    for s in reversed(range(time)):
        below = columns[-1][s + 1 :] @ a[s + 1] if columns else eye.new_zeros(0, dk, dk)
        columns.append(torch.cat([eye.new_zeros(s, dk, dk), eye[None], below]))
    return torch.stack(columns[::-1], dim=1) if columns else eye.new_zeros(0, 0, dk, dk)


def _state(head: Head, products: Tensor, tokens: list[int], t: int) -> Tensor:
    """The sum over the tokens of A_t ... A_{s+1} w_s v_s^T: [dk, dv]"""
    return torch.einsum("sij,sj,sv->iv", products[t, tokens], head.write[tokens], head.v[tokens])


def starts_after(boundary: Tensor, merged: Tensor) -> Iterator[list[int]]:
    """For every step of one head ([T] each), the first tokens of the states alive after it, oldest first."""
    starts: list[int] = []
    for t, (opened, pair) in enumerate(zip(boundary.tolist(), merged.tolist(), strict=True)):
        if pair >= 0:
            del starts[pair + 1]
        if opened:
            starts.append(t)
        yield list(starts)


def spans_after(boundary: Tensor, merged: Tensor) -> Iterator[list[tuple[int, int]]]:
    """For every step of one head, the (start, end) of the states alive after it, oldest first, end exclusive."""
    for t, starts in enumerate(starts_after(boundary, merged)):
        yield list(zip(starts, [*starts[1:], t + 1], strict=True))


def final_states(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    decisions: Decisions,
    cu_seqlens: Tensor | None = None,
) -> dict[tuple[int, int], list[HeldState]]:
    """The memory after the last step, by (sequence, head)."""
    sequences = _sequences(v, cu_seqlens)
    held = {}
    for n, (b, start, end) in enumerate(sequences):
        for h in range(v.shape[2]):
            head = _head(None, k, v, g, beta, b, start, end, h)
            products = _products(head)
            where = (b, slice(start, end), h)
            *_, spans = [], *spans_after(decisions.boundary[where], decisions.merged[where])
            held[n, h] = [
                HeldState(
                    _state(head, products, list(range(*span)), end - start - 1),
                    span[1] - span[0],
                    float(decisions.score[where][slice(*span)].sum()),
                    head.k[slice(*span)].sum(0),
                )
                for span in spans
            ]
    return held


def final_levels(
    k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, cu_seqlens: Tensor | None = None
) -> dict[tuple[int, int], dict[int, Tensor]]:
    """The log-linear memory after the last step, by (sequence, head): what the step to come reads, by level."""
    held = {}
    for n, (b, start, end) in enumerate(_sequences(v, cu_seqlens)):
        for h in range(v.shape[2]):
            head, time = _head(None, k, v, g, beta, b, start, end, h), end - start
            products, levels = _products(head), {}
            for level in {(time ^ s).bit_length() for s in range(time)}:
                tokens = [s for s in range(time) if (time ^ s).bit_length() == level]
                levels[level] = _state(head, products, tokens, time - 1)
            held[n, h] = levels
    return held


# --- operators -------------------------------------------------------------------------------------------------------


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """[B, T, H, dv], every token read with weight one."""
    outputs = {}
    for where in _heads(v, cu_seqlens):
        head = _head(q, k, v, g, beta, *where)
        outputs[where] = _read(head, torch.ones(len(head.k), len(head.k), dtype=torch.float64).tril(), scale)
    return _assemble(outputs, v)


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """[B, T, H, dv], token s read from t with lam[t, bit_length(t xor s)]."""
    outputs = {}
    for where in _heads(v, cu_seqlens):
        b, start, end, h = where
        steps = torch.arange(end - start)
        level = (steps[:, None] ^ steps).to(torch.float64)
        level = torch.where(level > 0, torch.floor(torch.log2(level.clamp(min=1))) + 1, 0).long()
        weights = lam[b, start:end, h].double().gather(1, level.clamp(max=lam.shape[-1] - 1)).tril()
        outputs[where] = _read(_head(q, k, v, g, beta, *where), weights, scale)
    return _assemble(outputs, v)


def dynamic_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    tau: float = 0.6,
    capacity: int | None = 30,
    merge: str = "density",
    score: str = "token",
    slot_order: str = "chronological",
    block: int | None = None,
    route: Tensor | None = None,
    temperature: float | None = None,
    scale: float | None = None,
    segmentation: Decisions | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """[B, T, H, dv]. Gradients flow as SPEC.md says, through the soft gate's score too."""
    if segmentation is None:
        rules = {"tau": tau, "capacity": capacity, "merge": merge, "score": score, "block": block}
        segmentation = decide(k, v, g, beta, cu_seqlens=cu_seqlens, **rules)
    if route is not None:
        route = route.double().expand(v.shape[:3])
    outputs = {}
    for where in _heads(v, cu_seqlens):
        b, start, end, h = where
        at = (b, slice(start, end), h)
        head = _head(q, k, v, g, beta, *where)
        starts = list(starts_after(segmentation.boundary[at], segmentation.merged[at]))
        gate = segmentation.boundary[at].double()
        if temperature is not None and block is None:
            gate = _gate(head, starts, score, tau, temperature)
        slots = _slot_weights(head, lam[at].double(), starts, slot_order, None if route is None else route[at])
        weights = _weights(slots, starts, segmentation.boundary[at], gate, hard=temperature is None)
        outputs[where] = _read(head, weights, scale)
    return _assemble(outputs, v)


def _gate(head: Head, starts: list[list[int]], score: str, tau: float, temperature: float) -> Tensor:
    """p_t = sigmoid((I_t - tau) / temperature), p_0 = 1: [T]"""
    products = _products(head).detach()
    gates = [head.k.new_ones(())] if len(head.k) else []
    for t in range(1, len(head.k)):
        info = _information(head, products, list(range(starts[t - 1][-1], t)), t, score)
        gates.append(torch.sigmoid((info - tau) / temperature))
    return torch.stack(gates) if gates else head.k.new_zeros(0)


def _slot_weights(
    head: Head, lam: Tensor, starts: list[list[int]], slot_order: str, route: Tensor | None
) -> list[Tensor]:
    """For every step the weight of every state alive after it, oldest first."""
    weights = []
    for t, alive in enumerate(starts):
        slot = torch.arange(len(alive))
        if slot_order == "recency":
            slot = len(alive) - 1 - slot
        weight = lam[t, slot.clamp(max=lam.shape[-1] - 1)]
        if route is not None:
            keys = torch.stack([head.k[a:b].sum(0) for a, b in zip(alive, [*alive[1:], t + 1], strict=True)])
            weight = weight * torch.exp(route[t] * (_hat(keys) @ _hat(head.q[t]) - 1))
        weights.append(weight)
    return weights


def _hat(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)


def _weights(slots: list[Tensor], starts: list[list[int]], boundary: Tensor, gate: Tensor, hard: bool) -> Tensor:
    """Lambda: [T, T]. The soft sentence: (1 - p_s) of the segment that was current just before step s, plus p_s of the
    first segment opened at or after s, or of the current one if none has been opened up to t."""
    time, rows = len(slots), []
    for t in range(time):
        tokens = range(t + 1)
        own = slots[t][[bisect_right(starts[t], s) - 1 for s in tokens]]
        if not hard:
            before = own[[max(s - 1, 0) for s in tokens]]
            opened = [next((u for u in range(s, t + 1) if boundary[u]), t) for s in tokens]
            own = (1 - gate[: t + 1]) * before + gate[: t + 1] * own[opened]
        rows.append(torch.cat([own, own.new_zeros(time - t - 1)]))
    return torch.stack(rows) if rows else gate.new_zeros(0, 0)


def _read(head: Head, weights: Tensor, scale: float | None) -> Tensor:
    """scale * (P * Lambda) V: [T, dv]"""
    coefficients = torch.einsum("ti,tsij,sj->ts", head.q, _products(head), head.write)
    return (head.k.shape[1] ** -0.5 if scale is None else scale) * (coefficients * weights) @ head.v


# --- layout ----------------------------------------------------------------------------------------------------------


def _sequences(v: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(batch, start, end) of every sequence, packed or not."""
    if cu_seqlens is None:
        return [(b, 0, v.shape[1]) for b in range(v.shape[0])]
    edges = cu_seqlens.tolist()
    return [(0, start, end) for start, end in pairwise(edges)]


def _heads(v: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int, int, int]]:
    """(batch, start, end, head) of every head of every sequence."""
    return [(*sequence, h) for sequence in _sequences(v, cu_seqlens) for h in range(v.shape[2])]


def _head(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    b: int,
    start: int,
    end: int,
    h: int,
) -> Head:
    group = h // (v.shape[2] // k.shape[2])

    def cut(x: Tensor | None, index: int) -> Tensor | None:
        return None if x is None else x[b, start:end, index].double()

    return Head(cut(q, group), cut(k, group), cut(v, h), cut(g, h), cut(beta, h))


def _assemble(outputs: dict[tuple[int, int, int, int], Tensor], v: Tensor) -> Tensor:
    """[B, T, H, dv] from the pieces of every head of every sequence."""
    rows: dict[tuple[int, int], list[Tensor]] = {(b, h): [] for b in range(v.shape[0]) for h in range(v.shape[2])}
    for (b, _, _, h), piece in outputs.items():
        rows[b, h].append(piece)
    if not rows or not v.shape[1]:
        return v.double()
    heads = [torch.stack([torch.cat(rows[b, h]) for h in range(v.shape[2])], dim=1) for b in range(v.shape[0])]
    return torch.stack(heads)
