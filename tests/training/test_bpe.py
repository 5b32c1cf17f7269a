"""`dla data tokenizer`: a tokenizer of one's own texts that gives them back, here and in transformers."""

import json

import pytest
from transformers import AutoTokenizer

from dla import cli
from dla.text import load_tokenizer
from dla.training.data.encoding import end_token, find_tokenizer

TEXT = "def double(number):\n    return number * 2048  # zweimal: größer\n\n" * 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("bpe")
    (made / "text.txt").write_text(TEXT)
    assert cli.main(["data", "tokenizer", str(made / "text.txt"), str(made / "tokenizer"), "--vocab", "300"]) == 0
    return made / "tokenizer"


@pytest.mark.parametrize("text", [TEXT, "", " a  b\t\n", "漢字 \x00 🙂", "1234"])
def test_text_comes_back_as_it_was(folder, text):
    for tokenizer in (load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert max(ids, default=0) < 300


def test_merges_are_learned_and_digits_stand_alone(folder):
    tokenizer = load_tokenizer(folder)
    assert 257 < len(tokenizer) <= 300 and len(tokenizer.encode(TEXT)) < len(TEXT.encode()) / 2
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2048")] == ["2", "0", "4", "8"]


def test_documents_end_with_a_token_of_their_own(folder):
    tokenizer = find_tokenizer(str(folder))
    assert tokenizer.decode([end_token(tokenizer)]) == "<|end|>"
    assert end_token(tokenizer) not in tokenizer.encode(TEXT)


def test_the_same_texts_give_the_same_tokenizer(folder, tmp_path):
    assert cli.main(["data", "tokenizer", str(folder.parent / "text.txt"), str(tmp_path), "--vocab", "300"]) == 0
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == json.loads((folder / "tokenizer.json").read_text())


def test_too_small_a_vocabulary_is_refused(folder, capsys):
    assert cli.main(["data", "tokenizer", str(folder.parent / "text.txt"), "nowhere", "--vocab", "256"]) == 2
    assert "--vocab=256 is too small" in capsys.readouterr().err
