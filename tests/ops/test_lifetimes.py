"""Lifetimes: the whole history of a memory as starts and their ends."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dla.ops import Segmentation
from dla.ops.chunked.chunks import Chunks
from dla.ops.chunked.lifetimes import LifetimePlanner, Lifetimes
from dla.ops.segmentation import ALIVE
from tests.ops.common import Case, call, cut, make_inputs, segment

T = 40
few = settings(max_examples=30, derandomize=True, deadline=None)


def same(a: Segmentation, b: Segmentation) -> None:
    assert a.death.dtype == b.death.dtype == torch.int32
    assert a.death.equal(b.death) and a.boundary.equal(b.boundary) and a.lengths == b.lengths
    if b.initial_death is None:
        assert a.initial_death is None
    else:
        assert a.initial_death.equal(b.initial_death) and a.initial_counts.equal(b.initial_counts)


def made(case: Case, seed: int, length: int = T, carried: bool = False) -> Segmentation:
    """Decisions, from the start or on from other states."""
    x, rules = case.inputs(length, seed), case.rules(length)
    x.pop("route", None)
    if carried:
        past = replace(case, packed=False).inputs(15, seed + 1, B=3 if case.packed else 2)
        past.pop("route", None)
        alone = {name: value for name, value in rules.items() if name != "cu_seqlens"}
        rules["initial_state"] = call("dynamic", past, **alone, output_final_state=True)[1]
    return segment(x, **rules)


cases = st.builds(
    Case,
    mode=st.sampled_from(["decay", "gated_delta"]),
    merge=st.sampled_from(["density", "ward"]),
    capacity=st.sampled_from([2, 3, 5, None]),
    packed=st.booleans(),
)


@few
@given(case=cases, seed=st.integers(0, 1000), carried=st.booleans())
def test_merges_and_lifetimes_say_the_same(case: Case, seed: int, carried: bool) -> None:
    found = made(case, seed, carried=carried)
    again = Segmentation.from_merges(found.score, found.boundary, found.merged, found.lengths, found.initial_counts)
    same(again, found)
    assert again.merged.equal(found.merged)


@few
@given(case=cases, seed=st.integers(0, 1000), carried=st.booleans())
def test_deaths_are_those_of_a_walk(case: Case, seed: int, carried: bool) -> None:
    """Spans and numbers of states after every step, against a list that is walked with the oracle's merges."""
    found = made(case, seed, carried=carried)
    live = found.live_states()
    for b, n, h, first, last in sequences(found):
        counts = [] if found.initial_counts is None else [c for c in found.initial_counts[n, h].tolist() if c]
        ends = list(itertools.accumulate(counts))
        starts, position = [0, *ends][: len(ends)], sum(counts)
        for t in range(first, last):
            pair = int(found.merged[b, t, h])
            if pair >= 0:
                del starts[pair + 1]
            if found.boundary[b, t, h]:
                starts.append(position)
            position += 1
            assert found.spans(b, h, t) == list(zip(starts, [*starts[1:], position], strict=True))
            assert live[b, t, h] == len(starts)


def sequences(found: Segmentation) -> list[tuple[int, int, int, int, int]]:
    """Batch row, sequence, head, first and last step of each."""
    B, time, H = found.boundary.shape
    if found.lengths is None:
        return [(b, b, h, 0, time) for b in range(B) for h in range(H)]
    ends = [0, *itertools.accumulate(found.lengths)]
    return [(0, n, h, ends[n], ends[n + 1]) for n in range(len(found.lengths)) for h in range(H)]


def test_death_of_every_kind() -> None:
    """-1 where no state begins, the step of the merge, or none: the oldest start never ends."""
    found = segment(make_inputs("decay", T=T), capacity=3)
    assert ((found.death == -1) == ~found.boundary).all()
    ends = (found.death >= 0) & (found.death < ALIVE)
    assert ends.any() and (found.death[:, 0] == ALIVE).all()
    assert found.endings().max() == 1 and found.endings().sum() == ends.sum()
    for b, t, h in ends.nonzero().tolist():
        assert found.boundary[b, found.death[b, t, h], h], "a merge makes room for a new state"


def test_tally_is_what_the_state_holds() -> None:
    for seed, (capacity, packed) in enumerate(itertools.product([2, 4], [False, True])):
        case = Case("gated_delta", capacity=capacity, packed=packed)
        x, rules = case.inputs(T, seed), case.rules(T)
        _, state = call("dynamic", x, **rules, output_final_state=True, backend="reference")
        count, info = segment(x, **rules).tally(None, capacity)
        assert count.equal(state.counts)
        assert torch.allclose(info.float(), state.scores, atol=1e-5)


def test_from_merges_refuses_states_that_do_not_live() -> None:
    score, boundary = torch.ones(1, 3, 1), torch.ones(1, 3, 1, dtype=torch.bool)
    merged = torch.tensor([-1, -1, 1]).view(1, 3, 1)
    with pytest.raises(ValueError, match=r"merged\[0, 2, 0\] is 1, but only 2 states"):
        Segmentation.from_merges(score, boundary, merged)


