"""`dla data build` and `dla data check`: tokens on disk, made once and used by many runs."""

import hashlib
import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dla.report import table
from dla.training.data.documents import documents, source_fingerprint
from dla.training.data.encoding import find_tokenizer
from dla.training.data.shard_writer import SHARD_TOKENS, build
from dla.training.data.shards import Shards
from dla.training.recipe import Source


def run(
    sources: list[str],
    out: Path,
    *,
    tokenizer: str = "bytes",
    field: str = "text",
    subset: str = "",
    split: str = "train",
    shard_tokens: int = SHARD_TOKENS,
    as_json: bool = False,
) -> int:
    """Write the documents of sources, one after another, to ``out`` as tokens; the exit code."""
    try:
        given = [Source(path, field=field, subset=subset, split=split) for path in sources]
        if not given:
            raise ValueError("no sources were given")
        key = hashlib.sha256("".join(source_fingerprint(source) for source in given).encode()).hexdigest()
        shards = build(
            chain.from_iterable(documents(source) for source in given),
            out,
            find_tokenizer(tokenizer),
            tokenizer_name=tokenizer,
            source=key,
            shard_tokens=shard_tokens,
        )
    except (ValueError, OSError) as error:
        return _refused(error)
    except KeyboardInterrupt:
        print(f"dla data: interrupted; the same command goes on with {out}", file=sys.stderr)
        return 130
    return _report(shards, as_json)


def check(folder: Path, as_json: bool = False) -> int:
    """Compare all files of a folder of tokens with their sums, and describe it; the exit code."""
    try:
        shards = Shards(folder, verified=True)
        shards.verify()
    except (ValueError, OSError) as error:
        return _refused(error)
    return _report(shards, as_json)


def summary(shards: Shards) -> dict[str, Any]:
    """What is in a folder of tokens. Lengths of documents are in tokens and count the end token."""
    lengths = shards.document_lengths()
    return {
        "folder": str(shards.folder),
        "tokenizer": shards.tokenizer_name,
        "vocab_size": shards.vocab_size,
        "documents": shards.documents,
        "tokens": shards.tokens,
        "mean_document": float(lengths.mean()),
        "median_document": float(np.median(lengths)),
        "longest_document": int(lengths.max()),
        "shards": [{"documents": s["documents"], "tokens": s["tokens"]} for s in shards.index["shards"]],
    }


def _report(shards: Shards, as_json: bool) -> int:
    about = summary(shards)
    if as_json:
        print(json.dumps(about))
        return 0
    rows = [{"": name.replace("_", " "), "value": _text(value)} for name, value in about.items() if name != "shards"]
    print(table(rows).split("\n", 2)[2])
    print()
    print(table([{"shard": i, **shard} for i, shard in enumerate(about["shards"])]))
    return 0


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else str(value)


def _refused(error: Exception) -> int:
    print(f"dla data: {error}", file=sys.stderr)
    return 2
