"""What is carried between calls, as a value: its contents, copies, selections, files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dla.ops.state import DynamicState, LinearState, LogLinearState, State, load_state
from tests.ops.common import (
    BACKENDS,
    OPERATORS,
    Case,
    Inputs,
    arguments,
    assert_close,
    assert_same_state,
    call,
    make_inputs,
    pick,
    segment,
    state_bytes,
)

KINDS = {"linear": LinearState, "log_linear": LogLinearState, "dynamic": DynamicState}
T = 40
every_operator = pytest.mark.parametrize("operator", OPERATORS)
every_memory = pytest.mark.parametrize(
    ("operator", "case"),
    [
        ("linear", Case("gated_delta")),
        ("log_linear", Case("gated_delta")),
        ("dynamic", Case("gated_delta")),
        ("dynamic", Case("decay", capacity=None)),
        ("dynamic", Case("delta", capacity=4, routed=True)),
        ("dynamic", Case("gated_delta", capacity=None, routed=True)),
    ],
    ids=str,
)


def options_of(operator: str, case: Case) -> dict[str, Any]:
    return case.options(T) if operator == "dynamic" else {}


def state_after(operator: str, case: Case, length: int = T, seed: int = 0, **shape: Any) -> Any:
    x, backend = case.inputs(length, seed, **shape), shape.pop("backend", "auto")
    return call(operator, x, **options_of(operator, case), output_final_state=True, backend=backend)[1]


def go_on(operator: str, case: Case, state: Any, x: Inputs | None = None) -> tuple[torch.Tensor, Any]:
    x = case.inputs(9, seed=50, B=state.dense().shape[0]) if x is None else x
    return call(operator, x, **options_of(operator, case), initial_state=state, output_final_state=True)


# --- contents --------------------------------------------------------------------------------------------------------


@every_memory
def test_kind(operator: str, case: Case) -> None:
    assert isinstance(state_after(operator, case), KINDS[operator])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capacity", [2, 5, 30, None])
def test_dynamic_contents(capacity: int | None, backend: str) -> None:
    """Counts and scores are those of the spans; the matrices read with lam give the last output."""
    case = Case("gated_delta", capacity=capacity)
    x = case.inputs(T) | {"lam": make_inputs(T=T, width=T)["lam"]}
    o, state = call("dynamic", x, **case.options(T), output_final_state=True, backend=backend)
    found = segment(x, **case.rules(T))
    dense, counts, scores = state.dense(), state.counts, state.scores
    width = dense.shape[2]
    assert width == (capacity or max(len(found.spans(b, h)) for b in range(2) for h in range(2)))
    assert dense.shape == (2, 2, width, 4, 3) and dense.dtype == torch.float64
    assert counts.shape == (2, 2, width) and counts.dtype == torch.int64
    assert scores.shape == (2, 2, width) and scores.dtype == torch.float32
    for b in range(2):
        for h in range(2):
            spans = found.spans(b, h)
            padding = [0] * (width - len(spans))
            assert counts[b, h].tolist() == [end - start for start, end in spans] + padding
            sums = [found.score[b, start:end, h].sum().item() for start, end in spans] + padding
            assert scores[b, h].tolist() == pytest.approx(sums, abs=1e-5)
            assert not dense[b, h, len(spans) :].any()
            reads = x["q"][b, -1, h] @ dense[b, h]  # [K, dv]
            assert_close(4**-0.5 * x["lam"][b, -1, h, :width] @ reads, o[b, -1, h])


def test_linear_contents() -> None:
    x = Case("gated_delta").inputs(T)
    o, state = call("linear", x, output_final_state=True)
    dense = state.dense()
    assert dense.shape == (2, 2, 1, 4, 3)
    assert_close(4**-0.5 * torch.einsum("bhd,bhkdv->bhv", x["q"][:, -1], dense), o[:, -1])


@pytest.mark.parametrize("length", [1, 2, 7, 8, 13, 40])
def test_log_linear_contents(length: int) -> None:
    """One matrix per set bit of the length, oldest first, which add up to the single state."""
    x = Case("gated_delta").inputs(length)
    _, state = call("log_linear", x, output_final_state=True)
    _, single = call("linear", x, output_final_state=True)
    dense = state.dense()
    used = dense.flatten(-2).any(-1)  # [N, H, levels]
    blocks = length.bit_count()
    assert used[..., :blocks].all() and not used[..., blocks:].any()
    assert_close(dense.sum(2), single.dense()[:, :, 0])
    first = 1 << (length.bit_length() - 1)  # the oldest block ends here
    rest = {name: value[:, first:] for name, value in x.items()}
    young = {name: value[:, :first] for name, value in x.items()}
    _, oldest = call("linear", young, output_final_state=True)
    _, oldest = call("linear", rest | {"v": 0 * rest["v"]}, initial_state=oldest, output_final_state=True)
    assert_close(dense[:, :, 0], oldest.dense()[:, :, 0])


@every_memory
def test_nbytes(operator: str, case: Case) -> None:
    """A positive number that grows with the batch, and not with the length where there is a capacity."""
    one, two = state_after(operator, case, B=1).nbytes, state_after(operator, case, B=2).nbytes
    assert isinstance(one, int) and two == 2 * one
    longer = state_after(operator, case, 4 * T, B=1).nbytes
    if operator == "linear":
        assert longer == one >= 2 * 4 * 3 * 8
    elif operator == "log_linear" or case.capacity is None:
        assert longer > one
    else:
        assert one >= 2 * case.capacity * 4 * 3 * 8 or one < two  # at least the dense matrices, or fewer as tokens
        assert longer <= 2 * one


@every_memory
def test_states_do_not_hold_the_graph(operator: str, case: Case) -> None:
    x = {name: value.requires_grad_() for name, value in case.inputs(T).items()}
    _, state = call(operator, x, **options_of(operator, case), output_final_state=True)
    assert not state.dense().requires_grad


# --- copies ----------------------------------------------------------------------------------------------------------


@every_memory
def test_clone_is_apart(operator: str, case: Case) -> None:
    state = state_after(operator, case)
    copy, shown = state.clone(), state_bytes(state)
    assert_same_state(copy, state, 0.0)
    step = case.inputs(1, seed=8)
    call(operator, step, **options_of(operator, case), initial_state=state, output_final_state=True, inplace=True)
    assert not state.dense().sum().equal(shown["dense"].sum())
    assert all(value.equal(shown[name]) for name, value in state_bytes(copy).items())


@every_memory
def test_to(operator: str, case: Case) -> None:
    state = state_after(operator, case)
    there = state.to("meta")
    assert {x.device.type for x in there.tensors().values()} == {"meta"} and there.nbytes == state.nbytes
    assert state.dense().device.type == "cpu"
    assert_same_state(state.to(torch.device("cpu")), state, 0.0)


@every_memory
def test_select(operator: str, case: Case) -> None:
    """Beam search: any order, with repeats, and every copy goes its own way."""
    state = state_after(operator, case, B=3)
    beams = [2, 0, 2, 1, 2]
    chosen = state.select(torch.tensor(beams))
    assert chosen.dense().equal(state.dense()[beams])
    assert_same_state(state.select(beams), chosen, 0.0)
    x = case.inputs(9, seed=7, B=5)
    if "route" in x and x["route"].dim() == 1:
        x["route"] = x["route"].expand(5, 9, 2).contiguous()
    o, after = go_on(operator, case, chosen, x)
    for i, beam in enumerate(beams):
        expected, expected_state = go_on(operator, case, state.select([beam]), pick(x, i))
        assert_close(o[i : i + 1], expected)
        alone = after.select([i])
        assert_close(alone.dense().sum(2), expected_state.dense().sum(2))
    call(
        operator,
        {name: value[:, :1] for name, value in x.items()},
        **options_of(operator, case),
        initial_state=chosen,
        output_final_state=True,
        inplace=True,
    )
    assert not chosen.dense()[0].sum().equal(chosen.dense()[2].sum()), "repeats share memory"


@every_memory
def test_cat(operator: str, case: Case) -> None:
    """Sequences of different lengths go on in one batch."""
    parts = [state_after(operator, case, length, seed=length, B=B) for length, B in ((5, 1), (T, 2), (17, 1))]
    joined = KINDS[operator].cat(parts)
    assert_same_state(State.cat(parts), joined, 0.0)  # whatever kind they are of
    x = case.inputs(9, seed=2, B=4)
    o, after = go_on(operator, case, joined, x)
    row = 0
    for part in parts:
        rows = slice(row, row + part.dense().shape[0])
        mine = {name: value if value.dim() == 1 else value[rows] for name, value in x.items()}
        expected, expected_state = go_on(operator, case, part, mine)
        assert_close(o[rows], expected)
        assert_close(after.dense()[rows].sum(2), expected_state.dense().sum(2))
        row = rows.stop
    assert row == 4
    assert_same_state(KINDS[operator].cat([joined.select([1, 2]), joined.select([0])]), joined.select([1, 2, 0]), 0.0)


def test_cat_refuses_a_mixture() -> None:
    states = [
        state_after("dynamic", Case(capacity=3)),
        state_after("dynamic", Case(capacity=4)),
        state_after("dynamic", Case(capacity=3, routed=True)),
        state_after("dynamic", Case(capacity=3), H=4),
        state_after("linear", Case()),
    ]
    for other in states[1:]:
        for pair in ([states[0], other], [other, states[0]]):
            with pytest.raises(ValueError, match="cat"):
                DynamicState.cat(pair)


# --- files -----------------------------------------------------------------------------------------------------------

CONTINUE = """
import sys, torch
from safetensors.torch import load_file, save_file
from dla import ops
from dla.ops.state import load_state
folder, operator, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
o, state = getattr(ops, operator)(**load_file(folder + "/x.safetensors"), **options,
    initial_state=load_state(folder + "/state.safetensors"), output_final_state=True)
