"""Weights that are missing, of another shape or cut short are refused by name; none is drawn at random."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dla import cli
from dla.models import DLAForCausalLM, preset

LOADERS = {"own": DLAForCausalLM, "auto": AutoModelForCausalLM}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    DLAForCausalLM(preset("mamba2-tiny", memory="dynamic")).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder, **changes):
    """Replace tensors of a model, None: leave them out."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for part, new in changes.items():
        name = next(name for name in tensors if name.endswith(part))
        old = tensors.pop(name)
        if new is not None:
            tensors[name] = new(old).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("loader", LOADERS)
def test_a_whole_model_loads(loader, folder):
    model, info = LOADERS[loader].from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, DLAForCausalLM) and not info["missing_keys"]
    assert isinstance(LOADERS[loader].from_pretrained(folder), DLAForCausalLM)


@pytest.mark.parametrize("loader", LOADERS)
def test_missing_weights_are_refused_by_name(loader, folder):
    change(folder, A_log=None)
    with pytest.raises(ValueError, match=r"lack .*A_log"):
        LOADERS[loader].from_pretrained(folder)


def test_weights_of_another_shape_are_refused(folder):
    change(folder, A_log=lambda x: x[:1])
    with pytest.raises((ValueError, RuntimeError), match=r"A_log|mismatch"):
        DLAForCausalLM.from_pretrained(folder)


def test_the_command_says_so_in_one_line(folder, capsys):
    change(folder, A_log=None)
    assert cli.main(["generate", str(folder), "--prompt", "a", "--max-new-tokens", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "A_log" in captured.err.splitlines()[-1]


@pytest.mark.parametrize("kept", [0, 10, 5000])
def test_a_truncated_file_is_one_line(kept, folder, capsys):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert cli.main(["generate", str(folder), "--prompt", "a", "--max-new-tokens", "1"]) == 2
    assert "cannot be read" in capsys.readouterr().err.splitlines()[-1]
