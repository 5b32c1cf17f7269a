"""Tokens on disk: what is read is what was written, interrupted or not, and damage is found."""

import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dla.cli import main
from dla.fingerprint import vocabulary_fingerprint
from dla.text import ByteTokenizer
from dla.training.data.build import check, run
from dla.training.data.encoding import encode, find_tokenizer
from dla.training.data.shard_index import is_shards
from dla.training.data.shard_writer import build
from dla.training.data.shards import Shards
from tests.shared_data import DATA

TOKENIZERS = DATA / "tokenizers"
gpt2 = pytest.mark.skipif(not (TOKENIZERS / "gpt2").is_dir(), reason="no tokenizer at hand")
mistral = pytest.mark.skipif(not (TOKENIZERS / "mistral").is_dir(), reason="no tokenizer at hand")


def texts(count: int = 60, seed: int = 0) -> list[str]:
    """Documents of 1 to 40 letters."""
    rng = np.random.default_rng(seed)
    return ["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(1, 41, count)]


def stream_of(documents: list[str]) -> tuple[list[int], list[int]]:
    """All tokens, and where documents begin, by hand."""
    tokens: list[int] = []
    starts = []
    for text in documents:
        starts.append(len(tokens))
        tokens += [*text.encode(), 0]
    return tokens, starts


def make(folder: Path, documents: list[str], **options: object) -> Shards:
    return build(documents, folder, ByteTokenizer(), tokenizer_name="bytes", **options)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (".lock", ".verified")}


def test_every_range_across_shards(tmp_path: Path) -> None:
    documents = texts()
    tokens, starts = stream_of(documents)
    shards = make(tmp_path / "x", documents, shard_tokens=100)
    assert len(shards.index["shards"]) > 8
    assert all(shard["tokens"] <= 100 for shard in shards.index["shards"])
    assert (shards.tokens, shards.documents, shards.vocab_size) == (len(tokens), len(documents), 256)
    rng = np.random.default_rng(1)
    for start, stop in [
        (0, len(tokens)),
        (7, 7),
        *np.sort(rng.integers(0, len(tokens) + 1, (200, 2)), axis=1).tolist(),
    ]:
        assert shards.read(start, stop).tolist() == tokens[start:stop]
        assert shards.document_starts(start, stop).tolist() == [p for p in starts if start < p < stop]
    assert shards.read(0, 3).dtype == np.int64
    assert shards.document_lengths().tolist() == [len(text) + 1 for text in documents]
    with pytest.raises(ValueError, match="start, stop"):
        shards.read(0, len(tokens) + 1)


def test_a_part(tmp_path: Path) -> None:
    documents = texts()
    tokens, starts = stream_of(documents)
    part = make(tmp_path / "x", documents, shard_tokens=100).part(150, 700).part(10, 500)
    assert part.tokens == 490
    assert part.read(0, 490).tolist() == tokens[160:650]
    assert part.document_starts(0, 490).tolist() == [p - 160 for p in starts if 160 < p < 650]
    assert part.documents == sum(160 <= p < 650 for p in starts)
    first = part.part(starts[10] - 160, 400)
    assert first.documents == sum(starts[10] <= p < 560 for p in starts)
    again = pickle.loads(pickle.dumps(part))
    assert again.read(0, 490).tolist() == tokens[160:650]


def test_documents_longer_than_a_shard_are_one_by_themselves(tmp_path: Path) -> None:
    documents = ["ab", "c" * 300, "d", "e" * 200]
    shards = make(tmp_path / "x", documents, shard_tokens=50)
    assert [s["tokens"] for s in shards.index["shards"]] == [3, 301, 2, 201]
    assert shards.read(0, shards.tokens).tolist() == stream_of(documents)[0]


class CutError(Exception):
    pass


def cut_after(documents: list[str], count: int) -> Iterator[str]:
    yield from documents[:count]
    raise CutError


