"""What linear mixers share: the short convolution, the feature map, the memory and the cache."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dla.layers.call import Call, LayerPast
from dla.layers.conv import ShortConv
from dla.layers.fused.program import Program, UnfusedError
from dla.layers.memory import Memory

STEP_RANGE = (1e-3, 1e-1)  # of the time step, at the start


class FeatureMap(nn.Module):
    """A learned linear map of queries and keys, one for each key head, at first the identity."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, size, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fill(self.weight, torch.eye(self.weight.shape[1], device=self.weight.device).expand_as(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, Hk, dk] -> [B, T, Hk, dk]"""
        return torch.einsum("bthd,hde->bthe", x, self.weight.to(x.dtype))


class LinearMixer(nn.Module):
    """A mixer over a memory. Backbones project, ``convolve``, make operands, ask the memory and project back."""

    def __init__(self, memory: Memory, *, heads: int, key_heads: int, head_k_dim: int, head_v_dim: int) -> None:
        super().__init__()
        self.memory = memory
        self.heads, self.key_heads, self.head_k_dim, self.head_v_dim = heads, key_heads, head_k_dim, head_v_dim
        self.key_size, self.value_size = key_heads * head_k_dim, heads * head_v_dim
        self.conv1d: ShortConv | None = None
        self.feature_map: FeatureMap | None = None

    def add_convolution(self, channels: int, size: int, bias: bool) -> None:
        if size:
            self.conv1d = ShortConv(channels, size, bias)

    def add_feature_map(self, kind: str) -> None:
        if kind == "learned":
            self.feature_map = FeatureMap(self.key_heads, self.head_k_dim)

    def convolve(self, x: Tensor, call: Call) -> Tensor:
        """The short convolution of x [B, T, channels] with its SiLU, or the SiLU alone."""
        if self.conv1d is None:
            return F.silu(x)
        past = call.past
        y, tail = self.conv1d(x, call.packing, None if past is None else past.tail, past is not None)
        if past is not None:
            past.tail = tail
        return y

    def features(self, x: Tensor) -> Tensor:
        """[B, T, Hk * dk] -> queries or keys [B, T, Hk, dk]"""
        x = x.unflatten(-1, (self.key_heads, self.head_k_dim))
        return x if self.feature_map is None else self.feature_map(x)

    def decoding(self, program: Program, x: Tensor, past: LayerPast, plus: Tensor) -> Tensor:
        """What ``forward`` does to one token of every sequence, as pieces of a program; ``plus`` is added to it."""
        raise UnfusedError(type(self).__name__)

    def features_decoding(self, program: Program, x: Tensor) -> Tensor:
        """``features`` of a token."""
        x = x if self.feature_map is None else program.by_head(x, self.feature_map.weight)
        return x.unflatten(-1, (self.key_heads, self.head_k_dim))


def fill(parameter: nn.Parameter, value: Tensor) -> None:
    """Set a parameter, unless it holds loaded weights (which transformers marks so)."""
    if parameter.device.type != "meta" and not getattr(parameter, "_is_hf_initialized", False):
        with torch.no_grad():
            parameter.copy_(value)


def reset_time_step(bias: nn.Parameter) -> None:
    """A bias whose softplus is spread evenly over the logarithms of ``STEP_RANGE``."""
    low, high = map(math.log, STEP_RANGE)
    step = torch.exp(torch.rand(bias.shape, device=bias.device) * (high - low) + low)
    fill(bias, step + torch.log(-torch.expm1(-step)))


def reset_decay(A_log: nn.Parameter, low: float, high: float) -> None:
    fill(A_log, torch.empty(A_log.shape, device=A_log.device).uniform_(low, high).log())
