"""The paper's two models at their full head geometry, two layers of them on few tokens: a training step in Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dla
from dla.models import preset
from dla.models.causal_lm import DLAForCausalLM
from dla.ops import backends

SMALL = {"num_hidden_layers": 2, "vocab_size": 64}
SHORT, LONG = 24, 72  # tokens; with delta steps and more than a chunk, some are rows


def trained(
    config: Any, backend: str, T: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, dict[str, Any], set[Any]]:
    """The loss, every parameter's gradient, and who ran."""
    rows = dict(backends.TABLE)
    rows["attend"] = tuple(replace(row, interprets=False) for row in rows["attend"] if row.backend == backend)
    if backend == "triton":
        rows["decide"] = tuple(replace(row, interprets=False) for row in rows["decide"])
    with monkeypatch.context() as patch:
        for stage, of_stage in rows.items():
            patch.setitem(backends.TABLE, stage, of_stage)
        torch.manual_seed(0)
        model = DLAForCausalLM(config).train()
        ids = torch.randint(64, (1, T), generator=torch.Generator().manual_seed(1))
        with dla.record() as ran:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, {(x.stage, x.backend) for x in ran}


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "temperature"), [("paper", None), ("paper", 0.1), ("recommended", None)])
@pytest.mark.parametrize("name", ["mamba2-780m", "gdn-1.3b"])
def test_a_training_step(name: str, memory: str, temperature: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the chunked backend's."""
    gate = {} if temperature is None else {"temperature": temperature}
    config = preset(name, memory=memory, **SMALL, **gate)
    T = LONG if (name, memory) == ("gdn-1.3b", "paper") else SHORT  # an interpreted program takes its time
    expected, gradients, _ = trained(config, "chunked", T, monkeypatch)
    loss, found, ran = trained(config, "triton", T, monkeypatch)
    assert ran == {("attend", "triton"), ("decide", "triton")}
    assert abs(loss - expected) < 1e-5
    for parameter, gradient in found.items():
        worst = (gradient - gradients[parameter]).abs().max() / gradients[parameter].abs().max().clamp_min(1e-12)
        assert worst < 1e-3, (parameter, float(worst))
