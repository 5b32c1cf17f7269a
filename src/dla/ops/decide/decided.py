"""What the first stage hands on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dla.ops.segmentation import Segmentation


@dataclass(frozen=True)
class Seen:
    """What the soft gate differentiates: the hard current state S before each step, seen by that step's token."""

    state_k: Tensor  # [B * T, H, dv] S^T k, with k over its norm
    state_v: Tensor  # [B * T, H, dk] S v, with v over its norm
    norm: Tensor  # [B * T, H] |S|, 0 before a sequence's first token

    @classmethod
    def empty(cls, k: Tensor, v: Tensor) -> "Seen":
        """To be filled in, for k [B * T, Hk, dk] and v [B * T, H, dv]."""
        tokens, heads, dv = v.shape
        return cls(v.new_zeros(tokens, heads, dv), v.new_zeros(tokens, heads, k.shape[2]), v.new_zeros(tokens, heads))

    def to(self, device: torch.device) -> "Seen":
        return Seen(self.state_k.to(device), self.state_v.to(device), self.norm.to(device))


@dataclass(frozen=True)
class Decided:
    """The decisions and, for the soft gate, what they were made from."""

    segmentation: Segmentation
    seen: Seen | None = None
