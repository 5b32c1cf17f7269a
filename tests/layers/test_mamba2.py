"""The Mamba-2 mixer against the recurrence written out, one token and one head at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dla.layers import Mamba2, Packing, SingleMemory
from dla.layers.call import Call
from tests.ops.common import assert_close

HIDDEN = 10
SHAPE: dict[str, Any] = {"heads": 4, "key_heads": 1, "head_k_dim": 6, "head_v_dim": 5}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two groups": {"key_heads": 2},
    "a group a head": {"key_heads": 4},
    "norm groups": {"norm_groups": 2, "key_heads": 2},
    "norm groups across heads": {"norm_groups": 5},
    "no conv": {"conv_size": 0},
    "short conv": {"conv_size": 2},
    "no conv bias": {"conv_bias": False},
    "biases": {"projection_bias": True},
    "learned map": {"feature_map": "learned", "key_heads": 2},
    "clamped step": {"time_step_limit": (0.3, 0.6)},
    "large eps": {"norm_eps": 0.5},
}


def make_mixer(**options: Any) -> Mamba2:
    """In float64, with every weight at random and the past slow to fade."""
    torch.manual_seed(0)
    mixer = Mamba2(HIDDEN, SingleMemory(), **{**SHAPE, **options}).double()
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.copy_(0.6 * torch.randn(weight.shape))
        mixer.A_log.sub_(4)
    return mixer


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def by_hand(mixer: Mamba2, x: np.ndarray) -> np.ndarray:
    """One sequence [T, hidden] -> [T, hidden]."""
    w = {name: p.detach().numpy() for name, p in mixer.named_parameters()}
    H, G, N, P = mixer.heads, mixer.key_heads, mixer.head_k_dim, mixer.head_v_dim
    T, inner = len(x), H * P
    mixed = x @ w["in_proj.weight"].T + w.get("in_proj.bias", 0.0)
    z, xbc, dt = mixed[:, :inner], mixed[:, inner:-H], mixed[:, -H:]
    if "conv1d.weight" in w:
        kernel = w["conv1d.weight"][:, 0]
        size = kernel.shape[1]
        line = np.concatenate([np.zeros((size - 1, xbc.shape[1])), xbc])
        xbc = np.stack([(line[t : t + size] * kernel.T).sum(0) for t in range(T)]) + w.get("conv1d.bias", 0.0)
    xbc = silu(xbc)
    values = xbc[:, :inner].reshape(T, H, P)
    B, C = xbc[:, inner : inner + G * N].reshape(T, G, N), xbc[:, inner + G * N :].reshape(T, G, N)
    dt = np.log1p(np.exp(dt + w["dt_bias"])).clip(*mixer.time_step_limit)
    output = np.zeros((T, H, P))
    for h in range(H):
        group = h // (H // G)
        feature = w["feature_map.weight"][group] if "feature_map.weight" in w else np.eye(N)
        state = np.zeros((N, P))
        for t in range(T):
            state = np.exp(-dt[t, h] * np.exp(w["A_log"][h])) * state
            state = state + np.outer(B[t, group] @ feature, dt[t, h] * values[t, h])
            output[t, h] = (C[t, group] @ feature) @ state + w["D"][h] * values[t, h]
    gated = (output.reshape(T, inner) * silu(z)).reshape(T, mixer.norm.groups, -1)
    gated = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + mixer.norm.eps)
    return (gated.reshape(T, inner) * w["norm.weight"]) @ w["out_proj.weight"].T + w.get("out_proj.bias", 0.0)


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
@torch.no_grad()
def test_recurrence(options: dict[str, Any]) -> None:
    mixer = make_mixer(**options)
    x = torch.randn(2, 70, HIDDEN, dtype=torch.float64)
    expected = torch.stack([torch.from_numpy(by_hand(mixer, row.numpy())) for row in x])
    assert_close(mixer(x, Call(Packing(2, 70))), expected, 1e-10)
    # the recurrence is felt: its first token counts at the end
    other = x.clone()
    other[:, 2] += 1
    assert (mixer(other, Call(Packing(2, 70)))[:, -1] - expected[:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
def test_parts(options: dict[str, Any]) -> None:
    """What the options leave out is not there, and what they add is."""
    mixer = make_mixer(**options)
    names = {name for name, _ in mixer.named_parameters()}
    assert ("conv1d.weight" in names) == (options.get("conv_size", 4) > 0)
    assert ("conv1d.bias" in names) == (options.get("conv_size", 4) > 0 and options.get("conv_bias", True))
    assert ("in_proj.bias" in names) == ("out_proj.bias" in names) == options.get("projection_bias", False)
    assert ("feature_map.weight" in names) == (options.get("feature_map") == "learned")
    assert mixer.norm.groups == options.get("norm_groups", 1)
    assert mixer.norm.eps == options.get("norm_eps", 1e-5)
    assert mixer.time_step_limit == options.get("time_step_limit", (0.0, float("inf")))


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
@torch.no_grad()
def test_carried_state_and_packing(options: dict[str, Any]) -> None:
    """Three sequences, one of them empty, in two calls."""
    mixer = make_mixer(**options)
    lengths, more = (9, 0, 14), (3, 5, 0)
    x, y = (torch.randn(1, sum(n), HIDDEN, dtype=torch.float64) for n in (lengths, more))
    past: Any = SimpleNamespace(state=None, tail=None)
    first = mixer(x, Call(Packing(1, 23, lengths), past)).split(lengths, 1)
    second = mixer(y, Call(Packing(1, 8, more), past)).split(more, 1)
    for a, b, c, d in zip(x.split(lengths, 1), y.split(more, 1), first, second, strict=True):
        expected = torch.from_numpy(by_hand(mixer, torch.cat([a, b], 1)[0].numpy()))
        assert_close(torch.cat([c, d], 1)[0], expected, 1e-10)


def test_starting_values() -> None:
    """Steps spread over [0.001, 0.1] and decay rates over [1, 16], whatever the number of heads."""
    torch.manual_seed(0)
    mixer = Mamba2(HIDDEN, SingleMemory(), **{**SHAPE, "heads": 400})
    step = torch.nn.functional.softplus(mixer.dt_bias)
    assert step.min() >= 0.00099
    assert step.max() <= 0.101
    assert (step < 0.01).float().mean().item() == pytest.approx(0.5, abs=0.12)  # even in the logarithm
    rate = mixer.A_log.exp()
    assert rate.min() >= 1
    assert rate.max() <= 16
    assert rate.mean().item() == pytest.approx(8.5, abs=1)
    assert mixer.D.eq(1).all()
