"""Gated DeltaNet: the delta rule with an input-dependent decay."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dla.layers.deltanet import DeltaNet
from dla.layers.fused import linear
from dla.layers.fused.program import Program
from dla.layers.mixer import reset_decay, reset_time_step
from dla.ops.problem import compute_dtype


class GatedDeltaNet(DeltaNet):
    """g = -e^A_log * softplus(a + dt_bias) beside DeltaNet's step."""

    def __init__(self, hidden_size: int, *args: Any, **options: Any) -> None:
        super().__init__(hidden_size, *args, **options)
        self.a_proj = nn.Linear(hidden_size, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_decay(self.A_log, 0.01, 16)
        reset_time_step(self.dt_bias)

    def transition(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        _, beta = super().transition(x)
        dtype = compute_dtype(x.dtype)
        step = F.softplus(linear(self.a_proj, x).to(dtype) + self.dt_bias.to(dtype))
        return -step * self.A_log.to(dtype).exp(), beta

    def transition_decoding(self, program: Program, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        _, beta = super().transition_decoding(program, x)
        a = program.linear(self.a_proj, x)
        return program.time_step(a, a, self.dt_bias, self.A_log)[1], beta  # no value is multiplied by the step
