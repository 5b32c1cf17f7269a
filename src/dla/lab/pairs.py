"""What all pairs of tokens have to do with each other: linear attention in quadratic form."""

import torch
from torch import Tensor

from dla.layers.memory import Operands


def pairs(q: Tensor, k: Tensor, made: Operands) -> Tensor:
    """[B, H, T, T] how much of value s a query at t reads through the transitions in between, all in one state."""
    time = q.shape[2]
    lower = torch.ones(time, time, device=q.device, dtype=torch.bool).tril()
    total = torch.zeros_like(q[..., 0]) if made.g is None else made.g.transpose(1, 2).double().cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp().to(q.dtype)
    scores = (q @ k.transpose(-1, -2)) * decay
    if made.beta is None:
        return scores
    beta = made.beta.transpose(1, 2)
    among = beta[..., None] * (k @ k.transpose(-1, -2)) * decay
    system = among.tril(-1) + torch.eye(time, device=q.device, dtype=q.dtype)
    return torch.linalg.solve_triangular(system, scores, upper=False, left=False) * beta[..., None, :]


def unit(x: Tensor) -> Tensor:
    """x over max(its norm, 1e-6)"""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)
