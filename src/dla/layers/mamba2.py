"""Mamba-2: input-dependent decay and write, keys and queries shared by a group of heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dla.layers.call import Call, LayerPast
from dla.layers.fused import linear, split_linear, time_step
from dla.layers.fused.program import Program, UnfusedError
from dla.layers.memory import Memory, Operands
from dla.layers.mixer import LinearMixer, reset_decay, reset_time_step
from dla.layers.norms import GatedRMSNorm
from dla.ops.problem import compute_dtype

NO_LIMIT = (0.0, float("inf"))  # of the time step


class Mamba2(LinearMixer):
    """q = C, k = B, v = step * x, g = -step * e^A_log, plus D x, a gated norm and the way out."""

    def __init__(
        self,
        hidden_size: int,
        memory: Memory,
        *,
        heads: int,
        key_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_size: int = 4,
        conv_bias: bool = True,
        projection_bias: bool = False,
        norm_groups: int = 1,
        norm_eps: float = 1e-5,
        feature_map: str = "identity",
        time_step_limit: tuple[float, float] = NO_LIMIT,
    ) -> None:
        super().__init__(memory, heads=heads, key_heads=key_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim)
        self.channels = self.value_size + 2 * self.key_size
        self.time_step_limit = tuple(time_step_limit)
        self.in_proj = nn.Linear(hidden_size, self.value_size + self.channels + heads, bias=projection_bias)
        self.add_convolution(self.channels, conv_size, conv_bias)
        self.add_feature_map(feature_map)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm = GatedRMSNorm(self.value_size, norm_eps, norm_groups, gate_first=True)
        self.out_proj = nn.Linear(self.value_size, hidden_size, bias=projection_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_time_step(self.dt_bias)
        reset_decay(self.A_log, 1, 16)
        nn.init.ones_(self.D)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]"""
        gate, inner, step = split_linear(self.in_proj, x, [self.value_size, self.channels, self.heads])
        inner = self.convolve(inner, call)
        dtype = compute_dtype(x.dtype)
        values, k, q = inner.to(dtype).split([self.value_size, self.key_size, self.key_size], -1)
        v, g = self._written(values, step.to(dtype))
        o = self.memory(x, Operands(self.features(q), self.features(k), v, g=g), call)
        return linear(self.out_proj, self.norm(o.flatten(-2), gate, values, self.D.to(dtype)).to(x.dtype))

    def decoding(self, program: Program, x: Tensor, past: LayerPast, plus: Tensor) -> Tensor:
        if self.time_step_limit != NO_LIMIT:
            raise UnfusedError("limits of the time step")
        gate, inner, step = program.linear(self.in_proj, x).split([self.value_size, self.channels, self.heads], -1)
        at, parts = 0, []
        for part in inner.split([self.value_size, self.key_size, self.key_size], -1):
            parts.append(program.convolve(self.conv1d, part, past.tail, at))
            at += part.shape[-1]
        values, k, q = parts
        v, g = program.time_step(values, step, self.dt_bias, self.A_log)
        made = Operands(self.features_decoding(program, q), self.features_decoding(program, k), v, g=g)
        o = self.memory.decoding(program, x, made).flatten(-2)
        skip = program.map("same", self.D, each=self.head_v_dim, rows=1).flatten()
        return program.linear(self.out_proj, program.norm(self.norm, o, gate, values, skip), plus)

    def _written(self, values: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """v [B, T, H, dv] and g [B, T, H] of values [B, T, H * dv] and the time step's projection [B, T, H]."""
        if self.time_step_limit == NO_LIMIT:
            fused = time_step(values, step, self.dt_bias, self.A_log)
            if fused is not None:
                return fused
        step = F.softplus(step + self.dt_bias.to(step.dtype)).clamp(*self.time_step_limit)
        values = values.view(*step.shape, self.head_v_dim)
        return values * step[..., None], -step * self.A_log.to(step.dtype).exp()
