import json

import pytest
import torch

from dla.cli import main
from dla.models import DLAConfig, DLAForCausalLM, preset
from dla.models.load import find_config, is_preset, load_model


def test_a_name_or_a_folder(tmp_path):
    assert find_config("gdn-tiny", "dynamic").memory == "dynamic"
    assert find_config("gdn-tiny").memory == "single"
    preset("gdn-tiny", memory="log_linear", hidden_size=64).save_pretrained(tmp_path)
    found = find_config(str(tmp_path))
    assert isinstance(found, DLAConfig)
    assert (found.memory, found.hidden_size) == ("log_linear", 64)
    with pytest.raises(ValueError, match='made with memory="log_linear"'):
        find_config(str(tmp_path), "dynamic")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a folder"):
        find_config(str(tmp_path / "file"))


COMMANDS_WITH_A_MODEL = {
    "info": ["info"],
    "generate": ["generate", "--prompt", "a"],
    "eval": ["eval", "--suite", "commonsense", "--limit", "1"],
    "bench ops": ["bench", "ops", "--streams", "captured", "--text", __file__, "--model"],
}


@pytest.mark.parametrize("command", COMMANDS_WITH_A_MODEL)
@pytest.mark.parametrize(
    ("given", "near"),
    {"nosuch": "", "out/nosuch": "", "mamba2-tny": "; did you mean 'mamba2-tiny'?"}.items(),
)
def test_names_of_nothing(command, given, near, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = COMMANDS_WITH_A_MODEL[command]
    if command == "eval":
        pytest.importorskip("lm_eval")
    assert main([*argv, given]) == 2
    assert capsys.readouterr().err == f"dla {command}: no such folder or preset: {given}{near}\n"


def test_folders_of_something_else(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2"}))
    with pytest.raises(ValueError, match="holds a model of type 'mamba2'"):
        find_config(str(tmp_path))


@pytest.fixture
def folder(tmp_path):
    DLAForCausalLM(preset("mamba2-tiny", memory="dynamic", num_hidden_layers=2)).bfloat16().save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_saved_model_in_its_own_dtype_or_another(folder):
    assert not is_preset(folder)
    model = load_model(folder, device="cpu")
    assert (model.dtype, model.training) == (torch.float32, False)
    assert load_model(folder, dtype=None, device="cpu").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        load_model(folder, dtype="int8")


def test_a_preset_has_the_same_weights_every_time():
    assert is_preset("mamba2-tiny")
    first, second = (load_model("mamba2-tiny", memory="dynamic", device="cpu") for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_memory_may_be_another(folder):
    model = load_model(folder, device="cpu", tau=0.9, capacity=4, state_dtype="bfloat16")
    assert (model.config.tau, model.config.capacity, model.config.state_dtype) == (0.9, 4, "bfloat16")
    with torch.no_grad():
        cache = model(torch.arange(40)[None], use_cache=True).past_key_values
    assert all(layer.state.state_dtype == torch.bfloat16 and layer.state.capacity == 4 for layer in cache.layers)
    with pytest.raises(ValueError, match="state_dtype must be one of"):
        load_model(folder, device="cpu", state_dtype="int8")
    with pytest.raises(ValueError, match='set_memory changes memory="dynamic"'):
        load_model("mamba2-tiny", device="cpu", state_dtype="bfloat16")
