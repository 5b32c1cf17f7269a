"""The decoding step in Triton, against one call of the reference in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dla.bench.gpu_cases import Case, Inputs, Sizes, both, call, cases, few_cases, inputs, tokens
from dla.bench.gpu_checks import decoded, difference
from dla.ops import segment
from dla.ops.state import DynamicState, load_state
from dla.ops.state.slots import Slots

SIZES = Sizes()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not written first reads as NaN."""
    empty_like, new_empty = torch.empty_like, torch.Tensor.new_empty

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else 2**20)

    monkeypatch.setattr(torch, "empty_like", lambda x, **more: poison(empty_like(x, **more)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **more: poison(new_empty(x, *size, **more)))


def check(case: Case, sizes: Sizes = SIZES, **more: Any) -> None:
    made = decoded(case, sizes, "triton", **more)
    assert made.holds and not made.refused, made


# the last ones have both everything and their opposites
@pytest.mark.parametrize("case", few_cases()[-2:], ids=str)
def test_as_the_reference(case: Case) -> None:
    check(case, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in cases() if case not in few_cases()[-2:]], ids=str)
def test_as_the_reference_in_every_case(case: Case) -> None:
    check(case, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", few_cases(), ids=str)
def test_from_the_first_token_on(case: Case) -> None:
    check(case, replace(SIZES, prompt=1))


@pytest.mark.parametrize("memory", ["single", "log_linear", "dynamic"])
def test_grouped_keys_odd_widths_and_several_tiles(memory: Any) -> None:
    """Three heads of two sequences on one key head; neither width is a power of two, nor a multiple of a tile."""
    sizes = Sizes(batch=2, length=14, heads=3, dk=20, dv=37, capacity=3, width=8)
    check(Case(memory, beta=True, routed=memory == "dynamic"), sizes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype: torch.dtype) -> None:
    check(Case("dynamic", routed=True), replace(SIZES, length=20, batch=1), dtype=dtype)


def step(case: Case, x: Inputs, state: Any, t: int, **options: Any) -> tuple[torch.Tensor, Any]:
    return call(case, tokens(x, t, t + 1), SIZES, initial_state=state, **{"backend": "triton", **options})


def run(case: Case, x: Inputs, state: Any, start: int, end: int, **options: Any) -> torch.Tensor:
    return torch.cat([step(case, x, state, t, inplace=True, **options)[0] for t in range(start, end)], 1)


def prompted(case: Case, seed: int = 0) -> tuple[Inputs, torch.Tensor, Any]:
    """Inputs, the outputs of the reference, and the state after some tokens."""
    x, exact = both(case, SIZES, torch.float32, "cpu", seed)
    expected, _ = call(case, exact, SIZES, backend="reference")
    return x, expected, call(case, tokens(x, 0, SIZES.prompt), SIZES)[1]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert difference(found, expected) <= 2e-5


@pytest.mark.parametrize("memory", ["single", "log_linear", "dynamic"])
def test_a_state_is_a_value(memory: Any, tmp_path: Path) -> None:
    """Steps that may not change their state; copies, files, selections and batches between steps."""
    case = Case(memory, beta=True, routed=memory == "dynamic")
    x, expected, state = prompted(case)
    a, b, c, d = (SIZES.prompt + i for i in (6, 9, 12, 15))
    assert_close(run(case, x, state, SIZES.prompt, a), expected[:, SIZES.prompt : a])
    copy, before = state.clone(), state.dense().clone()
    if isinstance(state, DynamicState):
        state.slots  # noqa: B018  (asking for matrices has made it spans)
        assert isinstance(state.clone().kept, Slots) and isinstance(state.select([0]).kept, Slots)
    o, after = step(case, x, state, a)
    assert after is not state and torch.equal(state.dense(), before)
    assert_close(o, expected[:, a : a + 1])
    assert_close(run(case, x, copy, a, b), expected[:, a:b])
    copy.save(tmp_path / "state.safetensors")
    loaded = load_state(tmp_path / "state.safetensors")
    assert_close(run(case, x, loaded, b, c), expected[:, b:c])
    parts = [loaded.select([i]) for i in (2, 0, 1)]
    joined = type(loaded).cat([parts[1], parts[2], parts[0]])
    assert_close(run(case, x, joined, c, d), expected[:, c:d])
    o, _ = call(case, tokens(x, d, SIZES.length), SIZES, initial_state=joined, backend="chunked")
    assert_close(o, expected[:, d:])


def test_bookkeeping() -> None:
    """Counts, scores, keys and matrices are those of the chunked backend's state after the same tokens."""
    case = Case("dynamic", routed=True)
    x, _, state = prompted(case, seed=2)
    run(case, x, state, SIZES.prompt, 40)
    assert isinstance(state.kept, Slots) and bool((state.kept.order != torch.arange(4)).any())
    _, other = call(case, tokens(x, 0, 40), SIZES, backend="chunked")
    assert torch.equal(state.counts, other.counts) and torch.equal(state.length, other.length)
    assert torch.equal(state.size, other.size) and state.shape == other.shape and state.routed
    for name in ("scores", "keys"):
        assert_close(getattr(state, name), getattr(other, name).double())
    assert_close(state.dense(), other.dense().double())
    assert not isinstance(state.kept, Slots)  # asked for its matrices, it has become spans


def test_given_decisions() -> None:
    """Merges by a rule that the kernel does not know, given from outside, also where there is still room."""
    case = Case("dynamic", g=True)
    x, exact, state = *both(case, SIZES, torch.float32, "cpu", 3), None
    made = segment(exact["k"], exact["v"], exact["g"], capacity=3, merge="ward", backend="reference")
    expected, _ = call(case, exact, SIZES, segmentation=made, backend="reference")
    start = 10
    _, state = call(case, tokens(x, 0, start), SIZES, segmentation=part(made, 0, start, None))
    for t in range(start, 30):
        o, state = step(case, x, state, t, segmentation=part(made, t, t + 1, state), inplace=True)
        assert_close(o, expected[:, t : t + 1])


def part(made: Any, start: int, end: int, state: Any) -> Any:
    """The decisions of some steps."""
    cut = (made.score[:, start:end].float(), made.boundary[:, start:end], made.merged[:, start:end])
    return type(made).from_merges(*cut, None, None if state is None else state.counts)


def test_levels_grow() -> None:
    """The state has no row to spare at its first step, and is told apart from one that has grown."""
    case = Case("log_linear", g=True)
    x, exact = both(case, SIZES, torch.float32, "cpu", 0)
    expected, _ = call(case, exact, SIZES, backend="reference")
    _, state = call(case, tokens(x, 0, 6), SIZES)
    assert state.levels.shape[2] == 3
    assert_close(run(case, x, state, 6, 18), expected[:, 6:18])
    assert state.levels.shape[2] == 5 and state.decoder.left == 13


def test_repeated_steps_are_not_checked_anew() -> None:
    case = Case("dynamic")
    x, _, state = prompted(case)
    step(case, x, state, 12, inplace=True)
    first = state.decoder
    step(case, x, state, 13, inplace=True)
    assert state.decoder is first and first.fits(state)
    state.dense()
    assert not first.fits(state)


def test_sequences_that_have_seen_nothing() -> None:
    case = Case("dynamic", beta=True, routed=True)
    x, exact = both(case, SIZES, torch.float32, "cpu", 0)
    expected, _ = call(case, exact, SIZES, backend="reference")
    state = DynamicState.empty((3, 1, 16, 16), SIZES.capacity, True, torch.float32, "cpu")
    assert_close(run(case, x, state, 0, 6), expected[:, :6])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"capacity": None}, "a capacity of at most 64"),
        ({"capacity": 65}, "a capacity of at most 64"),
        ({"merge": "ward"}, "merges by density"),
        ({"state_dtype": torch.bfloat16}, "held in bfloat16"),
    ],
)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    from dla import dynamic_linear_attention

    x = {name: each.float() for name, each in inputs(Case(), SIZES).items()}
    _, state = dynamic_linear_attention(**tokens(x, 0, 5), **options, output_final_state=True)
    with pytest.raises(ValueError, match=reason):
        dynamic_linear_attention(**tokens(x, 5, 6), **options, initial_state=state, backend="triton")


def test_a_poisoned_sequence_stays_alone() -> None:
    case = Case("dynamic", beta=True)
    x, expected, state = prompted(case)
    x["v"] = x["v"].clone()
    x["v"][1, 14] = float("nan")
    o = run(case, x, state, SIZES.prompt, 18)
    assert o[1, -1].isnan().any()
    assert_close(o[[0, 2]], expected[[0, 2], SIZES.prompt : 18])
