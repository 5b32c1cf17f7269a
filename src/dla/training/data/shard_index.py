"""What a folder of tokens says of itself, index.json, and the names of its files.

A folder holds, for each shard, ``tokens-00000.bin`` (uint16 where the vocabulary fits, else uint32, little endian) and
``ends-00000.bin`` (int64: where each document ends, in tokens from the shard's beginning), and ``index.json``. No
document crosses shards; each ends with an end token.
"""

import hashlib
import json
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np

from dla.typed import BadValueError, Count, Limit, Natural, Sha256, convert

FORMAT = 1
INDEX = "index.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS_DTYPE = np.dtype("<i8")

Index = dict[str, Any]


class Sums(TypedDict):
    """Of a shard's files."""

    tokens: Sha256
    ends: Sha256


class Shard(TypedDict):
    """What is in a shard. read: documents of the source up to its end, those without text among them."""

    tokens: Annotated[Count, Limit("a number of tokens that a file can have", lambda x: x < 2**62)]
    documents: Count
    read: Natural
    sha256: Sums


class IndexFields(TypedDict):
    """What an index holds, beside its format."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: Count
    tokenizer: str
    tokenizer_fingerprint: str
    source: str
    eos: Natural
    shard_tokens: Count
    complete: bool
    shards: list[Shard]
    tokens: Natural
    documents: Natural


def token_file(shard: int) -> str:
    return f"tokens-{shard:05d}.bin"


def ends_file(shard: int) -> str:
    return f"ends-{shard:05d}.bin"


def is_shards(folder: str | PathLike[str]) -> bool:
    """Whether a folder was made by `dla data build`, finished or not."""
    try:
        index = json.loads((Path(folder) / INDEX).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(index, dict) and "format" in index and "shards" in index


def read_index(folder: Path) -> tuple[Index, str]:
    """The index of a folder, all its fields checked, and the SHA-256 of the file.

    Raises:
        ValueError: it is of another format, or a field is not what it should be.
    """
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{folder} holds no tokens: there is no {INDEX}; `dla data build` makes such folders")
    data = path.read_bytes()
    try:
        index = json.loads(data)
        version = index["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"{path} is no index of tokens: {type(e).__name__}: {e}") from e
    if version != FORMAT:
        raise ValueError(f"{path} has format {version!r}, this version of dla reads {FORMAT}")
    try:
        _check(convert("", index, IndexFields))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return dict(index), hashlib.sha256(data).hexdigest()


def _check(index: Index) -> None:
    """Whether the fields go together."""
    most = 2 ** (8 * DTYPES[index["dtype"]].itemsize)
    if index["vocab_size"] > most:
        raise BadValueError("vocab_size", f"at most {most}, as dtype is {index['dtype']}", index["vocab_size"])
    if index["complete"] and not index["shards"]:
        raise BadValueError("shards", "a list of one shard at least, as complete is true", [])
    for i, shard in enumerate(index["shards"]):
        if shard["documents"] > shard["tokens"]:
            accepted = f"at most shards[{i}].tokens, {shard['tokens']}"
            raise BadValueError(f"shards[{i}].documents", accepted, shard["documents"])
    for name in ("tokens", "documents"):
        total = sum(shard[name] for shard in index["shards"])
        if index[name] != total:
            raise BadValueError(name, f"the sum over the shards, {total}", index[name])
