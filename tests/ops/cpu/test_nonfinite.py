"""Numbers that are not finite, and memory that was not written: neither reaches what it has nothing to do with."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.ops.common import OPERATORS, call, cast, make_inputs
from tests.ops.cpu.common import needs_library

pytestmark = needs_library

AT = 100
POISONED = [
    (operator, mode, name, value)
    for operator in OPERATORS
    for mode, names in (("decay", ("q", "k", "v", "g", "lam")), ("gated_delta", ("q", "k", "v", "g", "lam", "beta")))
    for name in names
    for value in (math.nan, math.inf, -math.inf, 3e30)
    if (name, value) not in (("g", math.inf), ("g", 3e30)) and (operator, name) != ("linear", "lam")
]


def options_of(operator: str) -> list[dict[str, Any]]:
    if operator != "dynamic":
        return [{}]
    return [{"capacity": 3}, {"capacity": 5, "slot_order": "recency"}, {"capacity": None}, {"capacity": 3, "block": 7}]


@pytest.mark.parametrize(("operator", "mode", "name", "value"), POISONED, ids=str)
def test_poison_stays_in_its_head_and_behind_its_token(operator: str, mode: str, name: str, value: float) -> None:
    """3e30 is finite, but its square is not."""
    x = cast(make_inputs(mode, B=2, T=150, H=4, Hk=2, width=8), torch.float32)
    poisoned = {key: tensor.clone() for key, tensor in x.items()}
    head = 1 if name in ("q", "k") else 2  # a key head has two heads
    poisoned[name][0, AT, head] = value
    others = [0, 1] if name in ("q", "k") else [0, 1, 3]
    for options in options_of(operator):
        clean, before = call(operator, x, **options, output_final_state=True, backend="cpu")
        o, state = call(operator, poisoned, **options, output_final_state=True, backend="cpu")
        assert o[1].equal(clean[1]) and o[0, :, others].equal(clean[0, :, others])
        torch.testing.assert_close(o[0, :AT], clean[0, :AT], rtol=1e-5, atol=1e-5)
        if name != "g" and not math.isfinite(value):
            assert not o[0, AT, 2].isfinite().all()
        width = min(state.dense().shape[2], before.dense().shape[2])
        assert state.dense()[1, :, :width].equal(before.dense()[1, :, :width])


@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_poison_stays_in_its_packed_sequence(operator: str, mode: str) -> None:
    x = cast(make_inputs(mode, B=1, T=90, H=2, width=8), torch.float32)
    poisoned = {key: tensor.clone() for key, tensor in x.items()}
    for name in ("k", "v", "q", "lam"):
        poisoned[name][0, 40] = math.nan
    edges = torch.tensor([0, 30, 60, 90])
    clean, _ = call(operator, x, cu_seqlens=edges, backend="cpu")
    o, _ = call(operator, poisoned, cu_seqlens=edges, backend="cpu")
    assert o[:, :30].equal(clean[:, :30]) and o[:, 60:].equal(clean[:, 60:])


@pytest.mark.parametrize("mode", ["decay", "gated_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_has_faded_to_nothing_is_still_poisoned(operator: str, mode: str) -> None:
    """A state is not read when its decay is exactly zero, unless it holds what zero does not cancel."""
    x = cast(make_inputs(mode, B=1, T=300, H=1, width=8), torch.float32)
    x["v"][0, 3] = math.nan
    x["g"][0, 64:] = -50.0
    o, _ = call(operator, x, backend="cpu")
    assert o[0, 3:].isnan().all()


SCRIPT = """
import torch
from tests.ops.common import OPERATORS, call, cast, make_inputs
total = []
for operator in OPERATORS:
    for mode, routed in (("decay", False), ("decay", True), ("gated_delta", False), ("delta", True)):
        x = cast(make_inputs(mode, B=2, T=217, H=4, Hk=2, dk=5, dv=7, width=4, routed=routed), torch.float32)
        for options in ({}, {"capacity": 4}, {"capacity": None}) if operator == "dynamic" else ({},):
            o, state = call(operator, x, output_final_state=True, backend="cpu", **options)
            total += [o.double().sum().item(), o.double().abs().max().item(), state.dense().double().sum().item()]
print(total)
"""


def test_memory_that_nobody_wrote_is_not_read() -> None:
    """The C library fills what it hands out with huge numbers; nothing changes."""
    found = set()
    for value in ("0", "128", "1"):
        environment = {**os.environ, "MALLOC_PERTURB_": value}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1
