"""The third stage, in torch: one token a sequence, on the carried state itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.decide.step import Decision, Token, advance
from dla.ops.problem import Problem
from dla.ops.state import DynamicState, LinearState, LogLinearState, State
from dla.ops.state.base import move
from dla.ops.weights import read_weights


def decode(problem: Problem) -> tuple[Tensor, State]:
    """The output [N, 1, H, dv] and the state after it, which is the given one if it may be changed."""
    state = problem.state if problem.inplace else problem.state.clone()
    token = Token.of(problem)
    if problem.memory == "single":
        o = linear(token, state)
    elif problem.memory == "log_linear":
        o = log_linear(token, state)
    else:
        o = dynamic(token, state, problem)
    return (problem.scale * o)[:, None].to(problem.v.dtype), state


def linear(token: Token, state: LinearState) -> Tensor:
    """[N, H, dv]; changes ``state``."""
    assert token.q is not None
    S = state.matrix
    move(S[:, :, None], token.k, token.g, token.beta)
    S.add_(token.k[..., :, None] * token.written[..., None, :])
    state.length += 1
    return (token.q[:, :, None] @ S)[:, :, 0]


def log_linear(token: Token, state: LogLinearState) -> Tensor:
    """[N, H, dv]; changes ``state``."""
    assert token.lam is not None and token.q is not None
    rows = int(state.length.max() + 1).bit_length() if state.batch else 0
    if rows > state.levels.shape[2]:
        state.levels = F.pad(state.levels, (0, 0, 0, 0, 0, rows - state.levels.shape[2]))
    S, now = state.levels, token.k[..., :, None] * token.written[..., None, :]
    row = torch.arange(S.shape[2], device=S.device)
    move(S, token.k, token.g, token.beta)
    level = (row + 1).clamp_max(token.lam.shape[-1] - 1)
    values = (token.q[:, :, None, None] @ S)[:, :, :, 0]  # [N, H, L, dv]
    o = (token.lam[..., level][:, :, None] @ values)[:, :, 0]
    o = o + token.lam[..., :1] * (token.q[:, :, None] @ now)[:, :, 0]
    # seen from the next position, the token and all levels below its lowest set bit are one block
    state.length += 1
    below = (state.length[:, None] & ((2 << row) - 1)) == 0  # [N, L] bits up to this one are zero
    top = below.sum(1)
    reach = int(top.max()) if state.batch else 0
    closed, joins = S[:, :, :reach], below[:, None, :reach, None, None]
    block = now + torch.where(joins, closed, 0).sum(2)
    closed.masked_fill_(joins, 0)
    S[torch.arange(state.batch, device=S.device), :, top] = block
    return o


def dynamic(token: Token, state: DynamicState, problem: Problem) -> Tensor:
    """[N, H, dv]; changes ``state``."""
    assert token.lam is not None and token.q is not None
    given = None
    if problem.given is not None:
        made = problem.given
        given = Decision(made.score[:, 0].to(problem.dtype), made.boundary[:, 0], made.merged[:, 0])
    advance(state, token, problem.rules, given)
    states = int(state.size.max()) if state.capacity is None and state.batch else state.capacity or 0
    keys = state.keys if problem.routed else None
    weights = read_weights(token.lam, state.size, problem.slot_order, token.q, keys, token.route, states)
    return state.held.read(token.q, weights)
