"""Softmax attention against a sum written out in complex numbers, and against Llama's layer."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dla.layers import Attention, KVState, Packing
from dla.layers.call import Call
from tests.ops.common import assert_close

HIDDEN, HEADS, DIM, THETA = 12, 6, 8, 500000.0


def make_attention(key_heads: int) -> Attention:
    torch.manual_seed(0)
    layer = Attention(HIDDEN, heads=HEADS, key_heads=key_heads, head_dim=DIM, rope_theta=THETA).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(0.7 * torch.randn(weight.shape))
    return layer


def by_hand(layer: Attention, x: Tensor) -> Tensor:
    """One sequence [T, hidden]: channels i and i + d/2 are one complex number, turned by t * theta^(-2i/d)."""
    T = x.shape[0]

    def heads(proj: torch.nn.Linear) -> Tensor:
        return (x @ proj.weight.T).reshape(T, -1, DIM)

    def turned(y: Tensor) -> Tensor:
        z = torch.complex(y[..., : DIM // 2], y[..., DIM // 2 :])
        angle = torch.tensor([[t * THETA ** (-2 * i / DIM) for i in range(DIM // 2)] for t in range(T)])
        return z * torch.polar(torch.ones_like(angle), angle)[:, None].to(z.dtype)

    q, k, v = turned(heads(layer.q_proj)), turned(heads(layer.k_proj)), heads(layer.v_proj)
    out = x.new_zeros(T, HEADS, DIM)
    for h in range(HEADS):
        group = h // (HEADS // k.shape[1])
        for t in range(T):
            fit = (q[t, h] * k[: t + 1, group].conj()).real.sum(-1) / math.sqrt(DIM)
            out[t, h] = (fit - fit.max()).exp() @ v[: t + 1, group] / (fit - fit.max()).exp().sum()
    return out.flatten(1) @ layer.o_proj.weight.T


@pytest.fixture(autouse=True)
def double_by_default() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("key_heads", [6, 3, 1])
@torch.no_grad()
def test_rows(key_heads: int) -> None:
    layer = make_attention(key_heads)
    x = torch.randn(2, 19, HIDDEN)
    y = layer(x, Call(Packing(2, 19)))
    for i in range(2):
        assert_close(y[i], by_hand(layer, x[i]), 1e-12)


@pytest.mark.parametrize("key_heads", [6, 2])
@torch.no_grad()
def test_packed_and_carried(key_heads: int) -> None:
    """Four sequences in four calls: packed, packed with empty ones, as rows, packed again."""
    layer = make_attention(key_heads)
    past: Any = SimpleNamespace(state=None, tail=None)
    calls = [(4, 0, 7, 1), (0, 0, 3, 2), (3, 3, 3, 3), (0, 5, 1, 0), (1, 1, 1, 1)]
    inputs: list[list[Tensor]] = [[] for _ in range(4)]
    outputs: list[list[Tensor]] = [[] for _ in range(4)]
    for lengths in calls:
        rows = len(set(lengths)) == 1
        shape = (4, lengths[0]) if rows else (1, sum(lengths))
        x = torch.randn(*shape, HIDDEN)
        y = layer(x, Call(Packing(*shape, None if rows else lengths), past))
        for i, (own, got) in enumerate(zip(*(t if rows else t[0].split(lengths) for t in (x, y)), strict=True)):
            inputs[i].append(own)
            outputs[i].append(got)
    assert isinstance(past.state, KVState)
    assert past.state.length.tolist() == [sum(n) for n in zip(*calls, strict=True)]
    for own, got in zip(inputs, outputs, strict=True):
        assert_close(torch.cat(got), by_hand(layer, torch.cat(own)), 1e-12)


@torch.no_grad()
def test_first_call_without_tokens() -> None:
    """A pack of nothing, and rows that begin later."""
    layer = make_attention(2)
    past: Any = SimpleNamespace(state=None, tail=None)
    assert layer(torch.randn(1, 0, HIDDEN), Call(Packing(1, 0, (0, 0)), past)).shape == (1, 0, HIDDEN)
    x = torch.randn(2, 5, HIDDEN)
    y = layer(x, Call(Packing(2, 5), past))
    for i in range(2):
        assert_close(y[i], by_hand(layer, x[i]), 1e-12)


@torch.no_grad()
def test_equals_llama() -> None:
    """Llama's own layer with its rotary embedding, in float32."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.set_default_dtype(torch.float32)
    config = llama.LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=DIM,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attn_implementation="eager",
    )
    mine = make_attention(2).float()
    theirs = llama.LlamaAttention(config, 0)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(2, 30, HIDDEN)
    position = torch.arange(30)[None]
    mask = torch.full((30, 30), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(x, llama.LlamaRotaryEmbedding(config)(x, position), mask)
    assert_close(mine(x, Call(Packing(2, 30))), expected, 3e-6)


def test_gradients_reach_keys_and_values_behind_a_past() -> None:
    """What was carried is constant; the tokens of this call are not."""
    layer = make_attention(2)
    past: Any = SimpleNamespace(state=None, tail=None)
    with torch.no_grad():
        layer(torch.randn(2, 5, HIDDEN), Call(Packing(2, 5), past))
    x, weight = torch.randn(2, 4, HIDDEN), torch.randn(2, 4, HIDDEN)
    before = past.state.clone()
    (layer(x, Call(Packing(2, 4), past)) * weight).sum().backward()

    def value(name: str, step: Tensor) -> float:
        with torch.no_grad():
            layer.get_parameter(name).add_(step)
            again: Any = SimpleNamespace(state=before.clone(), tail=None)
            result = (layer(x, Call(Packing(2, 4), again)) * weight).sum().item()
            layer.get_parameter(name).sub_(step)
        return result

    for name, parameter in layer.named_parameters():
        direction = torch.randn_like(parameter)
        slope = (value(name, 1e-6 * direction) - value(name, -1e-6 * direction)) / 2e-6
        assert parameter.grad is not None, f"{name} has no gradient"
        assert (parameter.grad * direction).sum().item() == pytest.approx(slope, rel=1e-5), name
    assert not past.state.keys.requires_grad
    assert not past.state.values.requires_grad
