"""Short states as rows with delta steps: whatever number of tokens makes a state a matrix, everything is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dla.ops.gpu import delta_gradients, delta_memories
from dla.ops.gpu.delta_states import NEVER, Boundaries
from dla.ops.problem import Layout
from tests.ops.common import Inputs, assert_close
from tests.ops.gpu.interpreted.delta import SMALL, gradients, inputs, poisoned, with_decisions  # noqa: F401
from tests.ops.gpu.interpreted.test_attend import compare

PACKED = {"capacity": 6, "slot_order": "recency", "cu_seqlens": torch.tensor([0, 15, 15, 210])}
LEAST = [20, 100, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5, 64, 1000))]
SOFT = {"temperature": 0.1}


def set_least(least: int, monkeypatch: pytest.MonkeyPatch, pieces: bool = False) -> None:
    monkeypatch.setattr(delta_memories, "LEAST", least)
    if pieces:  # two chunks at a time
        monkeypatch.setattr(delta_gradients, "PIECE_BYTES", 0)
        monkeypatch.setattr(delta_gradients, "ROWS_BYTES", 0)


@pytest.mark.parametrize("least", LEAST)
@pytest.mark.parametrize("options", [{"capacity": 4}, PACKED], ids=["capacity 4", "packed"])
def test_outputs_and_states(least: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    set_least(least, monkeypatch)
    compare("dynamic", lasting(210), **options)


def lasting(T: int, **sizes: Any) -> Inputs:
    """What is written stays for some chunks."""
    x = inputs(T, **{**SMALL, "seed": 1, **sizes})
    return {**x, "g": x["g"] / 32, "beta": x["beta"] / 4}


def compare_gradients(T: int, options: dict[str, Any], more: dict[str, Any], **sizes: Any) -> None:
    x = lasting(T, **sizes)
    options = with_decisions("dynamic", x, options) | more
    o, expected = gradients("dynamic", x, "chunked", torch.float64, options)
    found_o, found = gradients("dynamic", x, "triton", torch.float32, options)
    assert_close(found_o, o, 2e-5)
    for name, gradient in found.items():
        assert_close(gradient, expected[name], 1e-4 if "temperature" in more else 2e-5)


@pytest.mark.parametrize("least", LEAST)
@pytest.mark.parametrize("more", [{}, SOFT], ids=["hard", "soft"])
@pytest.mark.parametrize("options", [{"capacity": 4}, PACKED], ids=["capacity 4", "packed"])
def test_gradients(least: int, options: dict[str, Any], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    set_least(least, monkeypatch, pieces=True)
    compare_gradients(210, options, more)


@pytest.mark.parametrize("least", [20, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 64, 90, 130))])
def test_states_that_wait_for_chunks(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries are rare: both parts of a token are in matrices, in rows, or one in each."""
    set_least(least, monkeypatch, pieces=True)
    compare_gradients(260, {"capacity": 3, "tau": 1.2, "block": 100}, SOFT | {"block": None})


@pytest.mark.slow
@pytest.mark.parametrize("least", [20, 90])
@pytest.mark.parametrize("more", [{}, SOFT], ids=["hard", "soft"])
def test_odd_widths_and_groups(least: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    set_least(least, monkeypatch)
    compare_gradients(210, {"capacity": 5}, more, H=2, Hk=1, dk=24, dv=40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("more", [{}, pytest.param(SOFT, marks=pytest.mark.slow)], ids=["hard", "soft"])
def test_halves(dtype: torch.dtype, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the gradients of float32, by the digits of the dtype."""
    set_least(20, monkeypatch)
    x = {name: value.to(dtype).double() if name in "qkv" else value for name, value in lasting(140).items()}
    options = with_decisions("dynamic", x, {"capacity": 4}) | more
    _, expected = gradients("dynamic", x, "chunked", torch.float64, options)
    _, found = gradients("dynamic", x, "triton", dtype, options)
    for name, gradient in found.items():
        error = (gradient.double() - expected[name]).square().mean().sqrt()
        assert error <= 4 * torch.finfo(dtype).eps * expected[name].square().mean().sqrt(), name


def test_boundaries() -> None:
    opened = torch.tensor([[1, 0, 0, 1, 0, 1, 0, 0], [1, 1, 0, 0, 0, 1, 0, 1]], dtype=torch.bool).T
    found = Boundaries.of(opened, Layout.of(1, 8, torch.tensor([0, 5, 5, 8])))
    assert found.last.T.tolist() == [[0, 0, 0, 3, 3, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 2]]
    n = NEVER
    assert found.following.T.tolist() == [[0, 3, 3, 3, n, 0, n, n], [0, 1, n, n, n, 0, 2, 2]]
