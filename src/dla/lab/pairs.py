"""What all pairs of tokens have to do with each other: linear attention in quadratic form."""

import torch
from torch import Tensor

from dla.layers.memory import Operands


def pairs(q: Tensor, k: Tensor, made: Operands) -> Tensor:
    """[B, H, T, T] how much of value s a query at t reads through the transitions in between, all in one state."""
    scores, decay = decayed(q, k, made)
    if made.beta is None:
        return scores
    beta = made.beta.transpose(1, 2)
    system = steps(k, beta, decay)
    return torch.linalg.solve_triangular(system, scores, upper=False, left=False) * beta[..., None, :]


def written(k: Tensor, made: Operands, decay: Tensor, together: Tensor) -> Tensor:
    """[B, H, T, dv] what each token writes, if its delta step sees only the tokens s with together[t, s]."""
    v = made.v.transpose(1, 2)
    if made.beta is None:
        return v
    beta = made.beta.transpose(1, 2)
    return torch.linalg.solve_triangular(steps(k, beta, decay * together), beta[..., None] * v, upper=False)


def steps(k: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """[B, H, T, T] I + the strictly lower part of beta_t decay k_t . k_s"""
    among = beta[..., None] * (k @ k.transpose(-1, -2)) * decay
    return among.tril(-1) + torch.eye(k.shape[2], device=k.device, dtype=k.dtype)


def decayed(q: Tensor, k: Tensor, made: Operands) -> tuple[Tensor, Tensor]:
    """[B, H, T, T] q_t . k_s times the decay since s, and that decay."""
    time = q.shape[2]
    lower = torch.ones(time, time, device=q.device, dtype=torch.bool).tril()
    total = torch.zeros_like(q[..., 0]) if made.g is None else made.g.transpose(1, 2).double().cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp().to(q.dtype)
    return (q @ k.transpose(-1, -2)) * decay, decay
