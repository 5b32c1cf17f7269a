"""The two baselines of one head, one token at a time, in the layout of ``core.py``."""

import torch
from torch import Tensor

from dla.ops.reference.core import at, transition, write
from dla.ops.reference.extended import stacked


def log_linear_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float,
    levels: dict[int, Tensor],
    position: int,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Log-linear attention: outputs [T, dv] and the Fenwick levels that the next token will see."""
    levels, outputs = dict(levels), []
    for t in range(k.shape[0]):
        levels = {level: transition(S, k[t], at(g, t), at(beta, t)) for level, S in levels.items()}
        levels[0] = write(k[t], v[t], at(beta, t))
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
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, scale: float, S: Tensor
) -> tuple[Tensor, Tensor]:
    """Linear attention with one state: outputs [T, dv] and the state."""
    outputs = []
    for t in range(k.shape[0]):
        S = transition(S, k[t], at(g, t), at(beta, t)) + write(k[t], v[t], at(beta, t))
        outputs.append(scale * (q[t] @ S))
    return stacked(outputs, v), S
