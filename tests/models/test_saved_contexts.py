"""Contexts that earlier versions saved still load, and go on as they did."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dla.models import DLACache, DLAConfig, DLAForCausalLM

SAVED = Path(__file__).parent / "saved_contexts"
NAMES = sorted(path.name.removesuffix(".expected.safetensors") for path in SAVED.glob("*.expected.safetensors"))


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_context_goes_on(name, tmp_path):
    with safe_open(SAVED / f"{name}.expected.safetensors", framework="pt") as file:
        options = json.loads(file.metadata()["config"])
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    del options["time_step_limit"]  # the default, whose infinity transformers writes in its own way
    model = DLAForCausalLM(DLAConfig(**options)).eval()
    model.load_state_dict({key.removeprefix("model."): x for key, x in found.items() if key.startswith("model.")})
    cache = DLACache.load(SAVED / f"{name}.safetensors")
    assert cache.get_seq_length() == 9
    cache.save(tmp_path / "again.safetensors")
    for one in (cache, DLACache.load(tmp_path / "again.safetensors")):
        with torch.no_grad():
            logits = model(found["ids"][:, 9:], past_key_values=one, use_cache=True).logits
        assert torch.allclose(logits, found["logits"], atol=1e-5)


def test_they_are_all_there():
    assert NAMES == ["dynamic", "log_linear", "routed", "unbounded"]