def test_spans_outside_of_the_call() -> None:
    found = segment(make_inputs("decay", T=5), capacity=3)
    assert found.spans(0, 0, -1) == []
    with pytest.raises(ValueError, match="t must be"):
        found.spans(0, 0, 5)


def test_repr_says_something() -> None:
    assert "tokens opened a state" in repr(segment(make_inputs("decay", T=T), capacity=3))
    assert "3 sequences in 40 tokens" in repr(made(Case(packed=True), 0))
    assert repr(segment(make_inputs("decay", T=0))) == "Segmentation(2 x 0 tokens, 2 heads)"


WRONG: dict[str, dict[str, Any]] = {
    "a death before its start": {"death": [ALIVE, 0, 3, ALIVE]},
    "a death at no boundary": {"boundary": [True, True, True, False], "death": [ALIVE, ALIVE, 3, -1]},
    "a death past the end": {"death": [ALIVE, 4, ALIVE, ALIVE]},
    "two deaths at once": {"death": [ALIVE, 3, 3, ALIVE]},
    "no first boundary": {"boundary": [False, True, True, True], "death": [-1, ALIVE, ALIVE, ALIVE]},
    "a death without a boundary": {"boundary": [True, False, True, True], "death": [ALIVE, 2, ALIVE, ALIVE]},
    "too many states": {"death": [ALIVE, ALIVE, ALIVE, ALIVE]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_lifetimes_are_refused(wrong: str) -> None:
    x = make_inputs("decay", B=1, T=4, H=1)
    good: dict[str, Any] = {"boundary": [True] * 4, "death": [ALIVE, 3, ALIVE, ALIVE]}
    for change, refused in ((good, False), (good | WRONG[wrong], True)):
        given_one = Segmentation(
            torch.ones(1, 4, 1),
            torch.tensor(change["boundary"]).view(1, 4, 1),
            torch.tensor(change["death"], dtype=torch.int32).view(1, 4, 1),
        )
        if refused:
            with pytest.raises(ValueError, match="segmentation"):
                call("dynamic", x, capacity=3, segmentation=given_one)
        else:
            call("dynamic", x, capacity=3, segmentation=given_one)


@few
@given(case=cases, seed=st.integers(0, 1000), carried=st.booleans(), chunk=st.sampled_from([3, 8, 64]))
def test_plans_are_the_slots_of_the_spans(case: Case, seed: int, carried: bool, chunk: int) -> None:
    """The slot of every token seen from every step of its chunk, and the rows at the chunk's start."""
    found = made(case, seed, carried=carried)
    layout = found.layout
    chunks = Chunks(layout, chunk, torch.device("cpu"))
    planner = LifetimePlanner(Lifetimes.of(found, layout), chunks, soft=False, routed=False)
    row = {sequence: i for i, sequence in enumerate(chunks.rows.tolist())}
    plans = [planner.plan(chunks, c, 1) for c in range(chunks.steps)]
    for b, n, h, first, last in sequences(found):
        seen = 0 if found.initial_counts is None else int(found.initial_counts[n, h].sum())
        for t in range(first, last):
            local, spans = t - first, found.spans(b, h, t)
            plan, step = plans[local // chunk], local % chunk
            assert plan.live[row[n], h, 0, step] == len(spans)
            for s in range(local - step, local + 1):
                slot = next(i for i, (start, end) in enumerate(spans) if start <= seen + s < end)
                assert plan.tokens[row[n], h, 0, step, s - (local - step)] == slot
            before = found.spans(b, h, t - step - 1) if t - step > first else carried_spans(found, n, h)
            for i, (start, _) in enumerate(reversed(before)):
                slot = next(j for j, (a, z) in enumerate(spans) if a <= start < z)
                assert plan.rows[row[n], h, 0, step, i] == slot


def carried_spans(found: Segmentation, n: int, h: int) -> list[tuple[int, int]]:
    counts = [] if found.initial_counts is None else [c for c in found.initial_counts[n, h].tolist() if c]
    ends = list(itertools.accumulate(counts))
    return list(zip([0, *ends], ends, strict=False))


def test_a_part_of_a_stream_goes_on_from_its_carried_states() -> None:
    """Deaths of carried states are those that the whole stream has for their starts."""
    x, rules = make_inputs("decay", T=T, seed=3), {"capacity": 3}
    whole = segment(x, **rules)
    _, state = call("dynamic", cut(x, 0, 20), **rules, output_final_state=True)
    part = segment(cut(x, 20, T), **rules, initial_state=state)
    for b, h in itertools.product(range(2), range(2)):
        starts = [start for start, _ in whole.spans(b, h, 19)]
        expected = [int(whole.death[b, start, h]) for start in starts]
        expected = [death if death == ALIVE else death - 20 for death in expected]
        assert part.initial_death[b, h, : len(starts)].tolist() == expected
