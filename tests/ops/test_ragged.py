"""Sequences of very different lengths in one pack: some end many chunks before others."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.ops.common import MODES, Case, Inputs, assert_close, assert_same_state, call, cut, make_inputs

LENGTHS = (83, 20, 3, 0, 64, 41, 1)
ENDS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]

CASES = {
    **{f"linear-{mode}": ("linear", Case(mode)) for mode in MODES},
    **{f"log_linear-{mode}": ("log_linear", Case(mode)) for mode in MODES},
    **{f"dynamic-{mode}": ("dynamic", Case(mode)) for mode in MODES},
    "dynamic-routed": ("dynamic", Case("gated_delta", routed=True, merge="ward", slot_order="recency")),
    "dynamic-unbounded": ("dynamic", Case("decay", capacity=None)),
    "dynamic-soft": ("dynamic", Case("gated_delta", soft=True, routed=True)),
}


def run(operator: str, x: Inputs, **options: Any) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """Outputs, state and gradients of a weighted sum of the outputs."""
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    o, state = call(operator, leaves, **options)
    weight = torch.arange(o.shape[1], dtype=o.dtype)[:, None, None].cos() if o.shape[1] else 1
    (o * weight).sum().backward()
    return o.detach(), state, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize(("operator", "case"), CASES.values(), ids=list(CASES))
@pytest.mark.usefixtures("any_groups")
def test_pack_equals_separate_runs(operator: str, case: Case) -> None:
    x = make_inputs(case.mode, B=1, T=ENDS[-1], Hk=1, routed=case.routed, seed=3)
    options = case.options(ENDS[-1]) if operator == "dynamic" else {}
    hard = not case.soft
    packed = {"cu_seqlens": torch.tensor(ENDS)}
    o, state, _ = run(operator, x, **options, **packed, output_final_state=hard)
    if hard:  # once more, from the states: positions are no multiples of the chunk any more
        o, state, _ = run(operator, x, **options, **packed, output_final_state=True, initial_state=state)
    for n, (start, end) in enumerate(pairwise(ENDS)):
        part = cut(x, start, end)
        expected, one, _ = run(operator, part, **options, output_final_state=hard)
        if hard:
            expected, one, _ = run(operator, part, **options, output_final_state=True, initial_state=one)
            together = type(one).cat([state.select([n]), one])  # equally wide
            assert_same_state(together.select([0]), together.select([1]))
        assert_close(o[:, start:end], expected)


@pytest.mark.parametrize(("operator", "case"), CASES.values(), ids=list(CASES))
@pytest.mark.usefixtures("any_groups")
def test_gradients_equal_those_of_separate_runs(operator: str, case: Case) -> None:
    x = make_inputs(case.mode, B=1, T=ENDS[-1], Hk=1, routed=case.routed, seed=4)
    options = case.options(ENDS[-1]) if operator == "dynamic" else {}
    _, _, found = run(operator, x, **options, cu_seqlens=torch.tensor(ENDS))
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    parts = [call(operator, cut(leaves, a, b), **options)[0] for a, b in pairwise(ENDS)]
    weight = torch.arange(ENDS[-1], dtype=x["q"].dtype)[:, None, None].cos()
    (torch.cat(parts, 1) * weight).sum().backward()
    assert set(found) == {name for name, leaf in leaves.items() if leaf.grad is not None}
    for name, gradient in found.items():
        expected = leaves[name].grad
        assert expected is not None
        assert_close(gradient, expected)
