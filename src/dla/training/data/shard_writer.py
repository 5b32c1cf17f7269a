"""Documents to tokens on disk, shard by shard: what was interrupted goes on, and gives the same bytes."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from dla.files import PART, settle, write_whole
from dla.fingerprint import vocabulary_fingerprint
from dla.training.data.encoding import encode, end_token, vocabulary_size
from dla.training.data.shard_index import DTYPES, ENDS_DTYPE, FORMAT, INDEX, ends_file, read_index, token_file
from dla.training.data.shards import Shards
from dla.training.data.verified import STAMP

SHARD_TOKENS = 2**27
BATCH_DOCUMENTS = 1024  # that are tokenised together,
BATCH_CHARACTERS = 2**21  # or fewer: so much text
LOCK = ".lock"


def build(
    documents: Iterable[str],
    folder: Path,
    tokenizer: Any,
    *,
    tokenizer_name: str,
    source: str = "",
    shard_tokens: int = SHARD_TOKENS,
    keep: Callable[[int], bool] | None = None,
) -> Shards:
    """Write documents to ``folder`` as tokens, an end token after each.

    Where a build was interrupted, the same call goes on after the shards that are finished; a finished one is opened.

    Args:
        documents: in an order that is the same at every call.
        tokenizer: a ``ByteTokenizer`` or one of the transformers library.
        tokenizer_name: for people; what counts is the tokenizer's fingerprint.
        source: a fingerprint of the documents; a folder that was begun with another is refused.
        shard_tokens: a shard ends before the document that would make it longer; a longer document is one by itself.
        keep: which documents, by number, go in; None: all.
    """
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        index = _begin(folder, _settings(tokenizer, tokenizer_name, source, shard_tokens))
        if not index["complete"]:
            _write_shards(_Writer(folder, index, tokenizer), documents, keep)
    return Shards(folder)


class _Writer:
    """Gathers tokens for one shard after another; what is finished is in the index."""

    def __init__(self, folder: Path, index: dict[str, Any], tokenizer: Any) -> None:
        self.folder, self.index, self.tokenizer = folder, index, tokenizer
        self._file: IO[bytes] | None = None
        self._reset()

    def _reset(self) -> None:
        self._ends: list[int] = []
        self._tokens, self._hash = 0, hashlib.sha256()

    @property
    def tokens(self) -> int:
        """Written and in hand."""
        return int(self.index["tokens"]) + self._tokens

    def add(self, numbers: Sequence[int], texts: Sequence[str]) -> None:
        """Documents with their numbers in the source."""
        for number, ids in zip(numbers, encode(self.tokenizer, texts), strict=True):
            if int(ids.max()) >= self.index["vocab_size"]:
                raise ValueError(f"the tokenizer gave token {ids.max()}, but it has {self.index['vocab_size']} tokens")
            if self._ends and self._tokens + len(ids) > self.index["shard_tokens"]:
                self.finish_shard(number)
            data = ids.astype(DTYPES[self.index["dtype"]], copy=False).tobytes()
            if self._file is None:
                self._file = (self.folder / (token_file(len(self.index["shards"])) + PART)).open("wb")
            self._file.write(data)
            self._hash.update(data)
            self._tokens += len(ids)
            self._ends.append(self._tokens)

    def finish_shard(self, read: int) -> None:
        """Put the shard in its place; the documents before number ``read`` are done."""
        if self._file is None:
            return
        number = len(self.index["shards"])
        settle(self._file, self.folder / token_file(number))
        self._file = None
        ends = np.array(self._ends, dtype=ENDS_DTYPE).tobytes()
        write_whole(self.folder / ends_file(number), ends)
        sums = {"tokens": self._hash.hexdigest(), "ends": hashlib.sha256(ends).hexdigest()}
        shard = {"tokens": self._tokens, "documents": len(self._ends), "read": read, "sha256": sums}
        self.index["shards"].append(shard)
        self.index["tokens"] += self._tokens
        self.index["documents"] += len(self._ends)
        _write_index(self.folder, self.index)
        self._reset()

    def close(self) -> None:
        """Drop what is not finished."""
        if self._file is not None:
            self._file.close()


def _write_shards(writer: _Writer, documents: Iterable[str], keep: Callable[[int], bool] | None) -> None:
    index = writer.index
    done = index["shards"][-1]["read"] if index["shards"] else 0
    read = 0
    bar = tqdm(desc="tokens", unit=" documents", dynamic_ncols=True, disable=None)
    with contextlib.closing(writer), bar:
        for read, numbers, texts in _batches(documents, done, keep):
            writer.add(numbers, texts)
            bar.update(read - bar.n)
            bar.set_postfix_str(f"{writer.tokens / 1e6:.1f}M tokens")
        writer.finish_shard(read)
    if read < done:
        raise ValueError(f"documents has {read} documents, but {done} were read when {writer.folder} was begun")
    if not index["shards"]:
        raise ValueError(f"there are no documents for {writer.folder}")
    index["complete"] = True
    _write_index(writer.folder, index)


def _batches(
    documents: Iterable[str], done: int, keep: Callable[[int], bool] | None
) -> Iterator[tuple[int, list[int], list[str]]]:
    """(documents read so far, numbers, texts) of those that go in, without the first ``done``."""
    numbers: list[int] = []
    texts: list[str] = []
    size, read = 0, 0
    for number, text in enumerate(documents):
        read = number + 1
        if number < done or (keep is not None and not keep(number)):
            continue
        numbers.append(number)
        texts.append(text)
        size += len(text)
        if len(texts) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield read, numbers, texts
            numbers, texts, size = [], [], 0
    yield read, numbers, texts


def _settings(tokenizer: Any, name: str, source: str, shard_tokens: int) -> dict[str, Any]:
    size = vocabulary_size(tokenizer)
    return {
        "format": FORMAT,
        "dtype": "uint16" if size <= 2**16 else "uint32",
        "vocab_size": size,
        "tokenizer": name,
        "tokenizer_fingerprint": vocabulary_fingerprint(tokenizer),
        "eos": end_token(tokenizer),
        "shard_tokens": shard_tokens,
        "source": source,
    }


def _begin(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The folder's index: a new one, or the one that is there if it was made with the same settings."""
    if not (folder / INDEX).is_file():
        others = sorted(x.name for x in folder.iterdir() if x.name not in (LOCK, STAMP) and x.suffix != PART)
        if others:
            raise ValueError(f"{folder} is not empty ({others[0]}, …) and has no {INDEX}; give a new folder")
        index = {**settings, "documents": 0, "tokens": 0, "shards": [], "complete": False}
        _write_index(folder, index)
        return index
    index, _ = read_index(folder)
    if index["tokenizer_fingerprint"] != settings["tokenizer_fingerprint"]:
        raise ValueError(
            f"{folder} was begun with the tokenizer {index['tokenizer']}, now it is another, {settings['tokenizer']}; "
            "give a new folder"
        )
    for name, value in settings.items():
        if name != "tokenizer" and index[name] != value:
            raise ValueError(f"{folder} was begun with {name}={index[name]!r}, now it is {value!r}; give a new folder")
    return index


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time writes to a folder; others wait, and find it finished."""
    with (folder / LOCK).open("w") as file:
        with contextlib.suppress(ImportError, OSError):  # no such locks: Windows, some network file systems
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    write_whole(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
