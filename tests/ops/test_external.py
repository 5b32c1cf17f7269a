"""The baselines against other people's code: fla's naive functions and transformers' gated delta rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import oracles
from tests.ops.common import BACKENDS, Inputs, assert_close, call, cast, make_inputs

FLOAT32 = 2e-5  # most oracles compute in float32 whatever they are given

RECURRENT: dict[str, tuple[str, Callable, bool]] = {  # name: mode, function, whether it takes a scale
    "fla simple_gla": ("decay", oracles.simple_gla, True),
    "fla simple_gla by chunks": ("decay", oracles.chunk_simple_gla, True),
    "fla delta_rule": ("delta", oracles.delta_rule, False),
    "fla gated_delta_rule": ("gated_delta", oracles.gated_delta_rule, True),
    "fla gated_delta_rule by chunks": ("gated_delta", oracles.chunk_gated_delta_rule, True),
    "transformers gated_delta_rule": ("gated_delta", oracles.transformers_gated_delta_rule, False),
}


def shaped(mode: str, T: int, seed: int = 0, **shape: Any) -> Inputs:
    return make_inputs(mode, B=2, T=T, H=3, dk=8, dv=5, width=9, seed=seed, dtype=torch.float32, **shape)


def ask(oracle: str, x: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    _, function, _ = RECURRENT[oracle]
    return function(**{name: value for name, value in x.items() if name != "lam"}, **options)


@pytest.mark.parametrize("T", [1, 63, 64, 130])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("oracle", RECURRENT)
def test_linear(oracle: str, backend: str, T: int) -> None:
    mode, _, _ = RECURRENT[oracle]
    x = shaped(mode, T, seed=T)
    expected, expected_state = ask(oracle, x)
    for dtype in (torch.float32, torch.float64):
        o, state = call("linear", cast(x, dtype), output_final_state=True, backend=backend)
        assert o.dtype == dtype
        assert_close(o, expected, FLOAT32)
        assert_close(state.dense().squeeze(2), expected_state, FLOAT32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("oracle", RECURRENT)
def test_linear_continues_from_a_state(oracle: str, backend: str) -> None:
    """Both sides take over their own state after 70 tokens."""
    mode, _, _ = RECURRENT[oracle]
    before, after = shaped(mode, 70, seed=1), shaped(mode, 67, seed=2)
    _, state = call("linear", before, output_final_state=True, backend=backend)
    o, state = call("linear", after, initial_state=state, output_final_state=True, backend=backend)
    _, expected_state = ask(oracle, before)
    expected, expected_state = ask(oracle, after, initial_state=expected_state)
    assert_close(o, expected, FLOAT32)
    assert_close(state.dense().squeeze(2), expected_state, FLOAT32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("oracle", [name for name, (_, _, scaled) in RECURRENT.items() if scaled])
def test_linear_scale(oracle: str, backend: str) -> None:
    x = shaped(RECURRENT[oracle][0], 40)
    o, _ = call("linear", x, scale=0.7, backend=backend)
    assert_close(o, ask(oracle, x, scale=0.7)[0], FLOAT32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_is_decay_of_zero(backend: str) -> None:
    x = shaped("plain", 90)
    o, _ = call("linear", x, backend=backend)
    assert_close(o, oracles.simple_gla(x["q"], x["k"], x["v"], torch.zeros(2, 90, 3))[0], FLOAT32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_gradients(backend: str) -> None:
    """Of every input, against autograd of fla's gated delta rule."""
    x = shaped("gated_delta", 70)
    gradients = []
    for run in (lambda y: call("linear", y, backend=backend)[0], lambda y: ask("fla gated_delta_rule", y)[0]):
        leaves = {name: value.clone().requires_grad_() for name, value in x.items() if name != "lam"}
        run(leaves).square().sum().backward()
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, expected in gradients[1].items():
        assert_close(gradients[0][name], expected, 1e-4)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("Hk", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_linear(backend: str, Hk: int, T: int) -> None:
    """In float64, grouped keys included; fla's default scale is one and ours dk^-0.5, so both are given."""
    x = cast(shaped("decay", T, seed=T, Hk=Hk), torch.float64)
    for scale in (1.0, None):
        o, _ = call("log_linear", x, scale=scale, backend=backend)
        expected = oracles.log_linear(x["q"], x["k"], x["v"], x["g"], x["lam"], scale)
        assert_close(o, expected)


@pytest.mark.parametrize("split", [1, 37, 64, 99])
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_linear_in_two_parts(backend: str, split: int) -> None:
    x = cast(shaped("decay", 100), torch.float64)
    parts, state = [], None
    for start, end in ((0, split), (split, 100)):
        part = {name: value[:, start:end] for name, value in x.items()}
        o, state = call("log_linear", part, initial_state=state, output_final_state=True, backend=backend)
        parts.append(o)
    assert_close(torch.cat(parts, 1), oracles.log_linear(x["q"], x["k"], x["v"], x["g"], x["lam"]))
