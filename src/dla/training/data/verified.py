"""Whether files of tokens are what was written: they are read in full once, and that is remembered.

A file ``.verified`` in the folder, or one in the user's cache where the folder cannot be written to, records the sum of
the index and of every file its size, times and inode. While these are the same, opening costs one stat a file; when one
of them changes, all files are read again. That runs at 1.9 GB/s from memory on one core of an AMD EPYC (SHA-256 alone
at 2.2, with its SHA instructions), or as fast as the disk: 100 GB, 50 billion tokens, take a minute or more, once.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from dla.files import read_json, write_whole
from dla.training.data.shard_index import DTYPES, ENDS_DTYPE, INDEX, Index, ends_file, token_file

STAMP = ".verified"
PIECE = 1 << 22  # bytes read at a time
PATIENCE = 2  # seconds without a progress bar

Stamp = dict[str, Any]
_here: dict[Path, Stamp] = {}  # what this process has verified itself, for where nothing can be written


class File(NamedTuple):
    """A file of a folder as the index has it."""

    name: str
    size: int
    sha256: str


def files_of(index: Index) -> Iterator[File]:
    """The files of a folder: of each shard its tokens, then the ends of its documents."""
    size = DTYPES[index["dtype"]].itemsize
    for i, shard in enumerate(index["shards"]):
        yield File(token_file(i), shard["tokens"] * size, shard["sha256"]["tokens"])
        yield File(ends_file(i), shard["documents"] * ENDS_DTYPE.itemsize, shard["sha256"]["ends"])


def ensure(folder: Path, index: Index, index_sum: str) -> None:
    """Read all files of a folder and compare them with the index, unless that was done since they changed.

    Any number of processes may do this at once: each reads for itself, and stamps are put in place whole.

    Raises:
        ValueError: a file is not as it was written, and which.
    """
    stamp = _stamp(folder, index, index_sum)
    if not any(_read_stamp(place) == stamp for place in _places(folder)) and _here.get(folder.resolve()) != stamp:
        verify(folder, index, index_sum)


def verify(folder: Path, index: Index, index_sum: str) -> None:
    """Read all files of a folder, compare them with the index, and remember that they were good."""
    before = _stamp(folder, index, index_sum)
    total = sum(file.size for file in files_of(index))
    with tqdm(total=total, desc="verifying", unit="B", unit_scale=True, disable=None, delay=PATIENCE) as bar:
        for i, shard in enumerate(index["shards"]):
            _verify_tokens(folder / token_file(i), shard, index, bar)
            _verify_ends(folder / ends_file(i), shard)
            bar.update(shard["documents"] * ENDS_DTYPE.itemsize)
    if _stamp(folder, index, index_sum) == before:  # else somebody wrote while they were read
        _remember(folder, before)


def token_error(path: Path, tokens: np.ndarray, start: int, vocab_size: int) -> ValueError:
    """For tokens of a file, from number ``start`` on, of which one is past the vocabulary."""
    first = int(np.argmax(tokens >= vocab_size))
    return ValueError(
        f"{path} has the token {tokens[first]} at position {start + first}, "
        f"accepted are those below vocab_size={vocab_size} of {INDEX}"
    )


def _verify_tokens(path: Path, shard: dict[str, Any], index: Index, bar: Any) -> None:
    dtype, vocab_size = DTYPES[index["dtype"]], index["vocab_size"]
    digest, wrong, start = hashlib.sha256(), None, 0
    buffer = bytearray(PIECE)
    with path.open("rb") as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
            tokens = np.frombuffer(buffer, dtype, count=size // dtype.itemsize)
            if wrong is None and len(tokens) and tokens.max() >= vocab_size:
                wrong = token_error(path, tokens, start, vocab_size)
            start += len(tokens)
            bar.update(size)
    _compare(path, digest.hexdigest(), shard["sha256"]["tokens"])
    if wrong is not None:
        raise wrong


def _verify_ends(path: Path, shard: dict[str, Any]) -> None:
    data = path.read_bytes()
    _compare(path, hashlib.sha256(data).hexdigest(), shard["sha256"]["ends"])
    ends = np.frombuffer(data, ENDS_DTYPE)
    lengths = np.diff(ends, prepend=0)
    if (lengths < 1).any():
        wrong = int(np.argmax(lengths < 1))
        raise ValueError(f"{path}: document {wrong} ends at {ends[wrong]}, which is not after the one before it")
    if ends[-1] != shard["tokens"]:
        raise ValueError(f"{path}: the last document ends at {ends[-1]}, the tokens of the shard at {shard['tokens']}")


def _compare(path: Path, found: str, written: str) -> None:
    if found != written:
        raise ValueError(f"{path} is corrupt: its sha256 is not that of {INDEX}")


# What is remembered.


def _stamp(folder: Path, index: Index, index_sum: str) -> Stamp:
    """What changes when a file does: an overwritten one has another time, a copied one another inode."""
    stats = {file.name: (folder / file.name).stat() for file in files_of(index)}
    return {
        "index": index_sum,
        "files": {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats.items()},
    }


def _places(folder: Path) -> list[Path]:
    """Where a stamp may be: in the folder or, under a name made from its path, in the user's cache."""
    with contextlib.suppress(RuntimeError):  # there is no home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
        return [folder / STAMP, cache / "dla" / "verified" / f"{name}.json"]
    return [folder / STAMP]


def _read_stamp(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return read_json(path)
    return None


def _remember(folder: Path, stamp: Stamp) -> None:
    """In the first place that takes it; where none does, every process verifies for itself."""
    _here[folder.resolve()] = stamp
    for path in _places(folder):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(stamp).encode())
            return