@pytest.mark.parametrize("batch", [1, 7])
def test_an_interrupted_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr("dla.training.data.shard_writer.BATCH_DOCUMENTS", batch)
    documents = texts()
    keep = lambda number: number % 3 != 1  # noqa: E731
    make(tmp_path / "whole", documents, shard_tokens=100, keep=keep)
    for cut in [(0,), (30,), (5, 20, 33, 59), (59, 60)]:
        folder = tmp_path / f"cut{cut}"
        for count in cut:
            with pytest.raises(CutError):
                build(
                    cut_after(documents, count),
                    folder,
                    ByteTokenizer(),
                    tokenizer_name="b",
                    shard_tokens=100,
                    keep=keep,
                )
            with pytest.raises(ValueError, match="not finished"):
                Shards(folder)
            finished = len(json.loads((folder / "index.json").read_text())["shards"])
        assert finished > 1 or cut[-1] == 0
        build(documents, folder, ByteTokenizer(), tokenizer_name="bytes", shard_tokens=100, keep=keep)
        got, expected = contents(folder), contents(tmp_path / "whole")
        got["index.json"] = got["index.json"].replace(b'"b"', b'"bytes"')
        assert got == expected
    kept = [text for number, text in enumerate(documents) if keep(number)]
    assert Shards(tmp_path / "whole").read(0, len(stream_of(kept)[0])).tolist() == stream_of(kept)[0]


def test_finished_shards_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dla.training.data.shard_writer.BATCH_DOCUMENTS", 1)
    documents, folder = texts(), tmp_path / "x"

    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}

    with pytest.raises(CutError):
        make(folder, cut_after(documents, 40), shard_tokens=100)  # type: ignore[arg-type]
    before = times()
    assert len(before) > 6
    make(folder, documents, shard_tokens=100)
    after = times()
    assert len(after) > len(before) and before.items() <= after.items()
    make(folder, ["something else"], shard_tokens=100)  # finished: opened, not read
    assert times() == after


def test_other_settings_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "x", texts(), shard_tokens=100, source="one")
    with pytest.raises(ValueError, match="begun with shard_tokens=100, now it is 200"):
        make(tmp_path / "x", texts(), shard_tokens=200, source="one")
    with pytest.raises(ValueError, match="begun with source='one'"):
        make(tmp_path / "x", texts(), shard_tokens=100, source="two")
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        make(tmp_path / "y", texts())
    with pytest.raises(ValueError, match="no documents"):
        make(tmp_path / "z", [])
    with pytest.raises(ValueError, match="shard_tokens must be"):
        make(tmp_path / "z", texts(), shard_tokens=0)


def test_fewer_documents_than_before_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dla.training.data.shard_writer.BATCH_DOCUMENTS", 1)
    documents = texts()
    with pytest.raises(CutError):
        make(tmp_path / "x", cut_after(documents, 40), shard_tokens=100)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="documents has 10 documents"):
        make(tmp_path / "x", documents[:10], shard_tokens=100)


def test_damage_is_found(tmp_path: Path) -> None:
    shards = make(tmp_path / "x", texts(), shard_tokens=100)
    shards.verify()
    path = tmp_path / "x" / "tokens-00002.bin"
    good = path.read_bytes()
    path.write_bytes(good[:20] + bytes([good[20] ^ 1]) + good[21:])
    with pytest.raises(ValueError, match=r"tokens-00002\.bin is corrupt"):
        Shards(tmp_path / "x").verify()
    path.write_bytes(good[:-2])
    with pytest.raises(ValueError, match=r"tokens-00002\.bin has \d+ bytes"):
        Shards(tmp_path / "x")
    path.unlink()
    with pytest.raises(ValueError, match=r"tokens-00002\.bin is missing"):
        Shards(tmp_path / "x")
    path.write_bytes(good)
    ends = tmp_path / "x" / "ends-00001.bin"
    ends.write_bytes(b"\1" + ends.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"ends-00001\.bin is corrupt"):
        Shards(tmp_path / "x").verify()


def test_what_is_no_folder_of_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no index\.json"):
        Shards(tmp_path)
    assert not is_shards(tmp_path)
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(ValueError, match="is no index"):
        Shards(tmp_path)
    assert not is_shards(tmp_path)
    make(tmp_path / "x", texts())
    assert is_shards(tmp_path / "x")
    index = json.loads((tmp_path / "x" / "index.json").read_text())
    (tmp_path / "x" / "index.json").write_text(json.dumps({**index, "format": 9}))
    with pytest.raises(ValueError, match="has format 9, this version of dla reads 1"):
        Shards(tmp_path / "x")


