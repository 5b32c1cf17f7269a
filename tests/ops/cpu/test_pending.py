"""Decoding steps with the delta rule leave transitions for later; nobody who looks at the state may miss them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dla.ops.cpu.ground import PENDING
from dla.ops.state import DynamicState
from tests.ops.common import Inputs, call, cast, cut, make_inputs
from tests.ops.cpu.common import needs_library

pytestmark = needs_library

START, T, B = 40, 100, 3
OPTIONS: dict[str, Any] = {"capacity": 4, "tau": 1.0}


def inputs(mode: str = "gated_delta") -> Inputs:
    return cast(make_inputs(mode, B=B, T=T, H=4, Hk=2, dk=24, dv=21, routed=True), torch.float32)


def begun(x: Inputs) -> DynamicState:
    return call("dynamic", cut(x, 0, START), **OPTIONS, output_final_state=True)[1]


def steps(x: Inputs, state: DynamicState, start: int, end: int, backend: str) -> torch.Tensor:
    outputs = [
        call("dynamic", cut(x, t, t + 1), **OPTIONS, initial_state=state, inplace=True, backend=backend)[0]
        for t in range(start, end)
    ]
    return torch.cat(outputs, 1)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 2e-5 * expected.abs().max().clamp_min(1))


def pending(state: DynamicState) -> int:
    """The most transitions that a head has before it."""
    ground = state.kept.ground
    return 0 if ground is None else int(ground.tensors["pending"].max())


def saved(state: DynamicState, path: Path) -> DynamicState:
    state.save(path / "state.safetensors")
    return DynamicState.load(path / "state.safetensors")


LOOKS: dict[str, Callable[[DynamicState, Path], DynamicState]] = {
    "the state itself": lambda state, path: state,
    "clone": lambda state, path: state.clone(),
    "to": lambda state, path: state.to("cpu"),
    "select": lambda state, path: state.select([2, 0, 1]).select([1, 2, 0]),
    "cat": lambda state, path: DynamicState.cat([state.select([0]), state.select([1, 2])]),
    "cat of itself": lambda state, path: DynamicState.cat([state, state]).select([0, 4, 2]),
    "save and load": saved,
    "deepcopy": lambda state, path: copy.deepcopy(state),
    "pickle": lambda state, path: pickle.loads(pickle.dumps(state)),
    "assign": lambda state, path: begun(inputs()).assign(state),
    "tensors": lambda state, path: DynamicState.from_tensors(state.tensors(), state.settings()),
    "another capacity and back": lambda state, path: state.resized(6).resized(4),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("count", [1, 2, 5, 15, 16, 17])
def test_whoever_looks_sees_all(look: str, count: int, tmp_path: Path) -> None:
    x = inputs()
    state, plain = begun(x), begun(x)
    end = START + count
    assert close(steps(x, state, START, end, "cpu"), steps(x, plain, START, end, "chunked"))
    if count < PENDING:
        assert pending(state) > 0
    found = LOOKS[look](state, tmp_path)
    assert close(found.dense(), plain.dense()) and close(found.held.current(), plain.held.current())
    assert found.counts.equal(plain.counts) and close(found.keys, plain.keys)  # type: ignore[arg-type]
    found.check()
    assert close(steps(x, found, end, end + 20, "cpu"), steps(x, plain, end, end + 20, "chunked"))


GOES_ON: dict[str, Callable[[Inputs, DynamicState], Any]] = {
    "a prefill": lambda x, state: call("dynamic", cut(x, 80, 90), **OPTIONS, initial_state=state, inplace=True),
    "a prefill of a copy": lambda x, state: call(
        "dynamic", cut(x, 80, 90), **OPTIONS, initial_state=state, output_final_state=True
    ),
    "a step in torch": lambda x, state: steps(x, state, 80, 81, "chunked"),
    "the reference": lambda x, state: steps(x, state, 80, 81, "reference"),
    "steps without beta": lambda x, state: steps({n: y for n, y in x.items() if n != "beta"}, state, 80, 85, "cpu"),
    "other weights": lambda x, state: steps({**x, "lam": x["lam"][..., :2].contiguous()}, state, 80, 85, "cpu"),
    "another dtype": lambda x, state: state.stored_in(torch.float64).stored_in(torch.float32),
}


@pytest.mark.parametrize("goes_on", GOES_ON)
@pytest.mark.parametrize("count", [1, 7, 16, 17])
def test_whoever_goes_on_finds_all(goes_on: str, count: int) -> None:
    x = inputs()
    state = begun(x)
    plain = state.clone()
    steps(x, state, START, START + count, "cpu"), steps(x, plain, START, START + count, "chunked")
    GOES_ON[goes_on](x, state), GOES_ON[goes_on](x, plain)
    assert close(state.dense(), plain.dense())
    assert close(steps(x, state, 90, T, "cpu"), steps(x, plain, 90, T, "chunked"))


@pytest.mark.parametrize("score", ["token", "state"])
def test_steps_beyond_one(score: str) -> None:
    """Transitions that turn a direction around, and steps that point backwards."""
    x = inputs()
    for beta in (1.95 * x["beta"], 0.5 * x["beta"] - 0.1):
        y = x | {"beta": beta}
        state, options = begun(y), OPTIONS | {"score": score}
        plain = state.clone()
        for t in range(START, T):
            found, expected = (
                call("dynamic", cut(y, t, t + 1), **options, initial_state=one, inplace=True, backend=backend)[0]
                for one, backend in ((state, "cpu"), (plain, "chunked"))
            )
            assert close(found, expected)
        assert state.counts.equal(plain.counts) and close(state.scores, plain.scores)


def test_they_wait_for_a_full_block() -> None:
    """With no fold in between: one more every step, and none after sixteen."""
    x = cast(make_inputs("delta", B=1, T=60, H=2, dk=64, dv=64, noise=0.1), torch.float32)
    _, state = call("dynamic", cut(x, 0, 4), capacity=30, tau=0.0, output_final_state=True)
    seen = []
    for t in range(4, 28):
        call("dynamic", cut(x, t, t + 1), capacity=30, tau=0.0, initial_state=state, inplace=True, backend="cpu")
        assert (
            state.nbytes > 0 and state.shape and state.counts.any() and "matrices" in repr(state)
        )  # nobody looks inside
        seen.append(pending(state))
    assert seen == [i % PENDING for i in range(1, 25)]


@pytest.mark.parametrize("name", ["k", "v", "beta", "g", "q"])
def test_poison_stays_in_its_head(name: str) -> None:
    x = inputs()
    poisoned = {key: tensor.clone() for key, tensor in x.items()}
    poisoned[name][1, 50, 1 if name in ("k", "q") else 2] = math.nan  # a key head has two heads
    others = [0, 1] if name in ("k", "q") else [0, 1, 3]
    state, other = begun(x), begun(x)
    clean, found = steps(x, state, START, T, "cpu"), steps(poisoned, other, START, T, "cpu")
    assert found[[0, 2]].equal(clean[[0, 2]]) and found[1, :, others].equal(clean[1, :, others])
    assert found[1, : 50 - START].equal(clean[1, : 50 - START])
    assert found[1, 50 - START, 2].isnan().any()
    assert state.dense()[[0, 2]].equal(other.dense()[[0, 2]])
    assert state.dense()[1, others].equal(other.dense()[1, others])


def test_a_damaged_block_is_refused() -> None:
    x = inputs()
    state = begun(x)
    steps(x, state, START, 45, "cpu")
    for value in (-1, PENDING, 1000):
        state.kept.ground.tensors["pending"][0, 0] = value
        with pytest.raises(ValueError, match="states that cannot be"):
            steps(x, state, 45, 46, "cpu")
        with pytest.raises(ValueError, match="states that cannot be"):
            state.dense()
