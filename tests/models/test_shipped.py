"""Models that come with the package go by their names."""

from pathlib import Path

import pytest
import torch

from dla import cli
from dla.choices import OWN_MODEL
from dla.models import DLAForCausalLM, preset, shipped
from dla.models.load import find_config, is_preset, load_model
from dla.text import load_tokenizer

HERE = shipped.FOLDER / OWN_MODEL
needs_weights = pytest.mark.skipif(not HERE.is_dir(), reason="the weights are not in this checkout")


@pytest.fixture
def named(tmp_path, monkeypatch):
    torch.manual_seed(0)
    DLAForCausalLM(preset("mamba2-tiny", "paper")).save_pretrained(tmp_path / "weights" / "small")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "weights")
    return tmp_path


def test_a_name_is_a_folder(named):
    assert shipped.shipped() == ["small"]
    assert not is_preset("small") and find_config("small").memory == "dynamic"
    ours = load_model("small", device="cpu")
    again = load_model(str(named / "weights" / "small"), device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def test_a_folder_counts_more_than_a_name(named, monkeypatch):
    DLAForCausalLM(preset("mamba2-tiny", "single")).save_pretrained(named / "small")
    monkeypatch.chdir(named)
    assert find_config("small").memory == "single"


def test_near_names_are_named(named, capsys):
    assert cli.main(["info", "smal"]) == 2
    assert "did you mean 'small'?" in capsys.readouterr().err


@needs_weights
def test_generate_takes_it_when_no_model_is_named(capsys):
    assert cli.main(["generate", "--prompt", "def main(", "--max-new-tokens", "24", "--dtype", "float32"]) == 0
    text = capsys.readouterr().out
    assert text.strip() and "�" not in text


@needs_weights
def test_it_is_small_and_has_its_card():
    files = {path.name: path.stat().st_size for path in HERE.iterdir()}
    assert sum(files.values()) <= 8e6 and {"README.md", "tokenizer.json", "model.safetensors"} <= files.keys()
    assert "standard library" in (HERE / "README.md").read_text()


@needs_weights
def test_it_has_learned_python():
    """Its loss on a file of this package, which it has not seen: half of what guessing bytes by frequency has."""
    model, text = load_model(OWN_MODEL, device="cpu"), Path(cli.__file__).read_text()
    ids = torch.tensor([load_tokenizer(HERE).encode(text)])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss * ids.shape[1] / len(text.encode()) < 1.7  # nats a byte