def test_threads_and_pickles(tmp_path: Path) -> None:
    documents = texts()
    tokens, _ = stream_of(documents)
    shards = pickle.loads(pickle.dumps(make(tmp_path / "x", documents, shard_tokens=50)))
    with ThreadPoolExecutor(8) as pool:
        for i, read in enumerate(pool.map(lambda i: shards.read(i, i + 200), range(300))):
            assert read.tolist() == tokens[i : i + 200]


def test_bytes_of_any_file(tmp_path: Path) -> None:
    text = b"\xff\xfe a".decode("utf-8", "surrogateescape")
    shards = make(tmp_path / "x", [text])
    assert shards.read(0, 5).tolist() == [0xFF, 0xFE, 32, 97, 0]


class Wide:
    """A tokenizer of words with more than 2**16 tokens, as transformers' are called."""

    name_or_path, eos_token_id = "wide", 70_000

    def __len__(self) -> int:
        return 70_001

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(70_001)}

    def __call__(self, texts: list[str], **options: object) -> dict[str, list[list[int]]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    shards = build(["1 69999", "5"], tmp_path / "x", Wide(), tokenizer_name="wide")
    assert shards.read(0, 5).tolist() == [1, 69999, 70000, 5, 70000]
    assert (tmp_path / "x" / "tokens-00000.bin").stat().st_size == 20
    with pytest.raises(ValueError, match="begun with the tokenizer wide, now it is another, bytes"):
        make(tmp_path / "x", texts())
    with pytest.raises(ValueError, match="token 80000"):
        build(["80000"], tmp_path / "y", Wide(), tokenizer_name="wide")


@gpt2
@mistral
def test_transformers_tokenizers() -> None:
    pytest.importorskip("transformers")
    first = find_tokenizer(str(TOKENIZERS / "gpt2"))
    assert (len(first), first.eos_token_id) == (50257, 50256)
    rows = encode(first, ["Hello world", "a\udcffb"])
    assert rows[0].tolist() == [15496, 995, 50256]
    assert first.decode(rows[1][:-1]) == "a\N{REPLACEMENT CHARACTER}b"
    folder, file = (find_tokenizer(str(TOKENIZERS / name)) for name in ("mistral", "mistral/tokenizer.json"))
    assert folder.eos_token_id == file.eos_token_id == 2
    assert vocabulary_fingerprint(folder) == vocabulary_fingerprint(file) != vocabulary_fingerprint(first)
    with pytest.raises(ValueError, match="has 32000 tokens, but vocab_size is 1000"):
        find_tokenizer(str(TOKENIZERS / "mistral" / "tokenizer.json"), 1000)


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no tokenizer could be loaded from .*tokenizer\.json"):
        find_tokenizer(str(tmp_path / "tokenizer.json"))


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, text in enumerate(["one", "three", "fourteen"]):
        (tmp_path / f"{i}.txt").write_text(text)
    out = tmp_path / "out"
    built = run([str(tmp_path / f"{i}.txt") for i in range(3)], out, shard_tokens=10)
    assert "fourteen" not in built.text
    assert main(["data", "check", str(out), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about == built.figures
    assert about["documents"] == 3 and about["tokens"] == 19 and about["longest_document"] == 9
    assert about["median_document"] == 6 and [s["tokens"] for s in about["shards"]] == [10, 9]
    assert check(out) == built
    assert main(["data", "check", str(out)]) == 0
    assert "longest document  9" in capsys.readouterr().out
    assert main(["data", "build", str(tmp_path / "0.txt"), str(out), "--shard-tokens", "10"]) == 2
    assert capsys.readouterr().err.startswith(f"dla data build: {out} was begun with source=")
    (out / "tokens-00001.bin").write_bytes(b"x" * 18)
    assert main(["data", "check", str(out)]) == 2
    assert (
        capsys.readouterr().err
        == f"dla data check: {out}/tokens-00001.bin is corrupt: its sha256 is not that of index.json\n"
    )
    assert main(["data", "build", str(tmp_path / "missing"), str(tmp_path / "new")]) == 2
