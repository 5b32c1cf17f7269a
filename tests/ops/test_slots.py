"""States held in slots, as GPUs decode on them: the same value as spans, without a GPU or Triton."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from dla.ops.state import DynamicState, load_state
from dla.ops.state.slots import Slots
from tests.ops.common import Case, assert_same_state, call


def shuffled(routed: bool) -> tuple[DynamicState, DynamicState]:
    """A state, and the same in slots whose order is not that of the states, with a factor to each."""
    case = Case("gated_delta", capacity=4, routed=routed)
    _, state = call("dynamic", case.inputs(30), **case.options(30), output_final_state=True)
    other = state.clone()
    slots = other.slots
    order = torch.tensor([2, 0, 3, 1])
    for name, x in vars(slots).items():
        if x is not None and x.dim() > 2:
            rows = torch.empty_like(x)
            rows[:, :, order] = x
            setattr(slots, name, rows)
    slots.order = order.int().expand(slots.count.shape).contiguous()
    slots.factor = torch.full_like(slots.factor, 0.5)
    slots.matrices *= 2
    return state, other


@pytest.mark.parametrize("routed", [False, True])
def test_the_same_value(routed: bool) -> None:
    state, other = shuffled(routed)
    assert isinstance(other.kept, Slots)
    assert other.shape == state.shape and other.dtype == state.dtype and other.state_dtype == state.state_dtype
    assert other.routed == routed and torch.equal(other.size, state.size) and torch.equal(other.length, state.length)
    assert torch.equal(other.counts, state.counts) and torch.equal(other.info, state.info)
    assert (other.keys is None) if state.keys is None else torch.equal(other.keys, state.keys)
    assert other.nbytes > 0 and isinstance(other.kept, Slots)
    assert_same_state(other, state)


def test_copies_stay_in_slots() -> None:
    state, other = shuffled(True)
    for made in (other.clone(), other.to("cpu"), other.select([0, 1])):
        assert isinstance(made.kept, Slots)
        assert_same_state(made, state)
    assert_same_state(other.select([1, 1, 0]), state.select([1, 1, 0]))
    before = other.clone()
    before.slots.matrices.zero_()
    assert_same_state(other, state)


def test_files_pickles_and_batches(tmp_path: Path) -> None:
    state, other = shuffled(True)
    other.clone().save(tmp_path / "state.safetensors")
    assert_same_state(load_state(tmp_path / "state.safetensors"), state)
    assert_same_state(copy.deepcopy(other), state)
    joined = DynamicState.cat([other.clone(), state])
    assert_same_state(joined, DynamicState.cat([state, state]))


def test_free_slots_mean_nothing() -> None:
    case = Case("decay", capacity=30, routed=True)
    _, state = call("dynamic", case.inputs(6), **case.options(6), output_final_state=True)
    other = state.clone()
    free = other.slots.count == 0
    assert free.any()
    other.slots.info[free], other.slots.key_sums[free], other.slots.factor[free] = 7.0, 7.0, 7.0
    other.slots.matrices[free] = float("nan")
    assert torch.equal(other.info, state.info) and torch.equal(other.keys, state.keys)
    assert_same_state(other, state)
