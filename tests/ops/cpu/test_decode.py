"""The decoding step in C++: as a prefill of the same tokens, whatever the state was when it began."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dla
from dla.inspect.streams import correlated
from dla.ops.state import DynamicState
from tests.ops.common import MODES, OPERATORS, Case, Inputs, call, cast, cut, make_inputs, segment
from tests.ops.cpu.common import kernel_cases, needs_library

pytestmark = needs_library

T = 150


def steps(operator: str, x: Inputs, state: Any, start: int, end: int, made: Any = None, **options: Any) -> torch.Tensor:
    """Outputs of tokens start … end, one at a time, in place."""
    found = []
    for t in range(start, end):
        if made is not None:
            counts = state.counts
            dies = (made.merged[:, t] >= 0)[..., None] & (
                torch.arange(counts.shape[2]) == made.merged[:, t, :, None] + 1
            )
            initial = torch.where(dies, 0, torch.where(counts > 0, 2**31 - 1, -1)).int()
            opens = made.boundary[:, t : t + 1]
            death = torch.where(opens, 2**31 - 1, -1).int()
            one = dla.Segmentation(made.score[:, t : t + 1], opens, death, None, counts, initial)
            options["segmentation"] = one
        o, after = call(operator, cut(x, t, t + 1), **options, initial_state=state, inplace=True, backend="cpu")
        assert after is state
        found.append(o)
    return torch.cat(found, 1)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1))


@pytest.mark.parametrize("case", kernel_cases(60, 70, tuple(MODES), packed=False, soft=False), ids=str)
@pytest.mark.parametrize("split", [1, 40, 64])
def test_steps_are_a_prefill(case: Case, split: int, level: str) -> None:
    if case.capacity is None:
        case = replace(case, capacity=7)
    x = cast(case.inputs(T, seed=split, dk=6, dv=5), torch.float32)
    options = case.options(T)
    made = segment(x, **case.rules(T))
    expected, whole = call("dynamic", x, **options, segmentation=made, output_final_state=True)
    first = replace(made, score=made.score[:, :split], boundary=made.boundary[:, :split])
    death = made.death[:, :split].clone()
    death[death >= split] = 2**31 - 1
    first = dla.Segmentation(first.score, first.boundary, death)
    _, state = call("dynamic", cut(x, 0, split), **options, segmentation=first, output_final_state=True)
    found = steps("dynamic", x, state, split, T, made, **options)
    assert close(found, expected[:, split:])
    assert state.counts.equal(whole.counts) and state.length.equal(whole.length)
    assert close(state.dense(), whole.dense())
    assert close(state.scores, whole.scores)
    if case.routed:
        assert close(state.keys, whole.keys)
    state.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operator", ["linear", "log_linear"])
@pytest.mark.parametrize("split", [1, 63, 64, 100])
def test_steps_of_the_baselines(split: int, operator: str, mode: str, level: str) -> None:
    x = cast(make_inputs(mode, T=T, H=4, Hk=2, dk=7, dv=19, width=6), torch.float32)
    expected, whole = call(operator, x, output_final_state=True)
    _, state = call(operator, cut(x, 0, split), output_final_state=True)
    assert close(steps(operator, x, state, split, T), expected[:, split:])
    assert close(state.dense(), whole.dense()) and state.length.equal(whole.length)
    state.check()


@pytest.mark.parametrize("mode", ["delta", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_split_is_the_reference(operator: str, mode: str) -> None:
    x = cast(make_inputs(mode, B=1, T=40, H=2, dk=16, dv=12, width=4, seed=3), torch.float32)
    options: dict[str, Any] = {"capacity": 4} if operator == "dynamic" else {}
    expected, whole = call(operator, cast(x, torch.float64), **options, output_final_state=True, backend="reference")
    for split in range(1, 40):
        _, state = call(operator, cut(x, 0, split), **options, output_final_state=True)
        assert close(steps(operator, x, state, split, 40, **options), expected[:, split:], 2e-6), split
        assert close(state.dense(), whole.dense(), 2e-6)


@pytest.mark.parametrize("score", ["token", "state"])
@pytest.mark.parametrize("block", [None, 7])
@pytest.mark.parametrize("mode", ["decay", "delta", "gated_delta"])
def test_own_decisions_are_those_of_a_prefill(mode: str, score: str, block: int | None) -> None:
    """Hundreds of steps: states are opened, merged, folded, pools grow."""
    x = cast(make_inputs(mode, B=3, T=400, H=4, Hk=2, dk=16, dv=16, noise=0.4), torch.float32)
    options = {"tau": 0.6 if score == "token" else 0.2, "capacity": 5, "score": score, "block": block}
    expected, whole = call("dynamic", x, **options, output_final_state=True)
    _, state = call("dynamic", cut(x, 0, 3), **options, output_final_state=True)
    found = steps("dynamic", x, state, 3, 400, **options)
    same = (state.counts == whole.counts).all(-1)  # a head may have flipped a decision near its threshold
    assert same.float().mean() > 0.8
    for n, h in same.nonzero().tolist():
        assert close(found[n, :, h], expected[n, 3:, h], 1e-4)
    state.check()


def test_a_state_takes_what_it_needs() -> None:
    """W dk dv 4 bytes a head, within 15 %, after a prefill and while decoding."""
    s = correlated(0, length=3000, heads=4, key_heads=1, dk=128, dv=64)
    x = {"q": s.q, "k": s.k, "v": s.v, "lam": s.lam, "g": s.g}
    _, state = call("dynamic", cut(x, 0, 2500), output_final_state=True)
    ratios = [ratio(state)]
    for t in range(2500, 3000):
        call("dynamic", cut(x, t, t + 1), initial_state=state, inplace=True)
        ratios.append(ratio(state))
    assert max(ratios) < 1.3 and sum(ratios) / len(ratios) < 1.15, (max(ratios), sum(ratios) / len(ratios))


def ratio(state: DynamicState) -> float:
    """Bytes of matrices and rows over those of W."""
    dk, dv = state.shape[2:]
    needed = (state.counts * (dk + dv)).clamp_max(dk * dv).sum().item() * 4
    return state.content_bytes / needed


@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_state_that_is_not_to_be_changed_stays(operator: str, mode: str) -> None:
    x = cast(make_inputs(mode, T=60, dk=8, dv=8), torch.float32)
    options = {"capacity": 4} if operator == "dynamic" else {}
    _, state = call(operator, cut(x, 0, 40), **options, output_final_state=True)
    before = {name: y.clone() for name, y in state.tensors().items()}
    with dla.record() as ran:
        one, after = call(operator, cut(x, 40, 41), **options, initial_state=state, output_final_state=True)
    assert [(stage.stage, stage.backend) for stage in ran] == [("decode", "cpu")]
    assert after is not state and all(state.tensors()[name].equal(y) for name, y in before.items())
    again, _ = call(operator, cut(x, 40, 41), **options, initial_state=state, inplace=True)
    assert again.equal(one)


def test_states_of_a_batch_go_their_own_ways() -> None:
    """select, cat and clone in the middle of decoding, with pools that have free places."""
    x = cast(make_inputs("decay", B=3, T=120, H=2, dk=8, dv=8, routed=True), torch.float32)
    options = {"capacity": 4}
    _, state = call("dynamic", cut(x, 0, 30), **options, output_final_state=True)
    expected = steps("dynamic", x, state.clone(), 30, 120, **options)
    first = steps("dynamic", x, state, 30, 70, **options)
    assert first.equal(expected[:, :40])
    order = [2, 0, 1, 2]
    mixed = {name: value[order] for name, value in x.items()}
    assert steps("dynamic", mixed, state.select(order), 70, 120, **options).equal(expected[order, 40:])
    parts = [state.select([i]) for i in range(3)]
    assert steps("dynamic", x, DynamicState.cat(parts), 70, 120, **options).equal(expected[:, 40:])
    assert steps("dynamic", x, state, 70, 120, **options).equal(expected[:, 40:])


@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("threads", [2, 4])
def test_the_number_of_threads_changes_no_bit(threads: int, mode: str) -> None:
    x = cast(make_inputs(mode, B=8, T=100, H=8, dk=128, dv=128, width=5), torch.float32)
    options = {"capacity": 5}
    _, state = call("dynamic", cut(x, 0, 80), **options, output_final_state=True)
    assert state.content_bytes > 1 << 22  # large enough for more than one thread
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = steps("dynamic", x, state.clone(), 80, 100, **options)
        torch.set_num_threads(threads)
        other = state.clone()
        assert steps("dynamic", x, other, 80, 100, **options).equal(expected)
        assert other.dense().isfinite().all()  # settled by so many threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("mode", "backend"), [("decay", "cpu"), ("decay", "chunked"), ("delta", "cpu"), ("gated_delta", "cpu")]
)
def test_states_in_bfloat16(mode: str, backend: str) -> None:
    """Half the bytes; the error is that of rounding to eight bits, and does not grow over hundreds of steps."""
    x = cast(make_inputs(mode, B=2, T=500, H=4, dk=32, dv=32, width=8), torch.float32)
    options: dict[str, Any] = {"capacity": 8}
    expected, whole = call("dynamic", x, **options, output_final_state=True)
    first = {"output_final_state": True, "state_dtype": torch.bfloat16}
    _, state = call("dynamic", cut(x, 0, 100), **options, **first)
    assert state.state_dtype == torch.bfloat16 and state.dtype == torch.float32
    _, wide = call("dynamic", cut(x, 0, 100), **options, output_final_state=True)
    assert state.content_bytes < 0.55 * wide.content_bytes
    found = []
    for t in range(100, 500):
        o, after = call("dynamic", cut(x, t, t + 1), **options, initial_state=state, inplace=True, backend=backend)
        assert after is state and state.state_dtype == torch.bfloat16
        found.append(o)
    same = (state.counts == whole.counts).all(-1)
    assert same.float().mean() > 0.5
    error = (torch.cat(found, 1) - expected[:, 100:]).norm(dim=(1, 3)) / expected[:, 100:].norm(dim=(1, 3))
    assert error[same].median() < (
        0.01 if mode == "delta" else 0.005
    )  # what nothing fades adds up; one that flipped a decision on the way is further off
    state.check()


def test_a_state_stays_in_its_dtype(tmp_path: Any) -> None:
    x = cast(make_inputs("decay", T=60, dk=8, dv=8), torch.float32)
    _, state = call("dynamic", cut(x, 0, 50), capacity=4, output_final_state=True, state_dtype=torch.bfloat16)
    state.save(tmp_path / "state.safetensors")
    again = DynamicState.load(tmp_path / "state.safetensors")
    assert again.state_dtype == torch.bfloat16 and again.dense().equal(state.dense())
    with pytest.raises(ValueError, match=r"held in torch\.bfloat16"):
        call("dynamic", cut(x, 50, 60), capacity=4, initial_state=state, state_dtype=torch.float32)
    _, after = call("dynamic", cut(x, 50, 60), capacity=4, initial_state=state, output_final_state=True)
    assert after.state_dtype == torch.bfloat16
    with pytest.raises(ValueError, match="state_dtype must be one of"):
        call("dynamic", x, state_dtype=torch.int8)
    with pytest.raises(ValueError, match="needs a capacity"):
        call("dynamic", x, capacity=None, state_dtype=torch.bfloat16)
