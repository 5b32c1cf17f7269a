"""Tokens on disk that are not what was written: found on first use, remembered, and refused by name."""

import hashlib
import json
import os
import pickle
import stat
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dla.cli import main
from dla.text import ByteTokenizer
from dla.training.data import verified
from dla.training.data.shard_index import ends_file, is_shards, token_file
from dla.training.data.shard_writer import build
from dla.training.data.shards import Shards
from tests.training.common import train, write_settings

DOCUMENTS = [f"document {i} " * (1 + i % 7) for i in range(60)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build(DOCUMENTS, tmp_path / "x", ByteTokenizer(), tokenizer_name="bytes", shard_tokens=500)
    return tmp_path / "x"


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of tokens that are read in full, from now on; what the process remembers of before is forgotten."""
    read: list[str] = []
    plain = verified._verify_tokens

    def watched(path: Path, *rest: Any) -> None:
        read.append(path.name)
        plain(path, *rest)

    monkeypatch.setattr(verified, "_verify_tokens", watched)
    monkeypatch.setattr(verified, "_here", {})
    return read


def overwrite(path: Path, at: int = 20, by: bytes | None = None) -> None:
    """Change bytes in place; the size stays."""
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(1)
        file.seek(at)
        file.write(by or bytes([before[0] ^ 1]))


def fit(folder: Path, **change: Any) -> None:
    """Make the index say of the files what they are now."""
    index = {**json.loads((folder / "index.json").read_text()), **change}
    for i, shard in enumerate(index["shards"]):
        shard["sha256"] = {
            "tokens": hashlib.sha256((folder / token_file(i)).read_bytes()).hexdigest(),
            "ends": hashlib.sha256((folder / ends_file(i)).read_bytes()).hexdigest(),
        }
    (folder / "index.json").write_text(json.dumps(index))


def shard_count(folder: Path) -> int:
    return len(list(folder.glob("tokens-*.bin")))


# Once, and again when something changed.


def test_files_are_read_on_first_use_only(folder: Path, readings: list[str]) -> None:
    Shards(folder)
    assert readings == []  # `build` opened it
    (folder / ".verified").unlink()
    shards = Shards(folder)
    assert len(readings) == shard_count(folder) > 2
    for again in (Shards(folder), shards.part(3, 50), pickle.loads(pickle.dumps(shards))):
        assert again.read(0, 5).tolist() == shards.read(again.start, again.start + 5).tolist()
    assert len(readings) == shard_count(folder)


@pytest.mark.parametrize("file", ["tokens-00002.bin", "ends-00001.bin"])
def test_overwritten_files_are_found(folder: Path, file: str) -> None:
    """With the same size, and even with the same time of the last change."""
    before = (folder / file).stat()
    overwrite(folder / file)
    with pytest.raises(ValueError, match=rf"{file} is corrupt: its sha256 is not that of index\.json"):
        Shards(folder)
    os.utime(folder / file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match=f"{file} is corrupt"):
        Shards(folder)


def test_files_that_are_written_anew_with_the_same_content(folder: Path, readings: list[str]) -> None:
    path = folder / "tokens-00001.bin"
    path.write_bytes(path.read_bytes())
    Shards(folder)
    assert len(readings) == shard_count(folder)
    Shards(folder)
    assert len(readings) == shard_count(folder)


def test_another_index_is_another_build(folder: Path, readings: list[str]) -> None:
    fit(folder, source="another")
    Shards(folder)
    assert len(readings) == shard_count(folder)


@pytest.mark.parametrize("stamp", ["", "{", "[" * 200_000, "null", "[]", '{"index": 1}', '{"files": {}}'])
def test_a_stamp_that_is_none(folder: Path, readings: list[str], stamp: str) -> None:
    (folder / ".verified").write_text(stamp)
    Shards(folder)
    assert len(readings) == shard_count(folder)
    Shards(folder)
    assert len(readings) == shard_count(folder)


def test_a_folder_that_cannot_be_written_to(
    folder: Path, tmp_path: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stamp goes to the user's cache. A folder in its place stands for missing rights, which root always has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / ".verified").unlink()
    (folder / ".verified").mkdir()
    for _ in range(2):
        Shards(folder)
        assert len(readings) == shard_count(folder)
        verified._here.clear()  # as in another process
    assert len(list((tmp_path / "cache" / "dla" / "verified").iterdir())) == 1
    assert not [f for f in folder.iterdir() if f.name.startswith(".verified.")]
    overwrite(folder / "tokens-00000.bin")
    with pytest.raises(ValueError, match="is corrupt"):
        Shards(folder)


def test_nowhere_to_remember(
    folder: Path, tmp_path: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (folder / ".verified").unlink()
    (folder / ".verified").mkdir()
    Shards(folder)
    Shards(folder)
    assert len(readings) == shard_count(folder)  # by this process, once
    verified._here.clear()
    Shards(folder)
    assert len(readings) == 2 * shard_count(folder)


def test_a_stamp_can_be_read_by_others(folder: Path) -> None:
    assert (folder / ".verified").stat().st_mode & stat.S_IRUSR
    assert stat.S_IMODE((folder / ".verified").stat().st_mode) == stat.S_IMODE((folder / "index.json").stat().st_mode)


def _opened(folder: Path) -> int:
    return Shards(folder).tokens


def test_many_processes_at_once(folder: Path) -> None:
    (folder / ".verified").unlink()
    verified._here.clear()  # which other processes begin with a copy of
    with ProcessPoolExecutor(4) as pool:
        assert len(set(pool.map(_opened, [folder] * 40))) == 1
    assert {f.name for f in folder.iterdir() if f.name.startswith(".v")} == {".verified"}
    json.loads((folder / ".verified").read_text())


def _read(shards: Shards) -> tuple[int, list[str]]:
    """In another process: the first token, and whether files were read in full."""
    return int(shards.read(0, 1)[0]), [str(path) for path in verified._here]


def test_workers_do_not_verify_what_was_sent_to_them(folder: Path) -> None:
    shards = Shards(folder)
    (folder / ".verified").unlink()
    verified._here.clear()
    with ProcessPoolExecutor(1) as pool:
        assert pool.submit(_read, shards).result() == (ord("d"), [])
    assert not (folder / ".verified").exists()


def test_files_that_change_while_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".verified").unlink()
    verified._here.clear()
    plain = verified._verify_ends

    def meanwhile(path: Path, shard: dict[str, Any]) -> None:
        plain(path, shard)
        os.utime(folder / "tokens-00000.bin", ns=(1, 1))

    monkeypatch.setattr(verified, "_verify_ends", meanwhile)
    Shards(folder)
    assert not (folder / ".verified").exists()


def test_dla_data_check_reads_whatever_is_remembered(folder: Path, readings: list[str]) -> None:
    for times in (1, 2):
        assert main(["data", "check", str(folder), "--json"]) == 0
        assert len(readings) == times * shard_count(folder)


def test_a_folder_that_was_emptied_can_be_used_again(folder: Path) -> None:
    for path in folder.glob("[!.]*"):
        path.unlink()
    build(DOCUMENTS, folder, ByteTokenizer(), tokenizer_name="bytes")


# Content that fits its sums and is wrong.


def test_tokens_past_the_vocabulary(folder: Path) -> None:
    overwrite(folder / "tokens-00001.bin", 2 * 17, (300).to_bytes(2, "little"))
    fit(folder)
    said = r"tokens-00001\.bin has the token 300 at position 17, accepted are those below vocab_size=256 of index\.json"
    with pytest.raises(ValueError, match=said):
        Shards(folder)


def test_tokens_that_change_after_opening(folder: Path) -> None:
    shards = Shards(folder)
    before = len(shards.read(0, shards.tokens))
    first = shards.index["shards"][0]["tokens"]
    overwrite(folder / "tokens-00001.bin", 2 * 17, (300).to_bytes(2, "little"))
    with pytest.raises(ValueError, match=r"tokens-00001\.bin has the token 300 at position 17,"):
        shards.read(0, before)
    with pytest.raises(ValueError, match=r"at position 17,"):
        shards.part(first + 5, before).read(10, 20)
    assert len(shards.read(0, first + 17)) == first + 17


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (lambda ends, tokens: [5, 5, *ends[2:]], "document 1 ends at 5, which is not after the one before it"),
        (lambda ends, tokens: [0, *ends[1:]], "document 0 ends at 0, which is not after"),
        (lambda ends, tokens: [-3, *ends[1:]], "document 0 ends at -3, which is not after"),
        (lambda ends, tokens: [*ends[:-1], tokens + 1], r"the last document ends at \d+, the tokens of the shard at"),
        (lambda ends, tokens: [*ends[:-1], tokens - 1], r"the last document ends at \d+, the tokens of the shard at"),
        (lambda ends, tokens: [*ends[:-1], 2**62], "the last document ends at 4611686018427387904, the tokens of"),
    ],
)
def test_ends_that_are_none(folder: Path, ends: Callable[[list[int], int], list[int]], said: str) -> None:
    path = folder / "ends-00001.bin"
    tokens = json.loads((folder / "index.json").read_text())["shards"][1]["tokens"]
    np.array(ends(np.fromfile(path, "<i8").tolist(), tokens), dtype="<i8").tofile(path)
    fit(folder)
    with pytest.raises(ValueError, match=rf"ends-00001\.bin: {said}"):
        Shards(folder)


# The index.


def _shard(**change: Any) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["shards"][1].update(change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            (lambda index, name=name: index.pop(name), f"{name} is missing")
            for name in ("dtype", "vocab_size", "tokenizer", "tokenizer_fingerprint", "eos", "shard_tokens", "source",
                         "complete", "shards", "tokens", "documents")
        ),
        (lambda index: index.update(dtype="int8"), "dtype must be one of 'uint16', 'uint32', got 'int8'"),
        (lambda index: index.update(dtype=16), "dtype must be one of 'uint16', 'uint32', got 16"),
        (lambda index: index.update(vocab_size="256"), "vocab_size must be an integer >= 1, got '256'"),
        (lambda index: index.update(vocab_size=-1), "vocab_size must be an integer >= 1, got -1"),
        (lambda index: index.update(vocab_size=70000), "vocab_size must be at most 65536, as dtype is uint16, got 7"),
        (lambda index: index.update(tokenizer=None), "tokenizer must be a text, got None"),
        (lambda index: index.update(tokenizer_fingerprint=[1]), "tokenizer_fingerprint must be a text, got [1]"),
        (lambda index: index.update(complete="yes"), "complete must be true or false, got 'yes'"),
        (lambda index: index.update(shards={}), "shards must be a list of objects {…}, got {}"),
        (lambda index: index.update(shards=[]), "shards must be a list of one shard at least, as complete is true"),
        (lambda index: index.update(shards=[1]), "shards[0] must be an object {…}, got 1"),
        (lambda index: index.update(tokens=1.5), "tokens must be an integer >= 0, got 1.5"),
        (lambda index: index.update(tokens=3), "tokens must be the sum over the shards, "),
        (lambda index: index.update(documents=True), "documents must be an integer >= 0, got True"),
        (_shard(tokens=-5), "shards[1].tokens must be an integer >= 1, got -5"),
        (_shard(tokens="5"), "shards[1].tokens must be an integer >= 1, got '5'"),
        (_shard(tokens=2**70), "shards[1].tokens must be a number of tokens that a file can have, got"),
        (_shard(documents=0), "shards[1].documents must be an integer >= 1, got 0"),
        (_shard(documents=10**6), "shards[1].documents must be at most shards[1].tokens, "),
        (_shard(read=None), "shards[1].read must be an integer >= 0, got None"),
        (_shard(sha256="abc"), "shards[1].sha256 must be an object {…}, got 'abc'"),
        (_shard(sha256={}), "shards[1].sha256.tokens is missing"),
        (_shard(sha256={"tokens": 5}), "shards[1].sha256.tokens must be a SHA-256 of 64 digits 0-9 a-f, got 5"),
        (_shard(sha256={"tokens": "0" * 64, "ends": "x"}), "shards[1].sha256.ends must be a SHA-256 of 64 digits"),
    ],
)  # fmt: skip
def test_indices_of_another_kind(
    folder: Path, change: Callable[[dict[str, Any]], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError) as refused:
        Shards(folder)
    assert str(refused.value).startswith(f"{folder}/index.json: {said}")
    assert main(["data", "check", str(folder)]) == 2
    assert capsys.readouterr().err == f"dla data check: {refused.value}\n"


@pytest.mark.parametrize("content", [b"", b"[" * 200_000, b"\xff\xfe", b"7", b'{"format": ' + b"1" * 9999 + b"}"])
def test_indices_that_are_no_json(folder: Path, content: bytes) -> None:
    (folder / "index.json").write_bytes(content)
    assert not is_shards(folder)
    with pytest.raises(ValueError, match=r"index\.json is no index of tokens") as refused:
        Shards(folder)
    assert "\n" not in str(refused.value)


# `dla train` on them.


def test_training_on_overwritten_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(DOCUMENTS)
    build([text[i::5] for i in range(5)], tmp_path / "shards", ByteTokenizer(), tokenizer_name="bytes")
    recipe = write_settings(tmp_path, "single", data={"train": str(tmp_path / "shards")}, schedule={"steps": 2})
    assert train(recipe, tmp_path / "good") == 0
    overwrite(tmp_path / "shards" / "tokens-00000.bin", 200)
    capsys.readouterr()
    assert train(recipe, tmp_path / "run") == 2
    path = tmp_path / "shards" / "tokens-00000.bin"
    assert capsys.readouterr().err == f"dla train: {path} is corrupt: its sha256 is not that of index.json\n"
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_tokens_that_change_while_a_run_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = write_settings(tmp_path, "single", checkpoint={"every": 2, "export": False}), tmp_path / "run"
    plain = Shards.read
    count = [0]

    def spoiled(self: Shards, start: int, stop: int) -> np.ndarray:
        count[0] += 1
        if count[0] == 30:
            for path in (tmp_path / "cache").rglob("tokens-*.bin"):
                np.full(path.stat().st_size // 2, 999, dtype="<u2").tofile(path)
        return plain(self, start, stop)

    monkeypatch.setattr(Shards, "read", spoiled)
    assert train(recipe, run) == 2
    said = capsys.readouterr().err.splitlines()
    assert "has the token 999 at position" in said[-1] and said[-1].startswith("dla train: ")
    assert "; the last checkpoint is that of step" in said[-1] and not any("Traceback" in line for line in said)
