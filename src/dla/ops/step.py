"""One token: the dynamic memory's step on a carried state, all heads at once. Decoding, and the scan in torch."""

import torch
from torch import Tensor

from dla.ops.decide import cheapest_pair, information, pair_costs, safe_norm, unit
from dla.ops.routing import direction
from dla.ops.rules import FIRST_SCORE, Rules
from dla.ops.state import DynamicState

Decision = tuple[Tensor, Tensor, Tensor]  # score, boundary, merged, each [N, H]


def advance(
    state: DynamicState,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    rules: Rules,
    given: Decision | None = None,
    active: Tensor | None = None,
) -> Decision:
    """Take one token into ``state``, in place: k [N, H, dk], v [N, H, dv], g, beta [N, H].

    Sequences that are not ``active`` [N] stay as they are; their k, v, g and beta must be zero.
    """
    N, H = state.size.shape
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    g, beta = (None if x is None else x.flatten() for x in (g, beta))
    S, order, size = _rows(state.matrices), _rows(state.order), state.size.view(-1)
    heads = torch.arange(N * H, device=k.device)
    lives = torch.ones_like(size, dtype=torch.bool) if active is None else active.repeat_interleave(H)

    score, boundary = _decide(state, k, v, beta, rules) if given is None else (given[0].flatten(), given[1].flatten())
    boundary = boundary & lives
    move(S, k, g, beta)
    if given is None:
        merged = _choose_pair(state, boundary & (size == order.shape[1]), rules.merge)
    else:
        merged = given[2].flatten()
    if bool((merged >= 0).any()):
        _merge(state, merged)

    at = torch.where(boundary, size, size - 1).clamp_min(0)  # free rows stand in `order` after the live ones
    row = order[heads, at]
    S[heads, row] += k[:, :, None] * (v if beta is None else beta[:, None] * v)[:, None]
    _rows(state.count)[heads, row] += lives.long()
    _rows(state.info)[heads, row] += torch.where(lives, score, 0).to(state.info.dtype)
    if state.key_sums is not None:
        _rows(state.key_sums)[heads, row] += k
    size += boundary.long()
    state.length += 1 if active is None else active.long()
    return score.view(N, H), boundary.view(N, H), merged.view(N, H)


def move(S: Tensor, k: Tensor, g: Tensor | None, beta: Tensor | None) -> None:
    """The transition of every state, in place: S [..., rows, dk, dv], k [..., dk], g, beta [...]."""
    if beta is not None:
        S.sub_((beta[..., None] * k)[..., None, :, None] * (k[..., None, None, :] @ S))
    if g is not None:
        S.mul_(g.exp()[..., None, None, None])


def _decide(state: DynamicState, k: Tensor, v: Tensor, beta: Tensor | None, rules: Rules) -> tuple[Tensor, Tensor]:
    """Score and boundary of every head [N * H]."""
    size = state.size.view(-1)
    heads = torch.arange(len(size), device=k.device)
    current = _rows(state.matrices)[heads, _rows(state.order)[heads, (size - 1).clamp_min(0)]]
    norm_k, norm_v = safe_norm(k), safe_norm(v)
    product = ((unit(k, norm_k)[:, None] @ current)[:, 0] * unit(v, norm_v)).sum(-1)
    score = information(product, norm_k, norm_v, beta, safe_norm(current, dims=2), rules.score)
    score = torch.where(size == 0, FIRST_SCORE, score)
    if rules.block is None:
        return score, (score >= rules.tau) | (size == 0)
    return score, (state.length % rules.block == 0).repeat_interleave(state.size.shape[1]) | (size == 0)


def _choose_pair(state: DynamicState, full: Tensor, rule: str) -> Tensor:
    """The pair to merge in the heads that are ``full`` [N * H], -1 in the others."""
    none = torch.full(full.shape, -1, dtype=torch.int64, device=full.device)
    if not bool(full.any()):
        return none
    order = _rows(state.order)
    heads = torch.arange(len(full), device=full.device)[:, None]
    ordered = None if rule == "density" else _rows(state.matrices)[heads, order]
    cost = pair_costs(_rows(state.count)[heads, order], _rows(state.info)[heads, order], ordered, rule)
    return torch.where(full, cheapest_pair(cost), none)


def _rows(x: Tensor) -> Tensor:
    """[N, H, ...] -> [N * H, ...], always a view: writes must reach the state."""
    return x.view(-1, *x.shape[2:])


def _merge(state: DynamicState, pair: Tensor) -> None:
    """Merge states ``pair`` and ``pair + 1`` [N * H] of the heads where it is not -1, and free the second's row."""
    order, size = _rows(state.order), state.size.view(-1)
    index = torch.arange(order.shape[1], device=order.device)
    heads = (pair >= 0).nonzero()[:, 0]
    pair = pair[heads, None]
    kept, freed = order[heads, pair[:, 0]], order[heads, pair[:, 0] + 1]
    for x in (state.matrices, state.count, state.info, state.key_sums):
        if x is not None:
            rows = _rows(x)
            rows[heads, kept] += rows[heads, freed]
            rows[heads, freed] = 0
    shifted = order[heads].gather(1, (index + (index > pair)).clamp_max(index[-1]))
    # the freed row goes behind the live ones; what stood there (all slots are live when full) is overwritten
    last = size[heads, None] - 1
    shifted = torch.where(index == last, freed[:, None], torch.where(index > last, order[heads], shifted))
    order[heads] = shifted
    size[heads] -= 1


def read(state: DynamicState, q: Tensor, lam: Tensor, route: Tensor | None, slot_order: str, scale: float) -> Tensor:
    """The output [N, H, dv] of queries q [N, H, dk] with lam [N, H, slots], route [N, H]."""
    N, H = state.size.shape
    S, order, size = state.matrices.flatten(0, 1), state.order.flatten(0, 1), state.size.flatten()
    q, lam = q.flatten(0, 1), lam.flatten(0, 1)
    index = torch.arange(order.shape[1], device=q.device)
    slot = index.expand_as(order) if slot_order == "chronological" else size[:, None] - 1 - index
    weight = lam.gather(1, slot.clamp(0, lam.shape[1] - 1))
    weight = torch.zeros_like(weight).scatter(1, order, torch.where(index < size[:, None], weight, 0))  # by row
    if route is not None and state.key_sums is not None:
        cos = (direction(state.key_sums.flatten(0, 1)) @ direction(q)[:, :, None])[..., 0]
        weight = weight * (route.flatten()[:, None] * (cos - 1)).exp()
    values = (q[:, None, None] @ S)[:, :, 0]  # [M, K, dv]
    return (scale * (weight[:, None] @ values)[:, 0]).unflatten(0, (N, H))
