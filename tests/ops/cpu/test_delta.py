"""The delta rule in the C++ kernels: against other people's code, across splits, and at the edges of its domain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.common import OPERATORS, Inputs, assert_close, call, cast, cut, make_inputs
from tests.ops.cpu import test_gradients
from tests.ops.cpu.common import assert_as_good_as_torch, needs_library
from tests.ops.test_external import FLOAT32, RECURRENT, ask, shaped

pytestmark = needs_library

ORACLES = [name for name, (mode, _, _) in RECURRENT.items() if "delta" in mode]


@pytest.mark.parametrize("T", [1, 63, 64, 130])
@pytest.mark.parametrize("oracle", ORACLES)
def test_other_peoples_code(oracle: str, T: int, level: str) -> None:
    x = shaped(RECURRENT[oracle][0], T, seed=T)
    expected, expected_state = ask(oracle, x)
    o, state = call("linear", x, output_final_state=True, backend="cpu")
    assert_close(o, expected, FLOAT32)
    assert_close(state.dense().squeeze(2), expected_state, FLOAT32)


def edges() -> dict[str, Inputs]:
    """Steps that forget all or turn round, none at all, keys of any length, and the same key again and again."""
    x = make_inputs("gated_delta", T=200, H=2, dk=12, dv=9, width=4)
    long = 7 * torch.rand(2, 200, 2, 1, dtype=torch.float64) + 0.1
    made = {"forgets": x | {"beta": torch.ones_like(x["beta"])}, "turns": x | {"beta": 2 * torch.ones_like(x["beta"])}}
    made["nothing"] = x | {"beta": torch.zeros_like(x["beta"])}
    made["some"] = x | {"beta": x["beta"] * (torch.arange(200)[None, :, None] % 3 == 0)}
    made["lengths"] = x | {"k": x["k"] * long, "beta": 1.9 * x["beta"] / long[..., 0].square()}
    made["one key"] = x | {"k": x["k"][:, :1].expand(-1, 200, -1, -1).contiguous()}
    made["strong decays"] = x | {"g": torch.where(torch.arange(200)[None, :, None] % 50 == 7, -torch.inf, 9 * x["g"])}
    return made


@pytest.mark.parametrize("name", edges())
@pytest.mark.parametrize("operator", OPERATORS)
def test_edges_of_the_domain(operator: str, name: str, level: str) -> None:
    options = {"capacity": 4, "block": 5} if operator == "dynamic" else {}
    assert_as_good_as_torch(operator, edges()[name], **options, output_final_state=True)


@pytest.mark.parametrize("name", edges())
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_at_the_edges(operator: str, name: str) -> None:
    options = {"capacity": 4, "block": 5} if operator == "dynamic" else {}
    test_gradients.assert_as_good_as_torch(operator, edges()[name], **options)


@pytest.mark.parametrize("T", [64 * 9, 64 * 9 + 1, 400])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_over_many_blocks_of_chunks(operator: str, T: int) -> None:
    """Blocks of 3 or 4 chunks; states grow into matrices, are merged, and fade away."""
    x = make_inputs("gated_delta", B=1, T=T, H=2, Hk=1, dk=5, dv=6, width=4)
    options = {"capacity": 6, "block": 4} if operator == "dynamic" else {}
    test_gradients.assert_as_good_as_torch(operator, x, **options)


@pytest.mark.parametrize("split", [1, 40, 64, 147])
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_steps_of_torch_go_on_where_the_kernels_end(operator: str, routed: bool, split: int) -> None:
    """And the kernels where torch's decoding steps end."""
    x = cast(make_inputs("gated_delta", T=150, H=2, dk=6, dv=5, width=4, routed=routed), torch.float32)
    options: dict[str, Any] = {"capacity": 4, "block": 3} if operator == "dynamic" else {}
    expected, last = call(operator, cast(x, torch.float64), **options, output_final_state=True, backend="reference")
    options["output_final_state"] = True
    o, state = call(operator, cut(x, 0, split), **options, backend="cpu")
    parts = [o]
    for t in range(split, min(split + 20, 150)):
        o, state = call(operator, cut(x, t, t + 1), **options, initial_state=state, backend="chunked")
        parts.append(o)
    if split + 20 < 150:
        o, state = call(operator, cut(x, split + 20, 150), **options, initial_state=state, backend="cpu")
        parts.append(o)
    assert_close(torch.cat(parts, 1), expected, 1e-5)
    assert_close(state.dense(), last.dense(), 1e-5)
