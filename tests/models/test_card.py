"""README.md of a saved model: what it says, and what nobody can make it say."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from dla.models import DLAConfig, DLAForCausalLM, preset
from dla.models.card import MARK, History, card, write_card
from dla.models.info import info
from dla.text import ByteTokenizer
from tests.models.common import KINDS, config, make

HOSTILE = "a | b\n\n# heading\n---\n```\n<script>alert(1)</script> [x](http://evil) *b* {{ 7 * 7 }} {% raw %}\r\x1b[31m"


def words(text: str) -> str:
    return " ".join(text.split())


def rows(text: str) -> dict[str, list[str]]:
    """The tables of a card, by the first cell of a row."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


@pytest.mark.parametrize("kind", KINDS)
def test_the_figures_are_those_of_info(kind: str) -> None:
    made = config(kind)
    text = card(made)
    found = rows(text)
    assert found["total"] and found["hidden_size"] == [str(made.hidden_size)]
    parameters = sum(p.numel() for p in make(kind).parameters())
    assert f"{parameters:,} parameters" in text
    assert re.search(rf"\| total +\| +{parameters:,} \|", text)
    for context in (1024, made.max_position_embeddings):
        columns = info(made, context, dtype=torch.float32)["memories"]
        column = columns.get("as configured") or columns.get("softmax") or columns[made.memory]
        assert f"{column['cache_bytes']['total']:,}" in found["total"]


def test_what_it_says_of_a_model() -> None:
    text = words(card(preset("gdn-tiny", "recommended", capacity=7, tau=0.25, merge="ward")))
    assert "4 layers of Gated DeltaNet with a dynamic memory" in text
    assert "at most 7 of them" in text and "is at least 0.25, and joins" in text and "(merge: ward)" in text
    assert "and by how well the query fits its keys" in text and "counted from the oldest state" in text
    found = rows(card(preset("gdn-tiny", "recommended", capacity=7, merge="ward")))
    assert (found["capacity"], found["merge"], found["sharpness"]) == (["7"], ["ward"], ["token"])
    assert "window" not in found and "block" not in found

    text = words(card(preset("mamba2-tiny", "dynamic", capacity=None, block=9, slot_order="recency")))
    assert "A new state begins every 9 tokens. States are never merged." in text
    assert "counted from the newest state" in text and "tau" in text and "query" not in text

    layers = ["mamba2:log_linear", "mamba2:single", "softmax"]
    text = card(DLAConfig(vocab_size=32, hidden_size=64, num_hidden_layers=6, layers=layers, window=12))
    assert "6 layers, 2 of Mamba-2 with a log-linear memory, 2 of Mamba-2 with one state a head, 2 of softmax" in text
    assert "**One state.**" in text and "**Log-linear memory.**" in text and "the last 12 tokens" in words(text)
    assert "Dynamic" not in text and "capacity" not in rows(text) and rows(text)["window"] == ["12"]
    assert "Keys and values of all tokens" in words(card(preset("transformer-tiny")))


def test_front_matter() -> None:
    data = ModelCard(card(preset("gdn-tiny", "log_linear"))).data.to_dict()
    assert data == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["dla", "gated-deltanet", "linear-attention", "log-linear-memory"],
    }
    assert ModelCard(card(preset("transformer-tiny"), license="mit")).data.license == "mit"
    assert ModelCard(card(preset("transformer-tiny"), license=HOSTILE)).data.license == HOSTILE


def test_nothing_hostile_gets_through() -> None:
    made = preset("gdn-tiny", "dynamic")
    honest, hostile = (card(made, History({"data": text}, {"loss": text})) for text in ("text", HOSTILE))
    assert len(honest.splitlines()) == len(hostile.splitlines())
    changed = [pair for pair in zip(honest.splitlines(), hostile.splitlines(), strict=True) if pair[0] != pair[1]]
    assert [before for before, _ in changed] == ["- data: text", "- loss: text"]
    for _, line in changed:
        assert "{{ 7 * 7 }}".replace("*", "\\*") in line
        assert not re.search(r"(?<!\\)[<|`\[*]", line.removeprefix("- ")) and "\x1b" not in line
    hidden = DLAConfig(**{**made.to_dict(), "other": HOSTILE, "architectures": [HOSTILE], "problem_type": HOSTILE})
    assert card(hidden) == card(made)


def test_others_cards_stay_and_ours_are_renewed(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    model = make("mamba2-dynamic", torch.float32)
    model.save_pretrained(tmp_path, license="mit")
    assert MARK in file.read_text() and "license: " in file.read_text()
    model.set_memory(capacity=3)
    model.save_pretrained(tmp_path)
    assert "at most 3 of them" in file.read_text() and "license" not in file.read_text()
    assert file.read_text() == card(model.config)
    kept = file.read_text().replace(MARK, "") + "\nmine"
    for content in (kept, "", "# My model\n"):
        file.write_text(content)
        model.save_pretrained(tmp_path)
        assert file.read_text() == content
    file.write_bytes(b"\xff\xfe no text at all")
    write_card(tmp_path, model.config)
    assert file.read_bytes() == b"\xff\xfe no text at all"


def test_saving_draws_no_random_numbers(tmp_path: Path) -> None:
    model = make("routed", torch.float32)
    before = torch.get_rng_state()
    model.save_pretrained(tmp_path)
    assert torch.get_rng_state().equal(before)


def test_who_writes_no_card(tmp_path: Path) -> None:
    make("mamba2-dynamic", torch.float32).save_pretrained(tmp_path / "other rank", is_main_process=False)
    make("mamba2-dynamic", torch.float32).model.save_pretrained(tmp_path / "no language model")
    peft = pytest.importorskip("peft")
    model = make("mamba2-dynamic", torch.float32)
    model.add_adapter(peft.LoraConfig(target_modules=["in_proj"]))
    model.save_pretrained(tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()
    assert not [*tmp_path.rglob("README.md")]


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = DLAForCausalLM(preset("mamba2-tiny", num_hidden_layers=1))
    model.save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
    exec(code.replace("path/to/this/folder", str(tmp_path)), {})
    assert capsys.readouterr().out.startswith("Once upon a time")
