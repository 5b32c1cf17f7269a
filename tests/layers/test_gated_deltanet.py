"""The Gated DeltaNet mixer against Qwen3-Next's layer of the transformers library, on the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dla.layers import GatedDeltaNet, Packing, SingleMemory
from dla.layers.call import Call
from tests.ops.common import assert_close
from tests.ops.oracles import _qwen

HIDDEN = 12
FLOAT32 = 3e-5  # the oracle's recurrence runs in float32


def make_mixer(heads: int, key_heads: int, **options: Any) -> GatedDeltaNet:
    torch.manual_seed(0)
    sizes = {"head_k_dim": 6, "head_v_dim": 5, "norm_eps": 1e-6}
    mixer = GatedDeltaNet(HIDDEN, SingleMemory(), heads=heads, key_heads=key_heads, **{**sizes, **options})
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape))
        mixer.A_log.sub_(5)
    return mixer


def qwen_layer(mixer: GatedDeltaNet) -> nn.Module:
    """Qwen3-Next's layer with the mixer's weights: its projections hold q, k, v, z (and b, a) key head by key head."""
    library = _qwen()
    H, G, dk, dv = mixer.heads, mixer.key_heads, mixer.head_k_dim, mixer.head_v_dim
    layer = library.Qwen3NextGatedDeltaNet(
        library.Qwen3NextConfig(
            hidden_size=HIDDEN,
            linear_num_value_heads=H,
            linear_num_key_heads=G,
            linear_key_head_dim=dk,
            linear_value_head_dim=dv,
            linear_conv_kernel_dim=4,
            rms_norm_eps=mixer.norm.eps,
            hidden_act="silu",
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        0,
    )

    def groups(linear: nn.Linear | None) -> tuple[Tensor, ...]:
        assert linear is not None
        return linear.weight.chunk(G)

    wide = zip(*map(groups, (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj)), strict=True)
    thin = zip(*map(groups, (mixer.b_proj, mixer.a_proj)), strict=True)
    assert mixer.conv1d is not None
    weights = {
        "in_proj_qkvz.weight": torch.cat([part for group in wide for part in group]),
        "in_proj_ba.weight": torch.cat([part for group in thin for part in group]),
        "conv1d.weight": mixer.conv1d.weight,
        "dt_bias": mixer.dt_bias,
        "A_log": mixer.A_log,
        "norm.weight": mixer.norm.weight,
        "out_proj.weight": mixer.o_proj.weight,
    }
    layer.load_state_dict({name: value.detach() for name, value in weights.items()})
    return layer


@pytest.mark.parametrize(("heads", "key_heads"), [(3, 3), (4, 2), (4, 1)])
@pytest.mark.parametrize("T", [1, 3, 65])
@torch.no_grad()
def test_equals_qwen3_next(T: int, heads: int, key_heads: int) -> None:
    mixer = make_mixer(heads, key_heads)
    x = torch.randn(2, T, HIDDEN)
    expected = qwen_layer(mixer)(x)
    assert_close(mixer(x, Call(Packing(2, T))), expected, FLOAT32)
    assert_close(mixer.double()(x.double(), Call(Packing(2, T))), expected, FLOAT32)
    if T > 3:
        other = x.clone()
        other[:, 1] += 1
        assert (mixer(other.double(), Call(Packing(2, T)))[:, -1] - expected[:, -1]).abs().max() > 100 * FLOAT32


def test_gradients_equal_those_of_qwen3_next() -> None:
    mixer = make_mixer(4, 2)
    layer = qwen_layer(mixer)
    x = torch.randn(2, 40, HIDDEN)
    weight = torch.randn(2, 40, HIDDEN)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (mixer(mine, Call(Packing(2, 40))) * weight).sum().backward()
    (layer(theirs) * weight).sum().backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert_close(mine.grad, theirs.grad, 1e-4)
    for name in ("A_log", "dt_bias", "conv1d.weight", "norm.weight"):
        assert_close(mixer.get_parameter(name).grad, layer.get_parameter(name).grad, 1e-4)
    assert_close(mixer.o_proj.weight.grad, layer.out_proj.weight.grad, 1e-4)


def test_starting_values() -> None:
    torch.manual_seed(0)
    mixer = GatedDeltaNet(HIDDEN, SingleMemory(), heads=400, key_heads=1, head_k_dim=4, head_v_dim=2)
    rate, step = mixer.A_log.exp(), nn.functional.softplus(mixer.dt_bias)
    assert 0.0099 <= rate.min() < rate.max() <= 16
    assert rate.mean().item() == pytest.approx(8, abs=1)
    assert 0.00099 <= step.min() < step.max() <= 0.101
