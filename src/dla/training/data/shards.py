"""Tokens on disk, as files that are mapped into memory: `Shards` reads what `build` in shard_writer.py wrote.

shard_index.py says what a folder holds.
"""

import bisect
from collections.abc import Iterator
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from dla.training.data.shard_index import DTYPES, ENDS_DTYPE, INDEX, ends_file, read_index, token_file
from dla.training.data.verified import ensure, files_of, token_error, verify


class Shards:
    """The tokens of a folder as one long row, or those from ``start`` to ``stop`` of it (None: to the end).

    Opening checks the index and the files' sizes, and on the first use of a folder also their sums (verified.py); files
    are mapped when they are first read. It can be pickled, and read by several threads.

    Args:
        verified: their sums have been compared, or somebody is about to: do not do it here.

    Raises:
        ValueError: something is not as it was written, and what.
    """

    def __init__(
        self, folder: str | PathLike[str], start: int = 0, stop: int | None = None, *, verified: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.index, self._index_sum = read_index(self.folder)
        if not self.index["complete"]:
            raise ValueError(f"{self.folder} is not finished: call again what was building it, and it goes on")
        self.dtype = DTYPES[self.index["dtype"]]
        self.vocab_size: int = self.index["vocab_size"]
        self.tokenizer_name: str = self.index["tokenizer"]
        self.tokenizer_fingerprint: str = self.index["tokenizer_fingerprint"]
        self._offsets = [0, *accumulate(shard["tokens"] for shard in self.index["shards"])]
        self._maps: dict[str, np.ndarray] = {}
        self._check_sizes()
        if not verified:
            ensure(self.folder, self.index, self._index_sum)
        self.start, self.stop = start, self._offsets[-1] if stop is None else stop
        if not 0 <= self.start <= self.stop <= self._offsets[-1]:
            raise ValueError(f"start, stop must be in 0 … {self._offsets[-1]} of {self.folder}, got {start}, {stop}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.folder, self.start, self.stop)

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def documents(self) -> int:
        """Documents that begin here."""
        return len(self._starts(max(0, self.start - 1), self.stop)) + (self.start == 0 < self.stop)

    def part(self, start: int, stop: int) -> "Shards":
        """The tokens from ``start`` to ``stop`` by themselves."""
        return _again(self.folder, self.start + start, self.start + stop)

    def read(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: the tokens from ``start`` to ``stop``, over as many shards as it takes.

        Raises:
            ValueError: the range is none of these tokens, or one of them is past the vocabulary.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"start, stop must be in 0 … {self.tokens} of {self.folder}, got {start}, {stop}")
        out = np.empty(stop - start, dtype=np.int64)
        for shard, a, b, at in self._pieces(self.start + start, self.start + stop):
            piece = self._map(token_file(shard), self.dtype)[a:b]
            if piece.max() >= self.vocab_size:  # the file may have been changed since it was verified
                raise token_error(self.folder / token_file(shard), piece, a, self.vocab_size)
            out[at : at + b - a] = piece
        return out

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """int64: the positions p where a document begins, start < p < stop."""
        return self._starts(self.start + start, self.start + min(stop, self.tokens)) - self.start

    def document_lengths(self) -> np.ndarray:
        """[documents] int64: tokens of each document of the whole folder, its end token included."""
        ends = [self._map(ends_file(i), ENDS_DTYPE) for i in range(len(self.index["shards"]))]
        return np.concatenate([np.diff(e, prepend=0) for e in ends])

    def verify(self) -> None:
        """Read all files and compare their sums with the index; a ValueError says which is not as it was written."""
        verify(self.folder, self.index, self._index_sum)

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

    def _check_sizes(self) -> None:
        for file, size, _ in files_of(self.index):
            path = self.folder / file
            if not path.exists():
                raise ValueError(f"{path} is missing")
            if (there := path.stat().st_size) != size:
                raise ValueError(f"{path} has {there} bytes, by {INDEX} it should have {size}")


def _again(folder: Path, start: int, stop: int) -> Shards:
    """Shards of a folder that was verified when it was opened, by this process or by the one that sent them here."""
    return Shards(folder, start, stop, verified=True)
