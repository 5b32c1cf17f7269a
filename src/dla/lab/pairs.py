"""Linear attention in quadratic form: what all pairs of tokens have to do with each other."""

import torch
from torch import Tensor

from dla.layers.call import Call
from dla.layers.memory import Operands


def of_every_head(made: Operands, call: Call) -> tuple[Tensor, Tensor]:
    """q and k [B, H, T, dk] of a call that pairs of tokens can answer."""
    if call.past is not None or call.packing.lengths is not None:
        raise ValueError("this control is for training on whole sequences: no cache, no packing")
    heads = made.v.shape[2]
    q, k = (z.transpose(1, 2).repeat_interleave(heads // z.shape[2], 1) for z in (made.q, made.k))
    return q, k


def read(q: Tensor, k: Tensor, made: Operands, weight: Tensor, together: Tensor | None = None) -> Tensor:
    """[B, T, H, dv] reads in which what token s wrote counts for weight [B, H, T, T] at t.

    What was written goes through the transitions of one state; with ``together`` [B, H, T, T] a delta step sees only
    the tokens s with together[t, s].
    """
    time, v = q.shape[2], made.v.transpose(1, 2)
    lower = torch.ones(time, time, device=q.device, dtype=torch.bool).tril()
    total = torch.zeros_like(q[..., 0]) if made.g is None else made.g.transpose(1, 2).double().cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp().to(q.dtype)
    pairs = (q @ k.transpose(-1, -2)) * decay
    if made.beta is not None:
        beta = made.beta.transpose(1, 2)[..., None]
        among = beta * (k @ k.transpose(-1, -2)) * (decay if together is None else decay * together)
        system = among.tril(-1) + torch.eye(time, device=k.device, dtype=k.dtype)
        if together is None:
            pairs = torch.linalg.solve_triangular(system, pairs, upper=False, left=False) * beta.transpose(-1, -2)
        else:
            v = torch.linalg.solve_triangular(system, beta * v, upper=False)
    return made.scale * ((pairs * weight) @ v).transpose(1, 2)
