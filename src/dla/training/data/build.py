"""`dla data build` and `dla data check`: tokens on disk, made once and used by many runs."""

import hashlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dla.report import table
from dla.report.found import Found
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
) -> Found:
    """Write the documents of sources, one after another, to ``out`` as tokens, and describe them."""
    given = [Source(path, field=field, subset=subset, split=split) for path in sources]
    try:
        key = hashlib.sha256("".join(source_fingerprint(source) for source in given).encode()).hexdigest()
        texts = chain.from_iterable(documents(source) for source in given)
        found = find_tokenizer(tokenizer)
        return _described(build(texts, out, found, tokenizer_name=tokenizer, source=key, shard_tokens=shard_tokens))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"before the end; the same command goes on with {out}") from None


def check(folder: Path) -> Found:
    """Compare all files of a folder of tokens with their sums, and describe it."""
    shards = Shards(folder, verified=True)
    shards.verify()
    return _described(shards)


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


def _described(shards: Shards) -> Found:
    about = summary(shards)
    rows = [{"": name.replace("_", " "), "value": _text(value)} for name, value in about.items() if name != "shards"]
    of_shards = table([{"shard": i, **shard} for i, shard in enumerate(about["shards"])])
    return Found(table(rows).split("\n", 2)[2] + "\n\n" + of_shards, about)


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else str(value)
