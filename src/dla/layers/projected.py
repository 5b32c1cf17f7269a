"""Mixers with separate projections for queries, keys and values: linear attention and, with a step, the delta rules."""

import torch
from torch import Tensor, nn

from dla.layers.call import Call, LayerPast
from dla.layers.fused import linear, projections, unit_vectors
from dla.layers.fused.program import Program
from dla.layers.memory import Memory, Operands
from dla.layers.mixer import LinearMixer
from dla.layers.norms import GatedRMSNorm
from dla.ops.problem import compute_dtype

UNIT_EPS = 1e-6  # beside the square of a key's length


class ProjectedMixer(LinearMixer):
    """q, k, v by projections, short convolutions and SiLU; an output norm for each head, gated or not.

    What a backbone adds are ``transition`` (decay and step) and whether keys and queries have unit length.
    """

    unit_keys = False

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
        conv_bias: bool = False,
        output_gate: bool = True,
        norm_eps: float = 1e-5,
        feature_map: str = "identity",
    ) -> None:
        super().__init__(memory, heads=heads, key_heads=key_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim)
        self.q_proj = nn.Linear(hidden_size, self.key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_size, bias=False)
        self.g_proj = nn.Linear(hidden_size, self.value_size, bias=False) if output_gate else None
        self.add_convolution(2 * self.key_size + self.value_size, conv_size, conv_bias)
        self.add_feature_map(feature_map)
        self.norm = GatedRMSNorm(head_v_dim, norm_eps)
        self.o_proj = nn.Linear(self.value_size, hidden_size, bias=False)

    def transition(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The log-decay g and the delta step beta [B, T, H] by the layer's input; None where there is none."""
        return None, None

    def forward(self, x: Tensor, call: Call) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]"""
        mixed, *gates = projections(
            x, (self.q_proj, self.k_proj, self.v_proj), *(() if self.g_proj is None else ((self.g_proj,),))
        )
        mixed = self.convolve(mixed, call).to(compute_dtype(x.dtype))
        q, k, v = self._split(mixed)
        v = v.unflatten(-1, (self.heads, self.head_v_dim))
        made = Operands(q, k, v, *self.transition(x), scale=self.head_k_dim**-0.5)
        o = self.memory(x, made, call)
        gate = gates[0].unflatten(-1, o.shape[-2:]) if gates else None
        return linear(self.o_proj, self.norm(o, gate).flatten(-2).to(x.dtype))

    def decoding(self, program: Program, x: Tensor, past: LayerPast, plus: Tensor) -> Tensor:
        at, parts = 0, []
        for module in (self.q_proj, self.k_proj, self.v_proj):
            parts.append(program.convolve(self.conv1d, program.linear(module, x), past.tail, at))
            at += module.out_features
        q, k = (self.features_decoding(program, part) for part in parts[:2])
        if self.unit_keys:
            sizes = self.key_heads, self.head_k_dim
            q, k = (program.unit_vectors(part.flatten(-2), *sizes, UNIT_EPS).unflatten(-1, sizes) for part in (q, k))
        v = parts[2].unflatten(-1, (self.heads, self.head_v_dim))
        made = Operands(q, k, v, *self.transition_decoding(program, x), scale=self.head_k_dim**-0.5)
        o = self.memory.decoding(program, x, made)
        gate = None if self.g_proj is None else program.linear(self.g_proj, x)
        normal = program.norm(self.norm, o, gate).view(len(x), 1, -1)
        return program.linear(self.o_proj, normal, plus)

    def transition_decoding(self, program: Program, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """``transition`` of a token, as pieces of a program."""
        return None, None

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, T, Hk, dk], of unit length where they are to be, and values [B, T, H * dv]."""
        if self.unit_keys and self.feature_map is None:
            keys = (2 * self.key_heads, self.head_k_dim)
            both, v = mixed.split([2 * self.key_size, self.value_size], -1)
            if (unit := unit_vectors(both, *keys, UNIT_EPS)) is not None:
                q, k = unit.unflatten(-1, keys).split(self.key_heads, -2)
                return q, k, v
        q, k, v = mixed.split([self.key_size, self.key_size, self.value_size], -1)
        q, k = self.features(q), self.features(k)
        return (unit_length(q), unit_length(k), v) if self.unit_keys else (q, k, v)


def unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)
