"""From a recipe's data to batches: caches, what is held out, and what does not fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dla.text import ByteTokenizer
from dla.training.data.corpus import Corpus, Holdout, open_corpus
from dla.training.data.feed import BatchShape
from dla.training.data.shard_writer import build
from dla.training.data.shards import Shards
from dla.training.data.stream import StreamFeed
from dla.training.recipe import Data, Source


def texts(count: int, size: int = 40) -> list[str]:
    """No two alike."""
    return [f"<{i}:{'x' * (i % size)}>" for i in range(count)]


def lines(path: Path, documents: list[str]) -> Path:
    import json

    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def documents_of(shards: Shards) -> list[str]:
    return bytes(shards.read(0, shards.tokens).tolist()).decode().split("\0")[:-1]


@pytest.fixture
def data(tmp_path: Path) -> Data:
    source = Source(str(lines(tmp_path / "a.jsonl", texts(500))))
    return Data(train=(source,), holdout=0.1, length=16, cache=str(tmp_path / "cache"))


def shards_of(corpus: Corpus) -> list[Shards]:
    assert corpus.train is not None and corpus.streams is None
    return corpus.train


def test_training_and_validation_share_no_document(data: Data) -> None:
    corpus = open_corpus(data, 256)
    train, held = documents_of(shards_of(corpus)[0]), documents_of(corpus.validation[0])
    assert not set(train) & set(held)
    assert sorted(train + held) == sorted(texts(500))
    assert 30 < len(held) < 75
    assert train == [text for text in texts(500) if text in set(train)]  # in the source's order
    assert len(held) != texts(500).index(held[-1]) + 1  # and not the first ones


def test_the_same_documents_are_held_out_when_others_are_added(data: Data, tmp_path: Path) -> None:
    held = documents_of(open_corpus(data, 256).validation[0])
    more = replace(data, train=(Source(str(lines(tmp_path / "b.jsonl", texts(900)))),))
    assert documents_of(open_corpus(more, 256).validation[0])[: len(held)] == held


def test_at_least_one_document_is_held_out(data: Data, tmp_path: Path) -> None:
    few = replace(data, train=(Source(str(lines(tmp_path / "b.jsonl", ["a" * 50, "b" * 60, "c" * 70]))),), holdout=1e-4)
    corpus = open_corpus(few, 256)
    held = documents_of(corpus.validation[0])
    assert len(held) == 1
    assert sorted(documents_of(shards_of(corpus)[0]) + held) == ["a" * 50, "b" * 60, "c" * 70]
    assert not Holdout(1e-4, few.train[0]).single


def test_a_single_document_is_split_by_tokens(data: Data, tmp_path: Path) -> None:
    text = "".join(texts(300))
    (tmp_path / "book.txt").write_text(text)
    corpus = open_corpus(replace(data, train=(Source(str(tmp_path / "book.txt")),)), 256)
    train, held = shards_of(corpus)[0], corpus.validation[0]
    both = [*train.read(0, train.tokens), *held.read(0, held.tokens)]
    assert bytes(int(token) for token in both).decode() == text + "\0"
    assert held.tokens == pytest.approx(0.1 * len(both), rel=0.05)


def test_tokens_that_are_there_are_split_without_overlap(data: Data, tmp_path: Path) -> None:
    made = build(texts(500), tmp_path / "made", ByteTokenizer(), tokenizer_name="bytes", shard_tokens=1000)
    corpus = open_corpus(replace(data, train=(Source(str(tmp_path / "made")),)), 256)
    train, held = shards_of(corpus)[0], corpus.validation[0]
    assert train.stop <= held.start and held.stop == made.tokens
    assert held.start - train.stop < 60
    assert held.tokens == pytest.approx(0.1 * made.tokens, rel=0.05)
    assert chr(int(held.read(0, 1)[0])) == "<"  # a document's beginning
    assert not (tmp_path / "cache").exists()


def test_validation_sources(data: Data, tmp_path: Path) -> None:
    other = Source(str(lines(tmp_path / "v.jsonl", ["validation " * 5])))
    corpus = open_corpus(replace(data, validation=(other,)), 256)
    assert documents_of(shards_of(corpus)[0]) == texts(500)
    assert documents_of(corpus.validation[0]) == ["validation " * 5]
    corpus = open_corpus(replace(data, holdout=0.0), 256)
    assert documents_of(shards_of(corpus)[0]) == texts(500) and corpus.validation == []


def test_tokens_are_made_once(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_corpus(data, 256)
    monkeypatch.setattr("dla.training.data.shard_writer.encode", lambda *_: pytest.fail("tokenised again"))
    assert shards_of(open_corpus(data, 256))[0].folder == shards_of(first)[0].folder
    monkeypatch.undo()
    lines(tmp_path / "a.jsonl", [*texts(500), "new one"])
    second = open_corpus(data, 256)
    assert shards_of(second)[0].folder != shards_of(first)[0].folder
    assert "new one" in documents_of(shards_of(second)[0]) + documents_of(second.validation[0])


def test_only_the_main_process_writes(data: Data) -> None:
    with pytest.raises(ValueError, match="holds no tokens"):
        open_corpus(data, 256, main=False)
    waits = []

    def main_is_done() -> None:
        waits.append(open_corpus(data, 256))

    corpus = open_corpus(data, 256, main=False, wait=main_is_done)
    assert len(waits) == 1 and shards_of(corpus)[0].folder == shards_of(waits[0])[0].folder


def test_streams(data: Data, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    stream = Source(f"hf:json:{tmp_path}/a.jsonl", weight=2.0)
    corpus = open_corpus(replace(data, train=(stream,)), 256)
    assert corpus.train is None and corpus.streams == [stream] and corpus.validation == []
    feed = corpus.feed(BatchShape(data.length, data.documents, 4), 0)
    assert isinstance(feed, StreamFeed)
    micros, _ = next(feed.batches())
    assert bytes(micros[0].ids.flatten().tolist()).decode() == ("\0".join(texts(500)))[:64]
    with pytest.raises(ValueError, match=r"streamed sources \(hf:json:.*\) beside others; .*dla data build"):
        open_corpus(replace(data, train=(stream, *data.train)), 256)
    corpus = open_corpus(replace(data, train=(stream,), validation=(stream,)), 256)
    assert documents_of(corpus.validation[0]) == texts(500)


class Letters:
    """Not bytes, and of 300 tokens."""

    name_or_path, eos_token_id = "letters", 299

    def __len__(self) -> int:
        return 300

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(300)}

    def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


def test_what_does_not_fit(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(texts(500), tmp_path / "made", Letters(), tokenizer_name="letters")
    made = replace(data, train=(Source(str(tmp_path / "made")),))
    with pytest.raises(
        ValueError, match=r"made was built with another tokenizer \(letters\) than data.tokenizer, bytes"
    ):
        open_corpus(made, 500)
    monkeypatch.setattr("dla.training.data.corpus.find_tokenizer", lambda *_: Letters())
    open_corpus(made, 300)
    with pytest.raises(ValueError, match="made has 300 kinds of tokens, vocab_size is 299"):
        open_corpus(made, 299)


CASES: list[tuple[Callable[[Data], Data], int, str]] = [
    (lambda d: replace(d, train=()), 256, r"data\.train must be one source at least, got \(\)"),
    (lambda d: replace(d, holdout=1.0), 256, r"data\.holdout must be a number from 0 to below 1, got 1.0"),
    (lambda d: d, 100, "vocab_size=100 is too small for bytes"),
    (lambda d: replace(d, length=100_000), 256, "has .* tokens, fewer than the 100001"),
    (lambda d: replace(d, length=3000), 256, r"what data\.holdout=0\.1 leaves of .* for validation has"),
    (lambda d: replace(d, train=(Source("missing"),)), 256, "missing is no file or folder"),
]


@pytest.mark.parametrize("change, vocab_size, message", CASES)
def test_refusals(data: Data, change: Callable[[Data], Data], vocab_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        open_corpus(change(data), vocab_size)
    assert "\n" not in str(error.value)


def test_a_build_that_is_not_finished_is_refused(data: Data, tmp_path: Path) -> None:
    def broken() -> Any:
        yield "a"
        raise KeyError

    with pytest.raises(KeyError):
        build(broken(), tmp_path / "made", ByteTokenizer(), tokenizer_name="bytes")
    with pytest.raises(ValueError, match="made is not finished"):
        open_corpus(replace(data, train=(Source(str(tmp_path / "made")),)), 256)


def test_weights_reach_the_feed(data: Data, tmp_path: Path) -> None:
    capitals = Source(str(lines(tmp_path / "b.jsonl", ["Y" * 50] * 100)), weight=3.0)
    both = replace(data, train=(*data.train, capitals))
    corpus = open_corpus(both, 256)
    assert len(corpus.validation) == 2
    shape = BatchShape(both.length, both.documents, 100, micro=30, rank=1, world=2)
    batches = corpus.feed(shape, seed=1).batches()
    rows = np.concatenate([m.ids.numpy() for _ in range(20) for m in next(batches)[0]])
    assert rows.shape == (1000, 16)
    assert (rows == ord("Y")).any(1).mean() == pytest.approx(0.75, abs=0.06)
