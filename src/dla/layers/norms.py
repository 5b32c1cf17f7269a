"""Root-mean-square norms, plain and gated."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dla.layers.fused import gated_norm
from dla.layers.fused.norm import Gated
from dla.layers.fused.when import many
from dla.ops.problem import compute_dtype


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, or over each of ``groups`` equal parts of it."""

    def __init__(self, size: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.groups = groups

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] in any dtype -> the same in the dtype of the weight."""
        if many(x) and (y := gated_norm(x, self.weight, self.eps, groups=self.groups)) is not None:
            return y
        wide = x.to(compute_dtype(x.dtype))
        parts = wide.unflatten(-1, (self.groups, -1)) if self.groups > 1 else wide
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (parts.flatten(-2) if self.groups > 1 else parts).to(self.weight.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}" + (f", groups={self.groups}" if self.groups > 1 else "")


class GatedRMSNorm(RMSNorm):
    """RMS norm with a SiLU gate, applied before the norm (Mamba-2) or after it (Gated DeltaNet)."""

    def __init__(self, size: int, eps: float, groups: int = 1, gate_first: bool = False) -> None:
        super().__init__(size, eps, groups)
        self.gate_first = gate_first

    def forward(
        self, x: Tensor, gate: Tensor | None = None, skip: Tensor | None = None, skip_weight: Tensor | None = None
    ) -> Tensor:
        """x, gate [..., size] -> [..., size]; without a gate the plain norm.

        skip [..., size], skip_weight [heads]: of a skip connection, which is added to x first.
        """
        if many(x) and (fused := self._fused(x, gate, skip, skip_weight)) is not None:
            return fused
        if skip is not None and skip_weight is not None:
            heads = len(skip_weight), skip.shape[-1] // len(skip_weight)
            x = x + (skip.view(*skip.shape[:-1], *heads) * skip_weight[:, None]).flatten(-2)
        if gate is None:
            return super().forward(x)
        gate = F.silu(gate.to(compute_dtype(x.dtype)))
        if self.gate_first:
            return super().forward(x.to(gate.dtype) * gate)
        return (super().forward(x) * gate).to(self.weight.dtype)

    def _fused(self, x: Tensor, gate: Tensor | None, skip: Tensor | None, skip_weight: Tensor | None) -> Tensor | None:
        gated: Gated = "none" if gate is None else "before" if self.gate_first else "after"
        if skip_weight is not None:  # one number a channel
            skip_weight = skip_weight[:, None].expand(-1, len(self.weight) // len(skip_weight)).reshape(-1)
        return gated_norm(
            x, self.weight, self.eps, groups=self.groups, gated=gated, gate=gate, skip=skip, skip_weight=skip_weight
        )
