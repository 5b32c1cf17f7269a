"""DeltaNet, Gated DeltaNet and linear attention: their layers written out around fla's naive recurrences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dla.layers import DeltaNet, GatedDeltaNet, Linear, Packing, SingleMemory
from dla.layers.call import Call
from dla.layers.projected import ProjectedMixer
from tests.ops import oracles
from tests.ops.common import assert_close

HIDDEN = 12
FLOAT32 = 3e-5  # fla's recurrences run in float32
MIXERS: dict[str, type[ProjectedMixer]] = {"linear": Linear, "deltanet": DeltaNet, "gated_deltanet": GatedDeltaNet}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"key_heads": 2},
    "no conv": {"conv_size": 0},
    "conv bias": {"conv_bias": True, "conv_size": 3},
    "no gate": {"output_gate": False},
    "learned map": {"feature_map": "learned", "key_heads": 2},
    "large eps": {"norm_eps": 0.3},
    "large steps": {"allow_neg_eigval": True},
}


def make_mixer(backbone: str, **options: Any) -> ProjectedMixer:
    torch.manual_seed(0)
    sizes = {"heads": 4, "key_heads": 4, "head_k_dim": 6, "head_v_dim": 5}
    mixer = MIXERS[backbone](HIDDEN, SingleMemory(), **{**sizes, **options})
    with torch.no_grad():
        for name, weight in mixer.named_parameters():
            weight.copy_(0.5 * torch.randn(weight.shape) - 5 * (name == "A_log"))
    return mixer


def mapped(mixer: ProjectedMixer, x: Tensor, unit: bool) -> Tensor:
    """Queries or keys [B, T, Hk * dk] -> [B, T, H, dk]."""
    heads = []
    for group, part in enumerate(x.chunk(mixer.key_heads, -1)):
        if mixer.feature_map is not None:
            part = part @ mixer.feature_map.weight[group]
        if unit:
            part = part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        heads += [part] * (mixer.heads // mixer.key_heads)
    return torch.stack(heads, 2)


def by_hand(mixer: ProjectedMixer, x: Tensor, largest_step: float) -> Tensor:
    """[B, T, hidden] -> [B, T, hidden]"""
    mixed = torch.cat([x @ p.weight.T for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], -1)
    if mixer.conv1d is not None:
        size = mixer.conv1d.weight.shape[-1]
        line = F.pad(mixed.transpose(1, 2), (size - 1, 0))
        mixed = F.conv1d(line, mixer.conv1d.weight, mixer.conv1d.bias, groups=mixed.shape[-1]).transpose(1, 2)
    mixed = F.silu(mixed)
    width = mixer.key_heads * mixer.head_k_dim
    delta = isinstance(mixer, DeltaNet)
    q, k = mapped(mixer, mixed[..., :width], delta), mapped(mixer, mixed[..., width : 2 * width], delta)
    v = mixed[..., 2 * width :].unflatten(-1, (mixer.heads, -1))
    if isinstance(mixer, DeltaNet):
        beta = largest_step * torch.sigmoid(x @ mixer.b_proj.weight.T)
        if isinstance(mixer, GatedDeltaNet):
            g = -mixer.A_log.exp() * F.softplus(x @ mixer.a_proj.weight.T + mixer.dt_bias)
            o = oracles.gated_delta_rule(q, k, v, g, beta, 6**-0.5)[0]
        else:
            o = oracles.delta_rule(q, k, v, beta)[0]
    else:
        o = oracles.simple_gla(q, k, v, torch.zeros(v.shape[:3]), 6**-0.5)[0]
    o = o / (o.square().mean(-1, keepdim=True) + mixer.norm.eps).sqrt() * mixer.norm.weight
    if mixer.g_proj is not None:
        o = o * F.silu(x @ mixer.g_proj.weight.T).unflatten(-1, o.shape[-2:])
    return o.flatten(-2) @ mixer.o_proj.weight.T


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backbone", MIXERS)
@torch.no_grad()
def test_layer(backbone: str, case: str) -> None:
    if case == "large steps" and backbone == "linear":
        with pytest.raises(TypeError):
            make_mixer(backbone, **CASES[case])
        return
    mixer = make_mixer(backbone, **CASES[case])
    x = torch.randn(2, 50, HIDDEN)
    expected = by_hand(mixer, x, 2.0 if case == "large steps" else 1.0)
    assert_close(mixer(x, Call(Packing(2, 50))), expected, FLOAT32)
    other = x.clone()
    other[:, 1] += 1
    assert (mixer(other, Call(Packing(2, 50)))[:, -1] - expected[:, -1]).abs().max() > 30 * FLOAT32


@pytest.mark.parametrize("case", CASES)
def test_parts(case: str) -> None:
    """What the options leave out is not there, and what they add is."""
    options = CASES[case]
    mixer = make_mixer("gated_deltanet", **options)
    assert (mixer.g_proj is None) == (case == "no gate")
    assert (mixer.conv1d is None) == (case == "no conv")
    assert (mixer.feature_map is None) == (case != "learned map")
    if mixer.conv1d is not None:
        assert mixer.conv1d.weight.shape[-1] == options.get("conv_size", 4)
        assert (mixer.conv1d.bias is not None) == (case == "conv bias")
    assert mixer.norm.eps == options.get("norm_eps", 1e-5)


@pytest.mark.parametrize("backbone", MIXERS)
@torch.no_grad()
def test_map_starts_as_the_identity(backbone: str) -> None:
    torch.manual_seed(0)
    sizes = {"heads": 4, "key_heads": 2, "head_k_dim": 6, "head_v_dim": 5}
    learned = MIXERS[backbone](HIDDEN, SingleMemory(), **sizes, feature_map="learned")
    plain = MIXERS[backbone](HIDDEN, SingleMemory(), **sizes)
    plain.load_state_dict({n: p for n, p in learned.state_dict().items() if not n.startswith("feature_map")})
    x = torch.randn(1, 20, HIDDEN)
    assert_close(learned(x, Call(Packing(1, 20))), plain(x, Call(Packing(1, 20))), 1e-6)
