"""Tokens on disk, as files that are mapped into memory: `Shards` reads what `build` in shard_writer.py wrote.

A folder holds, for each shard, ``tokens-00000.bin`` (uint16 where the vocabulary fits, else uint32, little endian) and
``ends-00000.bin`` (int64: where each document ends, in tokens from the shard's beginning), and ``index.json``. No
document crosses shards; each ends with an end token.
"""

import bisect
import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
INDEX = "index.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS_DTYPE = np.dtype("<i8")


def token_file(shard: int) -> str:
    return f"tokens-{shard:05d}.bin"


def ends_file(shard: int) -> str:
    return f"ends-{shard:05d}.bin"


def is_shards(folder: str | PathLike[str]) -> bool:
    """Whether a folder was made by `dla data build`, finished or not."""
    try:
        index = json.loads((Path(folder) / INDEX).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(index, dict) and "format" in index and "shards" in index


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder, of a format that is known here."""
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} holds no tokens: there is no {INDEX}; `dla data build` makes such folders")
    try:
        index = json.loads((folder / INDEX).read_text())
        version = index["format"]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{folder / INDEX} is no index of tokens: {e!r}") from e
    if version != FORMAT:
        raise ValueError(f"{folder / INDEX} has format {version!r}, this version of dla reads {FORMAT}")
    return dict(index)


class Shards:
    """The tokens of a folder as one long row, or those from ``start`` to ``stop`` of it (None: to the end).

    Opening reads the index and looks at the files' sizes; they are mapped when they are first read. It can be pickled,
    and read by several threads.
    """

    def __init__(self, folder: str | PathLike[str], start: int = 0, stop: int | None = None) -> None:
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        if not self.index["complete"]:
            raise ValueError(f"{self.folder} is not finished: call again what was building it, and it goes on")
        self.dtype = DTYPES[self.index["dtype"]]
        self._offsets = [0, *accumulate(shard["tokens"] for shard in self.index["shards"])]
        self._maps: dict[str, np.ndarray] = {}
        self._check_sizes()
        self.start, self.stop = start, self._offsets[-1] if stop is None else stop
        if not 0 <= self.start <= self.stop <= self._offsets[-1]:
            raise ValueError(f"start, stop must be in 0 … {self._offsets[-1]} of {self.folder}, got {start}, {stop}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, (self.folder, self.start, self.stop)

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def documents(self) -> int:
        """Documents that begin here."""
        if self.tokens == self._offsets[-1]:
            return int(self.index["documents"])
        first = self.tokens > 0 and (self.start == 0 or bool(self._starts(self.start - 1, self.start + 1).size))
        return len(self.document_starts(0, self.tokens)) + first

    @property
    def vocab_size(self) -> int:
        return int(self.index["vocab_size"])

    @property
    def tokenizer_name(self) -> str:
        return str(self.index["tokenizer"])

    @property
    def tokenizer_fingerprint(self) -> str:
        return str(self.index["tokenizer_fingerprint"])

    def part(self, start: int, stop: int) -> "Shards":
        """The tokens from ``start`` to ``stop`` by themselves."""
        return Shards(self.folder, self.start + start, self.start + stop)

    def read(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: the tokens from ``start`` to ``stop``, over as many shards as it takes."""
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"start, stop must be in 0 … {self.tokens} of {self.folder}, got {start}, {stop}")
        out = np.empty(stop - start, dtype=np.int64)
        for shard, a, b, at in self._pieces(self.start + start, self.start + stop):
            out[at : at + b - a] = self._map(token_file(shard), self.dtype)[a:b]
        return out

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """int64: the positions p where a document begins, start < p < stop."""
        return self._starts(self.start + start, self.start + min(stop, self.tokens)) - self.start

    def document_lengths(self) -> np.ndarray:
        """[documents] int64: tokens of each document of the whole folder, its end token included."""
        ends = [self._map(ends_file(i), ENDS_DTYPE) for i in range(len(self.index["shards"]))]
        return np.concatenate([np.diff(e, prepend=0) for e in ends])

    def verify(self, progress: bool = True) -> None:
        """Read all files and compare their sums with the index.

        Raises:
            ValueError: a file is not as it was written, and which.
        """
        from tqdm import tqdm  # type: ignore[import-untyped]

        total = sum(self._size(file) for file, *_ in self._files())
        quiet = not progress or not sys.stderr.isatty()
        with tqdm(total=total, desc="verifying", unit="B", unit_scale=True, disable=quiet) as bar:
            for file, _, sha256 in self._files():
                digest = hashlib.sha256()
                with (self.folder / file).open("rb") as data:
                    while piece := data.read(1 << 22):
                        digest.update(piece)
                        bar.update(len(piece))
                if digest.hexdigest() != sha256:
                    raise ValueError(f"{self.folder / file} is corrupt: its sha256 is not that of {INDEX}")

    def _starts(self, start: int, stop: int) -> np.ndarray:
        """As ``document_starts``, in positions of the whole folder: a document begins where another ends."""
        found = []
        for shard, a, b, _ in self._pieces(start, stop):
            ends = self._map(ends_file(shard), ENDS_DTYPE)
            first, last = np.searchsorted(ends, [a, b], side="right")
            found.append(self._offsets[shard] + ends[first:last])
        starts = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
        return starts[starts < stop]

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard, from, to, how far behind ``start``) of the shards that hold the tokens from ``start`` to ``stop``."""
        position, shard = start, bisect.bisect_right(self._offsets, start) - 1
        while position < stop:
            end = min(stop, self._offsets[shard + 1])
            yield shard, position - self._offsets[shard], end - self._offsets[shard], position - start
            position, shard = end, shard + 1

    def _map(self, file: str, dtype: np.dtype) -> np.ndarray:
        mapped = self._maps.get(file)
        if mapped is None:
            # as a plain array: slicing a memmap makes a memmap, which takes longer than the reading
            mapped = self._maps[file] = np.asarray(np.memmap(self.folder / file, dtype=dtype, mode="r"))
        return mapped

    def _files(self) -> Iterator[tuple[str, int, str]]:
        """(name, size, sum) of the files, as the index has them."""
        for i, shard in enumerate(self.index["shards"]):
            yield token_file(i), shard["tokens"] * self.dtype.itemsize, shard["sha256"]["tokens"]
            yield ends_file(i), shard["documents"] * ENDS_DTYPE.itemsize, shard["sha256"]["ends"]

    def _size(self, file: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / file).stat().st_size
        raise ValueError(f"{self.folder / file} is missing")

    def _check_sizes(self) -> None:
        for file, size, _ in self._files():
            there = self._size(file)
            if there != size:
                raise ValueError(f"{self.folder / file} has {there} bytes, by {INDEX} it should have {size}")
