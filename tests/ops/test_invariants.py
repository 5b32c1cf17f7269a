"""What must hold for any input: drawn by hypothesis, the same draws every time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dla import ops
from tests.ops import quadratic
from tests.ops.common import (
    BACKENDS,
    OPERATORS,
    VALUES,
    Case,
    Inputs,
    assert_close,
    assert_same_state,
    call,
    cut,
    make_inputs,
    pick,
    segment,
    state_bytes,
)

few = settings(max_examples=20, derandomize=True, deadline=None)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_operator = pytest.mark.parametrize("operator", OPERATORS)

seeds = st.integers(0, 10_000)
lengths = st.one_of(st.integers(1, 24), st.sampled_from([63, 64, 65, 70]))


def cases(**fixed: Any) -> st.SearchStrategy[Case]:
    """Any combination of options, some fixed."""
    drawn = {name: st.sampled_from(values) for name, values in VALUES.items()}
    return st.builds(Case, **drawn | {name: st.just(value) for name, value in fixed.items()})


def affordable(backend: str, T: int) -> int:
    """The reference is slow, and has no chunks to cross."""
    return min(T, 16) if backend == "reference" else T


def options_of(operator: str, case: Case, T: int) -> dict[str, Any]:
    return case.options(T) if operator == "dynamic" else case.packing(T)


def sequences_of(x: Inputs, case: Case, T: int) -> list[Inputs]:
    """The sequences of a packed or unpacked batch, each as a batch of one."""
    edges = case.edges(T)
    if edges is None:
        return [pick(x, b) for b in range(x["v"].shape[0])]
    return [cut(x, start, end) for start, end in pairwise(edges)]


# --- one state is the limit of all three -----------------------------------------------------------------------------


@every_backend
@few
@given(case=cases(routed=False), T=lengths, seed=seeds)
def test_unit_weights_make_every_memory_the_single_state(backend: str, case: Case, T: int, seed: int) -> None:
    T = affordable(backend, T)
    x = case.inputs(T, seed)
    x["lam"] = torch.ones_like(x["lam"])
    expected, _ = call("linear", x, **case.packing(T), backend=backend)
    o, _ = call("dynamic", x, **case.options(T), backend=backend)
    assert_close(o, expected)
    o, _ = call("log_linear", x, **case.packing(T), backend=backend)
    assert_close(o, expected)


@every_backend
@few
@given(case=cases(routed=True), T=lengths, seed=seeds)
def test_zero_sharpness_is_no_routing(backend: str, case: Case, T: int, seed: int) -> None:
    T = affordable(backend, T)
    x = case.inputs(T, seed)
    route = x.pop("route")
    expected, _ = call("dynamic", x, **case.options(T), backend=backend)
    o, _ = call("dynamic", x | {"route": torch.zeros_like(route)}, **case.options(T), backend=backend)
    assert_close(o, expected)


@every_backend
@few
@given(case=cases(soft=True, block=None), T=lengths, seed=seeds)
def test_cold_soft_gate_is_the_hard_gate(backend: str, case: Case, T: int, seed: int) -> None:
    T = affordable(backend, T)
    x, options = case.inputs(T, seed), case.options(T)
    soft, _ = call("dynamic", x, **options | {"temperature": 1e-7}, backend=backend)
    hard, _ = call("dynamic", x, **options | {"temperature": None}, backend=backend)
    assert_close(soft, hard)


# --- the decisions ---------------------------------------------------------------------------------------------------


@few
@given(case=cases(packed=False), T=lengths, seed=seeds)
def test_spans_partition_the_past(case: Case, T: int, seed: int) -> None:
    found = segment(case.inputs(T, seed), **case.rules(T))
    for b in range(2):
        for t in (0, T // 2, T - 1):
            spans = found.spans(b, 1, t)
            assert spans[0][0] == 0 and spans[-1][1] == t + 1
            assert all(start < end for start, end in spans)
            assert all(a[1] == b[0] for a, b in pairwise(spans))
            assert case.capacity is None or len(spans) <= case.capacity
        assert found.spans(b, 1) == found.spans(b, 1, T - 1)


@every_backend
@few
@given(case=cases(soft=False), T=lengths, seed=seeds)
def test_counts_sum_to_the_tokens_seen(backend: str, case: Case, T: int, seed: int) -> None:
    T = affordable(backend, T)
    x = case.inputs(T, seed)
    _, state = call("dynamic", x, **case.options(T), output_final_state=True, backend=backend)
    edges = case.edges(T)
    seen = [T, T] if edges is None else [b - a for a, b in pairwise(edges)]
    assert state.counts.sum(-1).tolist() == [[n, n] for n in seen]
    assert (state.scores >= 0).all()
    assert (state.scores <= 2 * state.counts + 1e-5).all()


@few
@given(case=cases(), T=lengths, seed=seeds, n=st.integers(1, 9))
def test_block_opens_a_state_every_n_tokens(case: Case, T: int, seed: int, n: int) -> None:
    found = segment(case.inputs(T, seed), **case.rules(T) | {"block": n})
    edges = case.edges(T) or [0, T]
    for start, end in pairwise(edges):
        expected = torch.arange(end - start) % n == 0
        assert found.boundary[:, start:end].equal(expected[None, :, None].expand_as(found.boundary[:, start:end]))


@every_backend
@few
@given(case=cases(soft=False), T=lengths, seed=seeds, c=st.sampled_from([1e-3, 0.3, 2.0, 700.0]))
def test_scaled_values_scale_the_output(backend: str, case: Case, T: int, seed: int, c: float) -> None:
    T = affordable(backend, T)
    x = case.inputs(T, seed)
    scaled = x | {"v": c * x["v"]}
    before, after = segment(x, **case.rules(T)), segment(scaled, **case.rules(T))
    assert after.boundary.equal(before.boundary) and after.merged.equal(before.merged)
    o, _ = call("dynamic", x, **case.options(T), backend=backend)
    scaled_o, _ = call("dynamic", scaled, **case.options(T), backend=backend)
    assert_close(scaled_o / c, o)


# --- causality -------------------------------------------------------------------------------------------------------


@every_operator
@every_backend
@few
@given(case=cases(packed=False), T=lengths, seed=seeds, data=st.data())
def test_the_future_changes_nothing(
    operator: str, backend: str, case: Case, T: int, seed: int, data: st.DataObject
) -> None:
    T = affordable(backend, T)
    t = data.draw(st.integers(0, T), label="first changed token")
    x, other = case.inputs(T, seed), case.inputs(T, seed + 2)
    changed = {n: y if y.dim() == 1 else torch.cat([y[:, :t], other[n][:, t:]], 1) for n, y in x.items()}
    options = options_of(operator, case, T)
    o, _ = call(operator, x, **options, backend=backend)
    o_changed, _ = call(operator, changed, **options, backend=backend)
    assert_close(o_changed[:, :t], o[:, :t], 1e-12)
    if t < T:
        assert not torch.allclose(o_changed[:, t:], o[:, t:])


# --- carried states --------------------------------------------------------------------------------------------------


@every_operator
@every_backend
@few
@given(case=cases(soft=False, packed=False), T=lengths, seed=seeds, data=st.data())
def test_splitting_and_carrying_the_state(
    operator: str, backend: str, case: Case, T: int, seed: int, data: st.DataObject
) -> None:
    T = affordable(backend, T)
    edges = sorted(data.draw(st.lists(st.integers(0, T), min_size=1, max_size=3), label="splits"))
    x, options = case.inputs(T, seed), options_of(operator, case, T)
    expected, expected_state = call(operator, x, **options, output_final_state=True, backend=backend)
    state, parts = None, []
    for start, end in zip([0, *edges], [*edges, T], strict=True):
        before = None if state is None else (state, state_bytes(state))
        o, state = call(
            operator,
            cut(x, start, end),
            **options,
            initial_state=state,
            output_final_state=True,
            backend=backend,
        )
        parts.append(o)
        if before is not None:
            assert before[0] is not state
            assert all(value.equal(before[1][name]) for name, value in state_bytes(before[0]).items())
    assert_close(torch.cat(parts, 1), expected)
    assert_same_state(state, expected_state)


@every_operator
@every_backend
@few
@given(case=cases(soft=False, packed=False), T=st.integers(0, 40), seed=seeds, inplace=st.booleans())
def test_prefill_then_single_steps(operator: str, backend: str, case: Case, T: int, seed: int, inplace: bool) -> None:
    """Decoding continues a prompt of any length, zero too, with either treatment of the given state."""
    steps = 12
    x, options = case.inputs(T + steps, seed), options_of(operator, case, T)
    expected, expected_state = call(operator, x, **options, output_final_state=True, backend="reference")
    o, state = call(operator, cut(x, 0, T), **options, output_final_state=True, backend=backend)
    parts = [o]
    for t in range(T, T + steps):
        given_state, shown = state, state_bytes(state)
        o, state = call(
            operator,
            cut(x, t, t + 1),
            **options,
            initial_state=given_state,
            output_final_state=True,
            inplace=inplace,
            backend=backend,
        )
        parts.append(o)
        unchanged = all(
            value.shape == shown[name].shape and value.equal(shown[name])
            for name, value in state_bytes(given_state).items()
        )
        assert (given_state is state) == inplace
        assert unchanged != inplace
    assert_close(torch.cat(parts, 1), expected)
    assert_same_state(state, expected_state)


@every_backend
@few
@given(case=cases(soft=False, packed=False), T=st.integers(1, 20), seed=seeds, data=st.data())
def test_following_a_segmentation_in_parts(backend: str, case: Case, T: int, seed: int, data: st.DataObject) -> None:
    """Also of other tokens than those at hand, and one token at a time."""
    split = data.draw(st.integers(0, T), label="split")
    x, options = case.inputs(T, seed), case.options(T)
    made = segment(case.inputs(T, seed + 2), **case.rules(T))
    expected, expected_state = call(
        "dynamic", x, **options, segmentation=made, output_final_state=True, backend="reference"
    )
    state, parts = None, []
    for start, end in [(0, split), *((t, t + 1) for t in range(split, T))]:
        steps = (y[:, start:end] for y in (made.score, made.boundary, made.merged))
        part = ops.Segmentation.from_merges(*steps, initial_counts=None if state is None else state.counts)
        o, state = call(
            "dynamic",
            cut(x, start, end),
            **options,
            segmentation=part,
            initial_state=state,
            output_final_state=True,
            backend=backend,
        )
        parts.append(o)
    assert_close(torch.cat(parts, 1), expected)
    assert_same_state(state, expected_state)


@every_operator
@few
@given(case=cases(soft=False, packed=False), T=st.integers(1, 30), seed=seeds)
def test_backends_take_over_each_others_states(operator: str, case: Case, T: int, seed: int) -> None:
    x, options = case.inputs(T + 7, seed), options_of(operator, case, T)
    expected, expected_state = call(operator, x, **options, output_final_state=True, backend="reference")
    for first, second in (BACKENDS, BACKENDS[::-1]):
        _, state = call(operator, cut(x, 0, T), **options, output_final_state=True, backend=first)
        o, state = call(
            operator, cut(x, T, T + 7), **options, initial_state=state, output_final_state=True, backend=second
        )
        assert_close(o, expected[:, T:])
        assert_same_state(state, expected_state)


@few
@given(case=cases(packed=False), T=lengths, seed=seeds, data=st.data())
def test_segmenting_in_two_parts(case: Case, T: int, seed: int, data: st.DataObject) -> None:
    split = data.draw(st.integers(0, T), label="split")
    x, rules = case.inputs(T, seed), case.rules(T)
    x.pop("route", None)
    whole = segment(x, **rules)
    _, state = call("dynamic", cut(x, 0, split), **rules, output_final_state=True, backend="reference")
    rest = segment(cut(x, split, T), **rules, initial_state=state)
    assert rest.boundary.equal(whole.boundary[:, split:])
    assert rest.merged.equal(whole.merged[:, split:])
    assert_close(rest.score, whole.score[:, split:], 1e-7)
    for b in range(2):
        assert rest.spans(b, 0) == whole.spans(b, 0)  # positions count from the sequence's start


# --- packing ---------------------------------------------------------------------------------------------------------


@every_operator
@every_backend
@few
@given(case=cases(packed=True), T=lengths, seed=seeds)
def test_packing_equals_separate_runs(operator: str, backend: str, case: Case, T: int, seed: int) -> None:
    """Outputs, and with the hard gate final states: also when continuing from states, one sequence being empty."""
    T = affordable(backend, T)
    x, options = case.inputs(T, seed), options_of(operator, case, T)
    separate = {name: value for name, value in options.items() if name != "cu_seqlens"}
    hard = not (case.soft and operator == "dynamic")
    states: dict[str, Any] = {}
    if hard:
        past = replace(case, packed=False).inputs(11, seed, B=3)
        _, state = call(operator, past, **separate, output_final_state=True, backend=backend)
        states = {"initial_state": state, "output_final_state": True}
    o, final = call(operator, x, **options, **states, backend=backend)
    parts, finals = [], []
    for n, sequence in enumerate(sequences_of(x, case, T)):
        if hard:
            states["initial_state"] = state.select([n])
        part, one = call(operator, sequence, **separate, **states, backend=backend)
        parts.append(part)
        finals.append(one)
    assert_close(o, torch.cat(parts, 1))
    if hard:
        assert_same_state(final, type(finals[0]).cat(finals))
        assert_close(final.dense()[1].sum(1), state.dense()[1].sum(1), 1e-14)  # of the empty sequence


@every_operator
@every_backend
@few
@given(case=cases(packed=False), T=lengths, seed=seeds)
def test_sequences_of_a_batch_do_not_meet(operator: str, backend: str, case: Case, T: int, seed: int) -> None:
    T = affordable(backend, T)
    x, options = case.inputs(T, seed, B=3), options_of(operator, case, T)
    o, _ = call(operator, x, **options, backend=backend)
    for b, sequence in enumerate(sequences_of(x, case, T)):
        part, _ = call(operator, sequence, **options, backend=backend)
        assert_close(o[b : b + 1], part)


@few
@given(case=cases(packed=True), T=lengths, seed=seeds)
def test_packed_decisions_equal_separate_ones(case: Case, T: int, seed: int) -> None:
    x, rules = case.inputs(T, seed), case.rules(T)
    found = segment(x, **rules)
    rules.pop("cu_seqlens")
    parts = [segment(sequence, **rules) for sequence in sequences_of(x, case, T)]
    assert found.boundary.equal(torch.cat([part.boundary for part in parts], 1))
    assert found.merged.equal(torch.cat([part.merged for part in parts], 1))


@every_operator
@every_backend
@few
@given(case=cases(), T=st.integers(1, 24), seed=seeds)
def test_memory_layout_does_not_matter(operator: str, backend: str, case: Case, T: int, seed: int) -> None:
    """Inputs with strides of their own: heads before time, and every other token of a longer tensor."""
    x, options = case.inputs(T, seed), options_of(operator, case, T)
    expected, _ = call(operator, x, **options, backend=backend)
    for spread in (
        lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),
        lambda y: y.repeat_interleave(2, 1)[:, ::2],
    ):
        strided = {name: y if y.dim() == 1 else spread(y) for name, y in x.items()}
        assert_close(call(operator, strided, **options, backend=backend)[0], expected, 1e-12)


# --- nothing to do ---------------------------------------------------------------------------------------------------


@every_operator
@every_backend
@pytest.mark.parametrize("capacity", [3, None])
@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 7), (0, 0)])
def test_empty(operator: str, backend: str, capacity: int | None, B: int, T: int) -> None:
    case = Case("gated_delta", capacity=capacity)
    x, options = case.inputs(T, B=B), options_of(operator, case, T)
    o, state = call(operator, x, **options, output_final_state=True, backend=backend)
    assert o.shape == (B, T, 2, 3)
    dense = state.dense()
    assert dense.shape[0] == B and not dense.any()
    o, again = call(operator, x, **options, initial_state=state, output_final_state=True, backend=backend)
    assert_same_state(again, state)
    if B and operator == "dynamic":  # the empty state is a beginning like no state
        more = case.inputs(9, B=B)
        expected, _ = call(operator, more, **options, backend=backend)
        assert_close(call(operator, more, **options, initial_state=state, backend=backend)[0], expected)


@every_operator
@every_backend
def test_no_tokens_leave_the_state_as_it_was(operator: str, backend: str) -> None:
    case = Case("gated_delta")
    options = options_of(operator, case, 20)
    _, state = call(operator, case.inputs(20), **options, output_final_state=True, backend=backend)
    o, after = call(operator, case.inputs(0), **options, initial_state=state, output_final_state=True, backend=backend)
    assert o.shape == (2, 0, 2, 3)
    assert_same_state(after, state, 0.0)


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 7)])
@every_operator
def test_empty_gradients(operator: str, B: int, T: int) -> None:
    """A training step over nothing is one like any other."""
    leaves = {name: value.requires_grad_() for name, value in make_inputs("gated_delta", B=B, T=T).items()}
    o, _ = call(operator, leaves, backend="chunked")
    o.sum().backward()
    assert leaves["v"].grad.shape == leaves["v"].shape


def test_the_oracle_is_not_the_linear_operator() -> None:
    """The masks do weigh: without unit weights the three operators differ."""
    x = make_inputs("decay", T=20)
    linear = quadratic.linear_attention(x["q"], x["k"], x["v"], x["g"])
    log_linear, _ = call("log_linear", x, backend="reference")
    dynamic, _ = call("dynamic", x, capacity=3, backend="reference")
    assert not torch.allclose(log_linear, linear) and not torch.allclose(dynamic, linear)
    assert not torch.allclose(dynamic, log_linear)
