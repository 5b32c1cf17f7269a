"""The step-by-step reference and ``segment`` against the quadratic form, in float64, over all options."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ops import quadratic
from tests.ops.common import (
    BACKENDS,
    MODES,
    VALUES,
    Case,
    Inputs,
    all_cases,
    arguments,
    assert_close,
    assert_same_decisions,
    call,
    cut,
    make_inputs,
    product_cases,
    sample_cases,
    segment,
)

T = 26
CASES = product_cases()


def oracle_of(x: Inputs, **options: Any) -> torch.Tensor:
    return quadratic.dynamic_linear_attention(**arguments("dynamic", x), **options)


def decide(x: Inputs, **rules: Any) -> quadratic.Decisions:
    return quadratic.decide(**arguments("segment", x), **rules)


def check_case(case: Case, seed: int) -> None:
    x, options = case.inputs(T, seed), case.options(T)
    decisions = decide(x, **case.rules(T))
    o, state = call("dynamic", x, **options, output_final_state=not case.soft, backend="reference")
    assert_close(o, oracle_of(x, **options, segmentation=decisions))
    if not case.soft:
        check_dynamic_state(state, x, case, decisions)


def check_dynamic_state(state: Any, x: Inputs, case: Case, decisions: quadratic.Decisions) -> None:
    """Matrices, counts and scores of the final memory against their sums over tokens."""
    packing = case.packing(T)
    held = quadratic.final_states(x["k"], x["v"], x.get("g"), x.get("beta"), decisions, **packing)
    sequences = 1 + max(n for n, _ in held)
    widest = max(map(len, held.values()))
    assert state.dense().shape[:3] == (sequences, x["v"].shape[2], case.capacity or widest)
    dense, counts, scores = (torch.zeros_like(y) for y in (state.dense(), state.counts, state.scores))
    for (n, h), slots in held.items():
        for i, slot in enumerate(slots):
            dense[n, h, i], counts[n, h, i], scores[n, h, i] = slot.matrix, slot.count, slot.score
    assert_close(state.dense(), dense)
    assert state.counts.equal(counts)
    assert_close(state.scores, scores, 1e-6)


# --- the options -----------------------------------------------------------------------------------------------------


def test_cases_cover_every_pair_of_option_values() -> None:
    for (a, a_values), (b, b_values) in itertools.combinations(VALUES.items(), 2):
        seen = {(getattr(case, a), getattr(case, b)) for case in CASES}
        assert seen == set(itertools.product(a_values, b_values)), (a, b)


@pytest.mark.parametrize("score", VALUES["score"])
@pytest.mark.parametrize("mode", MODES)
def test_streams_exercise_boundaries_and_merges(mode: str, score: str) -> None:
    merged: set[int] = set()
    for merge in VALUES["merge"]:
        case = Case(mode=mode, score=score, merge=merge, capacity=3)
        decisions = decide(case.inputs(T), **case.rules(T))
        assert 0.15 < decisions.boundary.double().mean() < 0.85
        assert (decisions.merged >= 0).sum() >= 4
        merged |= set(decisions.merged.unique().tolist())
    assert merged == {-1, 0, 1}


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_dynamic(number: int) -> None:
    check_case(CASES[number], seed=number)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_dynamic_widely(part: int) -> None:
    """Every fifth of all 12288 combinations: five is prime to the number of values of every option."""
    for seed, case in enumerate(itertools.islice(all_cases(), 5 * part, None, 5 * 16)):
        check_case(case, seed)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_segment(number: int) -> None:
    case = CASES[number]
    x = case.inputs(T, seed=number)
    found, expected = segment(x, **case.rules(T)), decide(x, **case.rules(T))
    assert_same_decisions(found, expected)


@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_scale(scale: float | None) -> None:
    x = make_inputs("gated_delta", T=12)
    o, _ = call("dynamic", x, capacity=3, scale=scale, backend="reference")
    assert_close(o, oracle_of(x, capacity=3, scale=scale))
    o, _ = call("log_linear", x, scale=scale, backend="reference")
    assert_close(o, quadratic.log_linear_attention(**arguments("log_linear", x), scale=scale))
    o, _ = call("linear", x, scale=scale, backend="reference")
    assert_close(o, quadratic.linear_attention(**arguments("linear", x), scale=scale))


def test_given_segmentation_is_followed() -> None:
    """Boundaries and merges of another stream, and of rules that would never have made them."""
    x, other = make_inputs("gated_delta", T=T, seed=1), make_inputs("gated_delta", T=T, seed=2)
    given = segment(other, capacity=3)
    o, state = call("dynamic", x, segmentation=given, tau=1.9, capacity=3, output_final_state=True, backend="reference")
    assert_close(o, oracle_of(x, segmentation=given))
    for b, h in itertools.product(range(2), range(2)):
        lengths = [end - start for start, end in given.spans(b, h)]
        assert state.counts[b, h].tolist() == lengths + [0] * (3 - len(lengths))


@pytest.mark.parametrize("capacity", VALUES["capacity"])
def test_spans(capacity: int | None) -> None:
    x = make_inputs("decay", T=T)
    found = segment(x, capacity=capacity)
    for b, h in itertools.product(range(2), range(2)):
        expected = list(quadratic.spans_after(found.boundary[b, :, h], found.merged[b, :, h]))
        assert [[tuple(span) for span in found.spans(b, h, t)] for t in range(T)] == expected
        assert [tuple(span) for span in found.spans(b, h)] == expected[-1]


# --- corners of the decisions ----------------------------------------------------------------------------------------


def one_hot(tokens: list[int], dim: int = 6) -> Inputs:
    """One head whose token i is e_i e_i^T: every score is 0 or sqrt 2 as long as a state is pure."""
    hot = F.one_hot(torch.tensor(tokens), dim).double()[None, :, None]
    lam = torch.linspace(0.5, 2, len(tokens) * 3, dtype=torch.float64).reshape(1, -1, 1, 3)
    return {"q": torch.ones_like(hot), "k": hot, "v": hot.clone(), "lam": lam}


@pytest.mark.parametrize("merge", VALUES["merge"])
@pytest.mark.parametrize("tokens", [[0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2, 0, 1, 2, 3], [0, 1] * 6])
def test_ties_go_to_the_oldest_pair(tokens: list[int], merge: str, any_scan: str) -> None:
    x = one_hot(tokens)
    expected = decide(x, capacity=3, merge=merge)
    assert (expected.merged >= 0).any()
    assert_same_decisions(segment(x, capacity=3, merge=merge), expected)
    o, _ = call("dynamic", x, capacity=3, merge=merge, backend="reference")
    assert_close(o, oracle_of(x, capacity=3, merge=merge))
    if tokens == [0, 1, 2, 3, 4, 5] and merge == "density":
        assert expected.merged[0, :, 0].tolist() == [-1, -1, -1, 0, 0, 0]


@pytest.mark.parametrize(("excess", "winner"), [(4e-7, 0), (4e-6, 1)])
def test_nearly_equal_costs_are_ties(excess: float, winner: int, any_scan: str) -> None:
    """Ward costs 1 + excess, 1, 1: the first is the oldest, and wins within 1e-6 of the smallest."""
    x = one_hot([0, 1, 2, 3, 4])
    x["v"][0, 0] *= math.sqrt(1 + 2 * excess)
    rules = {"capacity": 4, "merge": "ward"}
    assert decide(x, **rules).merged[0, 4, 0] == winner
    assert segment(x, **rules).merged[0, 4, 0] == winner
    for backend in BACKENDS:
        _, state = call("dynamic", cut(x, 0, 4), **rules, output_final_state=True, backend=backend)
        _, state = call("dynamic", cut(x, 4, 5), **rules, initial_state=state, output_final_state=True, backend=backend)
        assert state.counts[0, 0].tolist() == ([2, 1, 1, 1] if winner == 0 else [1, 2, 1, 1])


@pytest.mark.parametrize("score", VALUES["score"])
@pytest.mark.parametrize("merge", VALUES["merge"])
@pytest.mark.parametrize("mode", MODES)
def test_zero_tokens_and_zero_states(mode: str, merge: str, score: str, any_scan: str) -> None:
    """Zero keys, values or steps score 0 and are counted; a zero state scores sqrt 2 against a token."""
    x = make_inputs(mode, T=T)
    x["v"][0, :3] = 0  # opens a zero state
    x["k"][1, 0] = 0
    x["k"][:, 9] = 0
    x["v"][:, 10:12] = 0
    if "beta" in x:
        x["beta"][:, 13] = 0
    rules = {"tau": 0.6, "capacity": 3, "merge": merge, "score": score}
    found, expected = segment(x, **rules), decide(x, **rules)
    assert_same_decisions(found, expected)
    assert found.score[0, 0, 0].item() == pytest.approx(math.sqrt(2), abs=1e-6)
    assert found.score[0, 1:3].abs().max() == 0
    assert found.score[0, 3].sub(math.sqrt(2)).abs().max() < 1e-6
    assert found.score[:, 9:12].abs().max() == 0
    o, _ = call("dynamic", x, **rules, backend="reference")
    assert_close(o, oracle_of(x, **rules))
    o, _ = call("dynamic", x, **rules, temperature=0.1, backend="reference")
    assert_close(o, oracle_of(x, **rules, temperature=0.1))


def test_tau_zero_opens_a_state_for_every_token() -> None:
    x = make_inputs("decay", T=T)
    x["v"][:, 5] = 0  # even where the score is 0
    found = segment(x, tau=0.0, capacity=4)
    assert found.boundary.all()
    assert_same_decisions(found, decide(x, tau=0.0, capacity=4))


def test_tau_above_two_never_opens_a_second_state() -> None:
    found = segment(make_inputs("decay", T=T), tau=2.1)
    assert found.boundary[:, 0].all() and not found.boundary[:, 1:].any()


def test_opposite_token_scores_two() -> None:
    x = one_hot([0, 0, 0])
    x["v"][0, 1] *= -1
    assert segment(x).score[0, :, 0].tolist() == pytest.approx([math.sqrt(2), 2.0, 2.0], abs=1e-6)


# --- the baselines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_linear(mode: str, grouped: bool, packed: bool) -> None:
    case = Case(mode=mode, grouped=grouped, packed=packed)
    x = arguments("linear", case.inputs(T, seed=3))
    o, state = call("linear", x, **case.packing(T), output_final_state=True, backend="reference")
    assert_close(o, quadratic.linear_attention(**x, **case.packing(T)))
    single = quadratic.Decisions(*(torch.zeros(x["v"].shape[:3]) for _ in range(3)))
    single.boundary[:, [edge for edge in (case.edges(T) or [0]) if edge < T]] = 1
    single.merged -= 1
    held = quadratic.final_states(x["k"], x["v"], x.get("g"), x.get("beta"), single, **case.packing(T))
    for (n, h), slots in held.items():
        expected = slots[0].matrix if slots else torch.zeros(4, 3)
        assert_close(state.dense()[n, h].sum(0), expected)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 17, 33])
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("mode", MODES)
def test_log_linear(mode: str, number: int, length: int) -> None:
    case = Case(mode=mode, grouped=bool(number & 1), packed=bool(number & 2), narrow=bool(number & 4), capacity=8)
    x = arguments("log_linear", case.inputs(length, seed=number))
    packing = case.packing(length)
    o, state = call("log_linear", x, **packing, output_final_state=True, backend="reference")
    assert_close(o, quadratic.log_linear_attention(**x, **packing))
    levels = quadratic.final_levels(x["k"], x["v"], x.get("g"), x.get("beta"), **packing)
    for (n, h), held in levels.items():
        dense = state.dense()[n, h]
        for i, level in enumerate(sorted(held, reverse=True)):  # the highest level is the oldest
            assert_close(dense[i], held[level])
        assert not dense[len(held) :].any()


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", VALUES["score"])
@pytest.mark.parametrize("case", sample_cases(24, seed=5), ids=str)
def test_gradients(case: Case, score: str) -> None:
    """Autograd of the reference, which the other backends are measured by, against autograd of the masks."""
    x, options = case.inputs(14, seed=6), case.options(14) | {"score": score}
    weight = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    gradients = []
    for run in (lambda y: call("dynamic", y, **options, backend="reference")[0], lambda y: oracle_of(y, **options)):
        leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
        (run(leaves) * weight).sum().backward()
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, expected in gradients[1].items():
        actual = gradients[0][name]
        assert (actual is None) == (expected is None), name
        if expected is not None:
            assert_close(actual, expected, 1e-8)
