"""Short states as rows with delta steps: whatever number of tokens makes a state a matrix, outputs are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dla.ops.gpu import delta_memories
from tests.ops.gpu.interpreted.delta import SMALL, inputs, poisoned  # noqa: F401
from tests.ops.gpu.interpreted.test_attend import compare

PACKED = {"capacity": 6, "slot_order": "recency", "cu_seqlens": torch.tensor([0, 15, 15, 210])}
LEAST = [20, 90, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5, 64, 1000))]


@pytest.mark.parametrize("least", LEAST)
@pytest.mark.parametrize("options", [{"capacity": 4}, PACKED], ids=["capacity 4", "packed"])
def test_outputs_and_states(least: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_memories, "LEAST", least)
    compare("dynamic", inputs(210, **SMALL), **options)
