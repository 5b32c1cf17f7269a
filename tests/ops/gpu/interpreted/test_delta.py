"""The second stage with delta steps in Triton against the reference in float64, with the reference's decisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dla.ops.gpu.delta_chunks import chunk_matrices_of
from dla.ops.gpu.tiles import Tiles
from dla.ops.problem import Layout
from tests.ops.common import OPERATORS, assert_close, call, cast, cut
from tests.ops.gpu.interpreted.delta import SMALL, inputs, poisoned, with_decisions  # noqa: F401
from tests.ops.gpu.interpreted.test_attend import compare


@pytest.mark.parametrize(
    "T", [0, 1, 65, pytest.param(63, marks=pytest.mark.slow), pytest.param(150, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_lengths(operator: str, T: int) -> None:
    compare(operator, inputs(T), **({"capacity": 4} if operator == "dynamic" else {}))


@pytest.mark.parametrize("operator", OPERATORS)
def test_without_decay(operator: str) -> None:
    compare(operator, inputs(80, "delta", **SMALL), **({"capacity": 4} if operator == "dynamic" else {}))


@pytest.mark.parametrize("operator", OPERATORS)
def test_packed_and_in_pieces(operator: str) -> None:
    """Three sequences, one empty, go on from where they were: chunks of levels then begin before the call."""
    options = {"capacity": 4, "slot_order": "recency"} if operator == "dynamic" else {}
    x, state = inputs(210, seed=1, **SMALL), None
    for edges in ([0, 40, 40, 75], [75, 78, 110, 140], [140, 170, 190, 210]):
        piece = cut(x, edges[0], edges[-1])
        state = compare(operator, piece, state=state, cu_seqlens=torch.tensor(edges) - edges[0], **options)


@pytest.mark.parametrize("slot_order", ["recency", pytest.param("chronological", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{"capacity": 9}, {"capacity": None}, {"capacity": 4, "block": 21}], ids=str)
def test_weights_narrower_than_the_memory(options: dict[str, Any], slot_order: str) -> None:
    compare("dynamic", inputs(80, width=3, **SMALL), slot_order=slot_order, **options)


def test_without_a_capacity_from_a_state() -> None:
    x = inputs(110, width=4, **SMALL)
    state = compare("dynamic", cut(x, 0, 40), capacity=None, slot_order="recency")
    compare("dynamic", cut(x, 40, 110), state=state, capacity=None, slot_order="recency")


def test_every_token_opens_a_state() -> None:
    compare("dynamic", inputs(80, noise=3.0, width=12, **SMALL), capacity=12, tau=0.0)


def test_batch_and_routed() -> None:
    x = inputs(80, routed=True, width=4, B=2, **SMALL)
    state = compare("dynamic", cut(x, 0, 30), capacity=5, slot_order="recency")
    compare("dynamic", cut(x, 30, 80), state=state, capacity=5, slot_order="recency")


@pytest.mark.parametrize("decay", [-math.inf, pytest.param(-30.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_decays(operator: str, decay: float) -> None:
    x = inputs(80, **SMALL)
    x["g"][:, ::17] = decay
    compare(operator, x, 5e-5, **({"capacity": 4} if operator == "dynamic" else {}))


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_keys_that_repeat_themselves(beta: float) -> None:
    """Powers of the triangular matrix would be far larger than its inverse."""
    k = torch.nn.functional.normalize(torch.ones(1, 64, 1, 16, dtype=torch.float64), dim=-1)
    steps = torch.full((1, 64, 1), beta, dtype=torch.float64)
    tiles = Tiles.of(Layout.of(1, 64, None), k.device)
    made = chunk_matrices_of(k[0].float(), k[0].float(), steps[0].float(), tiles)
    lower = (k[0, :, 0] @ k[0, :, 0].T).tril(-1) * beta
    expected = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + lower)
    assert_close(made.T[0, 0], expected, 1e-5)


def test_behind_one_large_token() -> None:
    x = inputs(100, **SMALL)
    x["v"][:, 5] *= 1e4
    compare("dynamic", x, capacity=8)


@pytest.mark.parametrize("operator", OPERATORS)
def test_nan_stays_in_its_packed_sequence(operator: str) -> None:
    x = cast(inputs(110, **SMALL), torch.float32)
    bad = {key: value.clone() for key, value in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        bad[name][0, 50] = math.nan
    edges = torch.tensor([0, 40, 80, 110])
    options: dict[str, Any] = {"cu_seqlens": edges, "capacity": 3} if operator == "dynamic" else {"cu_seqlens": edges}
    options = with_decisions(operator, cast(x, torch.float64), options) | {"output_final_state": True}
    (clean, before), (o, after) = (call(operator, y, backend="triton", **options) for y in (x, bad))
    assert o[:, :40].equal(clean[:, :40]) and o[:, 80:].equal(clean[:, 80:])
    for n in (0, 2):
        assert after.dense()[n].equal(before.dense()[n])
    assert bool(o[0, 50].isnan().any())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", ["dynamic", pytest.param("linear", marks=pytest.mark.slow)])
def test_halves(operator: str, dtype: torch.dtype) -> None:
    """At most twice the error of the chunked form in torch, in the same dtype."""
    x = cast(inputs(130, **SMALL, width=8), dtype)
    steps = {"g": x["g"].float(), "beta": x["beta"].float()}
    options = with_decisions(operator, cast(x, torch.float64), {"capacity": 6} if operator == "dynamic" else {})
    exact, _ = call(operator, cast(x, torch.float64), backend="reference", **options)
    o, _ = call(operator, {**x, **steps}, backend="triton", **options)
    assert o.dtype == dtype
    plain = exact.to(dtype).double() - exact  # the rounding of the outputs alone
    assert (o.double() - exact).square().mean().sqrt() <= 4 * plain.square().mean().sqrt()
