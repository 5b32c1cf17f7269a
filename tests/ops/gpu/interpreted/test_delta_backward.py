"""Gradients with delta steps in Triton against those of the chunked form in float64, for every input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dla.ops.gpu import delta_gradients
from tests.ops.common import OPERATORS, Inputs, assert_close, call, cast
from tests.ops.gpu.interpreted.delta import SMALL, gradients, inputs, poisoned, with_decisions  # noqa: F401

EXACT = 2e-5  # of float32


def compare(operator: str, x: Inputs, **options: Any) -> None:
    options = with_decisions(operator, x, options)
    _, expected = gradients(operator, x, "chunked", torch.float64, options)
    _, found = gradients(operator, x, "triton", torch.float32, options)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert_close(gradient, expected[name], EXACT)


@pytest.mark.parametrize(
    "T", [1, 65, pytest.param(63, marks=pytest.mark.slow), pytest.param(150, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_lengths(operator: str, T: int) -> None:
    compare(operator, inputs(T, dk=16), **({"capacity": 4} if operator == "dynamic" else {}))


def test_nothing_at_all() -> None:
    _, found = gradients("linear", inputs(0), "triton", torch.float32, {})
    assert all(x.numel() == 0 for x in found.values())


@pytest.mark.parametrize("operator", OPERATORS)
def test_in_pieces_and_packed(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two chunks at most, sequences of different lengths, one of them empty."""
    monkeypatch.setattr(delta_gradients, "PIECE_BYTES", 0)
    options = {"capacity": 4, "slot_order": "recency"} if operator == "dynamic" else {}
    compare(operator, inputs(165, "delta", **SMALL), cu_seqlens=torch.tensor([0, 135, 135, 165]), **options)


@pytest.mark.parametrize("options", [{"capacity": None}, {"capacity": 4, "block": 21}], ids=str)
def test_weights_narrower_than_the_memory(options: dict[str, Any]) -> None:
    compare("dynamic", inputs(70, width=3, **SMALL), **options)


def test_every_token_opens_a_state() -> None:
    compare("dynamic", inputs(70, noise=3.0, width=9, **SMALL), capacity=9, tau=0.0)


@pytest.mark.parametrize("operator", ["linear", "log_linear"])
def test_from_a_state(operator: str) -> None:
    x = inputs(80, **SMALL)
    _, state = call(operator, inputs(37, seed=1, **SMALL), backend="reference", output_final_state=True)
    single = state._map(lambda y: y.float() if y.is_floating_point() else y)
    _, expected = gradients(operator, x, "chunked", torch.float64, {"initial_state": state})
    _, found = gradients(operator, x, "triton", torch.float32, {"initial_state": single})
    for name, gradient in found.items():
        assert_close(gradient, expected[name], EXACT)


@pytest.mark.parametrize(
    "options", [{"slot_order": "recency"}, pytest.param({"temperature": 0.1}, marks=pytest.mark.slow)], ids=str
)
def test_routed(options: dict[str, Any]) -> None:
    """Through queries, sharpness and keys, beside what the weights of states do not pass."""
    compare("dynamic", inputs(70, routed=True, width=4, **SMALL), capacity=4, **options)


def test_made_again() -> None:
    """Under activation checkpointing, routed."""
    x = cast(inputs(20, routed=True, width=4, **SMALL), torch.float32)
    options = with_decisions("dynamic", cast(x, torch.float64), {"capacity": 4})
    x = {name: value.requires_grad_() for name, value in x.items()}

    def run(*values: Any) -> Any:
        return call("dynamic", dict(zip(x, values, strict=True)), backend="triton", **options)[0]

    plain = torch.autograd.grad(run(*x.values()).sum(), list(x.values()))
    again = torch.autograd.grad(checkpoint(run, *x.values(), use_reentrant=False).sum(), list(x.values()))
    assert all(a.equal(b) for a, b in zip(plain, again, strict=True))


def test_strong_decays() -> None:
    x = inputs(70, **SMALL)
    x["g"][:, ::17] = -30.0
    compare("dynamic", x, capacity=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_halves(dtype: torch.dtype) -> None:
    """Near the gradients of float32, by the digits of the dtype."""
    x = cast(inputs(80, **SMALL), dtype)
    options = with_decisions("dynamic", cast(x, torch.float64), {"capacity": 4})
    _, expected = gradients("dynamic", cast(x, torch.float64), "chunked", torch.float64, options)
    _, found = gradients("dynamic", x, "triton", dtype, options)
    for name, gradient in found.items():
        error = (gradient.double() - expected[name]).square().mean().sqrt()
        assert error <= 4 * torch.finfo(dtype).eps * expected[name].square().mean().sqrt(), name


@pytest.mark.parametrize(
    "options", [{}, {"slot_order": "recency", "cu_seqlens": torch.tensor([0, 20, 20, 90])}], ids=str
)
def test_soft_gate(options: dict[str, Any]) -> None:
    """p waits for the next state; its gradient goes to keys and values too."""
    x = inputs(90, **SMALL)
    options = with_decisions("dynamic", x, {"capacity": 4, **options}) | {"temperature": 0.1}
    o, expected = gradients("dynamic", x, "reference", torch.float64, options)
    found_o, found = gradients("dynamic", x, "triton", torch.float32, options)
    assert_close(found_o, o, EXACT)
    for name, gradient in found.items():
        assert_close(gradient, expected[name], 1e-4)


def test_soft_gate_through_full_chunks_without_a_boundary() -> None:
    x = inputs(140, **SMALL)
    options = with_decisions("dynamic", x, {"capacity": 3, "tau": 1.2, "block": 100}) | {
        "temperature": 0.1,
        "block": None,
    }
    o, expected = gradients("dynamic", x, "chunked", torch.float64, options)
    found_o, found = gradients("dynamic", x, "triton", torch.float32, options)
    assert_close(found_o, o, EXACT)
    for name, gradient in found.items():
        assert_close(gradient, expected[name], 1e-4)