save_file({"o": o.contiguous()}, folder + "/o.safetensors")
state.save(folder + "/after.safetensors")
"""


@every_memory
def test_a_new_process_continues_from_a_file(operator: str, case: Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = state_after(operator, case)
    state.save(tmp_path / "state.safetensors")
    assert_same_state(KINDS[operator].load(tmp_path / "state.safetensors"), state, 0.0)
    assert_same_state(load_state(tmp_path / "state.safetensors"), state, 0.0)

    x = arguments(operator, case.inputs(9, seed=3))
    save_file({name: value.contiguous() for name, value in x.items()}, tmp_path / "x.safetensors")
    name = f"{operator}_attention" if operator != "dynamic" else "dynamic_linear_attention"
    command = [sys.executable, "-c", CONTINUE, str(tmp_path), name, repr(options_of(operator, case))]
    subprocess.run(command, check=True, env=None, timeout=120)
    expected, expected_state = go_on(operator, case, state, x)
    assert_close(load_file(tmp_path / "o.safetensors")["o"], expected, 1e-12)
    assert_same_state(load_state(tmp_path / "after.safetensors"), expected_state, 1e-12)


def test_a_saved_state_keeps_its_settings(tmp_path: Path) -> None:
    state_after("dynamic", Case(capacity=3)).save(tmp_path / "state.safetensors")
    loaded = load_state(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="capacity"):
        call("dynamic", Case(capacity=4).inputs(5), capacity=4, initial_state=loaded)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="other"):
        load_state(tmp_path / "other.safetensors")
    state_after("linear", Case()).save(tmp_path / "linear.safetensors")
    with pytest.raises(ValueError, match="LinearState"):
        DynamicState.load(tmp_path / "linear.safetensors")


# --- in place --------------------------------------------------------------------------------------------------------


@every_memory
@pytest.mark.parametrize("steps", [1, 5])
def test_inplace_returns_the_given_object(operator: str, case: Case, steps: int) -> None:
    state = state_after(operator, case)
    x = case.inputs(steps, seed=4)
    expected, expected_state = go_on(operator, case, state, x)
    o, after = call(
        operator, x, **options_of(operator, case), initial_state=state, output_final_state=True, inplace=True
    )
    assert after is state
    assert_close(o, expected)
    assert_same_state(state, expected_state)
