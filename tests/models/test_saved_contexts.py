"""Contexts that earlier versions saved still load, and go on as they did."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

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


WRONG = {
    "0.state.size": (lambda x: torch.full_like(x, 9), "size must be"),
    "0.state.order": (torch.zeros_like, "order must be"),
    "1.state.count": (lambda x: -x, "count must be"),
    "1.state.length": (lambda x: x + 1, "count must be"),
    "2.state.length": (lambda x: x + 1000, "length must be"),
    "2.state.keys": (lambda x: x[0], "keys must be"),
    "0.tail": (lambda x: x.long(), "0.tail must be"),
    "1.tail": (lambda x: torch.cat([x, x]), "all layers must hold as many"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_field_is_named(field, tmp_path):
    with safe_open(SAVED / "dynamic.safetensors", framework="pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    change, message = WRONG[field]
    path = tmp_path / "wrong.safetensors"
    save_file({**tensors, field: change(tensors[field]).contiguous()}, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"wrong\.safetensors \(" + message):
        DLACache.load(path)


@pytest.mark.parametrize(
    ("entry", "value"), [("seen", "-1"), ("seen", "x"), ("layers", "5"), ("layers", "[5]"), ("layers", "[" * 100_000)]
)
def test_a_wrong_label_is_refused(entry, value, tmp_path):
    with safe_open(SAVED / "dynamic.safetensors", framework="pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, tmp_path / "wrong.safetensors", metadata={**metadata, entry: value})
    with pytest.raises(ValueError, match=r"wrong\.safetensors"):
        DLACache.load(tmp_path / "wrong.safetensors")
