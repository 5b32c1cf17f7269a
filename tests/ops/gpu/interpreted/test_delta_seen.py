"""The soft gate's decisions with delta steps in Triton: what its score sees, against the scan in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dla
from dla.ops.decide import scan
from dla.ops.decide.decided import Seen
from dla.ops.gpu import decide, decide_delta_seen
from dla.ops.problem import Layout, Problem
from dla.ops.rules import Rules
from tests.ops.common import Inputs, assert_close, call, cast
from tests.ops.gpu.interpreted import delta
from tests.ops.gpu.interpreted.delta import inputs
from tests.ops.gpu.interpreted.test_attend import decisions

poisoned = delta.poisoned
SLOW = pytest.mark.slow
SMALL: dict[str, Any] = {"dk": 16, "dv": 16}


def both(x: Inputs, dtype: torch.dtype = torch.float32, packed: Tensor | None = None, **options: Any) -> list[Seen]:
    """What the kernels see with given decisions, and what the scan does in float64."""
    low = {name: y.to(torch.float32 if name in ("g", "beta") else dtype) for name, y in x.items()}
    high = cast(low, torch.float64)
    made = decisions(high, {**options, **({} if packed is None else {"cu_seqlens": packed})})
    layout, found = Layout.of(*x["v"].shape[:2], packed), []
    for stage, given, of in ((decide, replace(made, score=made.score.float()), low), (scan, made, high)):
        operands = {name: of.get(name) for name in ("k", "v", "g", "beta")}
        asked = Problem(memory="dynamic", layout=layout, rules=Rules(), temperature=0.1, given=given, **operands)
        assert stage is scan or decide.unable(asked) is None
        seen = stage.decide(asked).seen
        assert seen is not None
        found.append(seen)
    return found


def compare(x: Inputs, **options: Any) -> None:
    found, expected = both(x, **options)
    for name in ("state_k", "state_v", "norm"):
        assert_close(getattr(found, name), getattr(expected, name), 2e-6)


def test_one():
    import time
    for T, more, opt in ((150, {}, {}), (150, {"H": 1}, {"tau": 1.9}), (150, {}, {"packed": torch.tensor([0, 66, 66, 67, 150])}), (150, {"mode":"delta"}, {"tau":1.2})):
        t0=time.time()
        found, expected = both(inputs(T, **more), **opt)
        print(time.time()-t0)
        for name in ("state_k", "state_v", "norm"):
            a, b = getattr(found, name).double(), getattr(expected, name)
            print(name, float((a-b).abs().max()), float(b.abs().max()))
