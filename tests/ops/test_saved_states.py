"""States that earlier versions saved still load, and go on as they did."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dla.ops.state import DynamicState, State, load_state
from tests.ops.common import assert_close, call

SAVED = Path(__file__).parent / "saved_states"  # written in format 1, with what came of them then
NAMES = sorted(path.name.removesuffix(".expected.safetensors") for path in SAVED.glob("*.expected.safetensors"))


@pytest.mark.parametrize("name", NAMES)
def test_format_1(name: str, tmp_path: Path) -> None:
    with safe_open(SAVED / f"{name}.expected.safetensors", framework="pt") as file:
        operator, options = file.metadata()["operator"], ast.literal_eval(file.metadata()["options"])
        expected = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    x = {key.removeprefix("x."): value for key, value in expected.items() if key.startswith("x.")}
    loaded = load_state(SAVED / f"{name}.safetensors")
    loaded.save(tmp_path / "again.safetensors")
    for state in (loaded, load_state(tmp_path / "again.safetensors")):
        assert_close(state.dense(), expected["dense"], 1e-12)
        if isinstance(state, DynamicState):
            assert state.counts.equal(expected["counts"])
            assert_close(state.scores, expected["scores"], 1e-6)
        o, after = call(operator, x, **options, initial_state=state, output_final_state=True)
        assert_close(o, expected["o"], 1e-12)
        assert_close(after.dense(), expected["after"], 1e-12)


def test_all_kinds_are_there() -> None:
    assert len(NAMES) == 7
    kinds = set()
    for name in NAMES:
        with safe_open(SAVED / f"{name}.safetensors", framework="pt") as file:
            kinds.add(file.metadata()["kind"])
            assert "format" not in file.metadata()
    assert kinds == {"LinearState", "LogLinearState", "DynamicState", "TokenState"}


def test_without_a_capacity_is_the_same_class() -> None:
    assert type(load_state(SAVED / "tokens.safetensors")) is type(load_state(SAVED / "dynamic.safetensors"))


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    state = load_state(SAVED / "dynamic.safetensors")
    assert state.label()["format"] == "3"
    save_file(state.tensors(), tmp_path / "new.safetensors", metadata={**state.label(), "format": "4"})
    with pytest.raises(ValueError, match="format 4 needs a newer version"):
        load_state(tmp_path / "new.safetensors")


def test_tensors_that_are_no_state_are_refused() -> None:
    for name in ("dynamic", "tokens", "linear"):
        state = load_state(SAVED / f"{name}.safetensors")
        tensors = {**state.tensors(), "more": torch.zeros(2)}
        with pytest.raises(ValueError, match="more"):
            State.restore(state.label(), tensors)
        with pytest.raises(ValueError, match="length"):
            State.restore(state.label(), {key: x for key, x in state.tensors().items() if key != "length"})


def test_a_state_that_faded_to_nothing_is_loaded(tmp_path: Path) -> None:
    """Kernels drop a matrix whose decay has reached zero: its state then has tokens, and neither matrix nor rows."""
    k, v = torch.zeros(2, 1, 700, 1, 16).unbind()
    k[:, :640, :, 0] = k[:, 640:, :, 1] = v[..., 0] = 1
    x = {"q": torch.randn(1, 700, 1, 16), "k": k, "v": v, "lam": torch.ones(1, 700, 1, 6)}
    x["g"] = torch.full((1, 700, 1), -2.0)
    _, state = call("dynamic", x, capacity=6, output_final_state=True)
    state.save(tmp_path / "faded.safetensors")
    loaded = load_state(tmp_path / "faded.safetensors")
    assert loaded.counts.equal(state.counts)
    assert loaded.counts[0, 0, :2].tolist() == [640, 60]
    later = {name: z[:, :1] for name, z in x.items()}
    for one in (state, loaded):
        o, after = call("dynamic", later, capacity=6, initial_state=one, output_final_state=True)
        assert o.isfinite().all()
        assert after.counts[0, 0, :3].tolist() == [640, 60, 1]
