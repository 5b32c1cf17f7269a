"""Decoding: one token a sequence, on the carried state itself."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.layout import Layout, compute_dtype
from dla.ops.rules import Rules
from dla.ops.state import DynamicState, LinearState, LogLinearState, State, TokenState
from dla.ops.step import Decision, advance, move, read


@dataclass
class Token:
    """One token of every sequence, for every head: [N, H, ...] in the dtype of the states."""

    q: Tensor
    k: Tensor
    v: Tensor
    lam: Tensor | None = None
    g: Tensor | None = None
    beta: Tensor | None = None
    route: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, **others: Tensor | None) -> "Token":
        """From inputs [B, 1, H or Hk, ...]."""
        dtype, group = compute_dtype(v.dtype), v.shape[2] // k.shape[2]
        q, k = (x[:, 0].repeat_interleave(group, 1).to(dtype) for x in (q, k))
        given = {name: x[:, 0].to(dtype) for name, x in others.items() if x is not None}
        return cls(q, k, v[:, 0].to(dtype), **given)

    def write(self) -> Tensor:
        """The token's own state [N, H, dk, dv]."""
        v = self.v if self.beta is None else self.beta[..., None] * self.v
        return self.k[..., :, None] * v[..., None, :]


def is_decoding(layout: Layout, state: State | None, *inputs: Tensor | None) -> bool:
    """Whether this call is one token a sequence from a bounded state, without gradients."""
    if state is None or isinstance(state, TokenState) or layout.time != 1 or layout.packed:
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs))


def linear(token: Token, state: LinearState, scale: float) -> Tensor:
    """The output [N, 1, H, dv]; changes ``state``."""
    S = state.matrix
    move(S[:, :, None], token.k, token.g, token.beta)
    S.add_(token.write())
    state.length += 1
    return scale * (token.q[:, :, None] @ S).transpose(1, 2)


def log_linear(token: Token, state: LogLinearState, scale: float) -> Tensor:
    """The output [N, 1, H, dv]; changes ``state``."""
    assert token.lam is not None
    rows = int(state.length.max() + 1).bit_length() if state.batch else 0
    if rows > state.levels.shape[2]:
        state.levels = F.pad(state.levels, (0, 0, 0, 0, 0, rows - state.levels.shape[2]))
    S, now = state.levels, token.write()
    row = torch.arange(S.shape[2], device=S.device)
    move(S, token.k, token.g, token.beta)
    level = (row + 1).clamp_max(token.lam.shape[-1] - 1)
    values = (token.q[:, :, None, None] @ S)[:, :, :, 0]  # [N, H, L, dv]
    o = (token.lam[..., level][:, :, None] @ values)[:, :, 0] + token.lam[..., :1] * (token.q[:, :, None] @ now)[
        :, :, 0
    ]
    # seen from the next position, the token and all levels below its lowest set bit are one block
    state.length += 1
    below = (state.length[:, None] & ((2 << row) - 1)) == 0  # [N, L] bits up to this one are zero
    top = below.sum(1)
    reach = int(top.max()) if state.batch else 0
    closed, joins = S[:, :, :reach], below[:, None, :reach, None, None]
    block = now + torch.where(joins, closed, 0).sum(2)
    closed.masked_fill_(joins, 0)
    S[torch.arange(state.batch, device=S.device), :, top] = block
    return scale * o[:, None]


def dynamic(
    token: Token, state: DynamicState, scale: float, *, rules: Rules, slot_order: str, given: Decision | None
) -> Tensor:
    """The output [N, 1, H, dv]; changes ``state``."""
    assert token.lam is not None
    advance(state, token.k, token.v, token.g, token.beta, rules, given)
    return read(state, token.q, token.lam, token.route, slot_order, scale)[:, None]
