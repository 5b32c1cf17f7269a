"""What the tests of delta steps share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.common import Inputs, arguments, call, cast, make_inputs
from tests.ops.gpu.interpreted.test_attend import decisions

SMALL: dict[str, Any] = {"H": 1, "dk": 16, "dv": 16}  # an interpreted program takes its time


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not written first reads as NaN, or as a number that points nowhere."""
    empty = torch.empty

    def poison(*size: Any, **more: Any) -> Tensor:
        x = empty(*size, **more)
        if x.is_meta:
            return x
        whole = 2**14 if x.dtype == torch.int16 else 2**30
        return x.fill_(math.nan if x.is_floating_point() else x.dtype == torch.bool or whole)

    monkeypatch.setattr(torch, "empty", poison)


def inputs(T: int, mode: str = "gated_delta", **more: Any) -> Inputs:
    """Two heads of one key head, of widths that are no powers of two."""
    x = make_inputs(mode, **{"B": 1, "T": T, "H": 2, "Hk": 1, "dk": 24, "dv": 40, "width": 6, **more})
    return cast(cast(x, torch.float32), torch.float64)  # numbers that both have


def with_decisions(operator: str, x: Inputs, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "segmentation": decisions(x, options)} if operator == "dynamic" else options


def gradients(
    operator: str, x: Inputs, backend: str, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and every input's gradient of their product with fixed numbers."""
    halves = {name: value.to(torch.float32 if name in ("g", "beta") and dtype != torch.float64 else dtype)
              for name, value in x.items()}  # fmt: skip
    leaves = {name: value.detach().requires_grad_() for name, value in halves.items()}
    o, _ = call(operator, leaves, backend=backend, **options)
    along = torch.randn(o.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(o.dtype)
    names = list(arguments(operator, x))
    return o.detach(), dict(zip(names, torch.autograd.grad(o, [leaves[n] for n in names], along), strict=True))
