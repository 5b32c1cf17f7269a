"""The folder of a trained model: its card and its tokenizer."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dla.cli import main
from dla.models import DLAForCausalLM
from dla.text import ByteTokenizer, model_tokenizer
from tests.training.common import trained, write_settings


@pytest.mark.parametrize("damage", ["no log", "a damaged line", "no evaluation"])
def test_export_without_results(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = write_settings(tmp_path, "single", schedule={"steps": 2}), tmp_path / "run"
    trained(recipe, run)
    file = run / "log.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"evaluation"' not in line))
    if damage == "a damaged line":
        file.write_text("{\n" + file.read_text())
    elif damage == "no log":
        file.unlink()
    capsys.readouterr()
    assert main(["train", "export", str(run)]) == 0
    assert ("the model card has no results: " in capsys.readouterr().err) == (damage != "no evaluation")
    text = (run / "model" / "README.md").read_text()
    assert "## Training" in text and "- steps: 2 of 2" in text
    assert "Results" not in text and "gate" not in text


def test_a_model_of_bytes_has_a_tokenizer(tmp_path: Path) -> None:
    """For others, and for us: a vocabulary that is not 256 says nothing of bytes."""
    recipe = write_settings(tmp_path, "single", schedule={"steps": 2})
    trained(recipe, tmp_path / "run", "--model.vocab_size", 300, "--checkpoint.export", "true")
    folder = str(tmp_path / "run" / "model")
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.encode("é") == [0xC3, 0xA9] and theirs.eos_token_id == 0
    assert isinstance(model_tokenizer(folder, None, 300), ByteTokenizer)
    assert main(["generate", folder, "--prompt", "é", "--max-new-tokens", "2"]) == 0
    for file in Path(folder).glob("tokenizer*"):  # as it was before there were such files
        file.unlink()
    assert main(["generate", folder, "--prompt", "é", "--max-new-tokens", "2"]) == 2
    assert main(["generate", folder, "--tokenizer", "bytes", "--prompt", "é", "--max-new-tokens", "2"]) == 0


def test_text_ends_where_documents_do(tmp_path: Path) -> None:
    recipe = write_settings(tmp_path, "single", schedule={"steps": 2})
    trained(recipe, tmp_path / "run", "--checkpoint.export", "true")
    model = DLAForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 0  # the byte after every document
