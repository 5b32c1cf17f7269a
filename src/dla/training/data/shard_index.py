"""What a folder of tokens says of itself, index.json, and the names of its files.

A folder holds, for each shard, ``tokens-00000.bin`` (uint16 where the vocabulary fits, else uint32, little endian) and
``ends-00000.bin`` (int64: where each document ends, in tokens from the shard's beginning), and ``index.json``. No
document crosses shards; each ends with an end token.
"""

import hashlib
import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from dla.training.fields import Fields, refuse

FORMAT = 1
INDEX = "index.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS_DTYPE = np.dtype("<i8")

Index = dict[str, Any]


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
        _check(Fields(index))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return dict(index), hashlib.sha256(data).hexdigest()


def _check(index: Fields) -> None:
    dtype = index.text("dtype")
    if dtype not in DTYPES:
        raise refuse("dtype", f"one of {', '.join(DTYPES)}", dtype)
    most = 2 ** (8 * DTYPES[dtype].itemsize)
    if index.integer("vocab_size", least=1) > most:
        raise refuse("vocab_size", f"at most {most}, as dtype is {dtype}", index["vocab_size"])
    for name in ("tokenizer", "tokenizer_fingerprint", "source"):
        index.text(name)
    index.integer("eos")
    index.integer("shard_tokens", least=1)
    if not isinstance(index["complete"], bool):
        raise refuse("complete", "true or false", index["complete"])
    shards = [Fields(shard, f"shards[{i}]") for i, shard in enumerate(index.items("shards"))]
    if index["complete"] and not shards:
        raise refuse("shards", "a list of one shard at least, as complete is true", [])
    for shard in shards:
        _check_shard(shard)
    for name in ("tokens", "documents"):
        total = sum(shard[name] for shard in shards)
        if index.integer(name) != total:
            raise refuse(name, f"the sum over the shards, {total}", index[name])


def _check_shard(shard: Fields) -> None:
    tokens = shard.integer("tokens", least=1)
    if shard.integer("documents", least=1) > tokens:
        raise refuse(shard.name("documents"), f"at most {shard.name('tokens')}, {tokens}", shard["documents"])
    if tokens >= 2**62:
        raise refuse(shard.name("tokens"), "a number of tokens that a file can have", tokens)
    shard.integer("read")
    sums = shard.fields("sha256")
    sums.sha256("tokens")
    sums.sha256("ends")
