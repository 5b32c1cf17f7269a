"""`dla bench context`: what a longer context is worth. The same tokens are predicted after short and long ones."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from dla.models import DLAForCausalLM
from dla.models.loss import IGNORED
from dla.report import table
from dla.text import model_tokenizer
from dla.training.data.documents import documents
from dla.training.data.encoding import encode
from dla.training.recipe import Source

TOKENS_AT_ONCE = 16384


def run(
    model: str,
    source: str,
    *,
    contexts: Sequence[int] = (128, 256, 512, 1024, 1920),
    tokens: int = 128,
    places: int = 256,
    field: str = "text",
    tokenizer: str | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> int:
    """Print the mean loss of ``tokens`` tokens at each of ``places`` after several contexts; the exit code."""
    disable_progress_bar()
    try:
        loaded = DLAForCausalLM.from_pretrained(model).eval()
        words = model_tokenizer(model, tokenizer, loaded.config.vocab_size)
        figures = measure(loaded, words, Source(source, field=field), sorted(contexts), tokens, places)
        report = {"model": model, "source": source, **figures}
    except (ValueError, OSError) as error:
        print(f"dla bench context: {error}", file=sys.stderr)
        return 2
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2) if as_json else _text(report["rows"]))
    return 0


def _text(rows: Sequence[dict[str, Any]]) -> str:
    """Differences are small: in thousandths."""
    shown = [
        {
            "context": row["context"],
            "loss": row["loss"],
            "difference / 1000": 1000 * row["difference"],
            "error / 1000": None if row["error"] is None else 1000 * row["error"],
        }
        for row in rows
    ]
    return table(shown)


def measure(
    model: DLAForCausalLM, tokenizer: Any, source: Source, contexts: Sequence[int], tokens: int, places: int
) -> dict[str, Any]:
    """Rows with the mean loss after each context, and its difference to the shortest with the standard error of it.

    The difference is one of the same tokens, place by place, so what the tokens are has no part in it.
    """
    texts = encode(tokenizer, list(documents(source)))
    windows = spots(texts, contexts[-1] + tokens, places)
    losses = {context: tail_losses(model, windows, context, tokens) for context in contexts}
    first = losses[contexts[0]]
    rows = []
    for context, found in losses.items():
        difference = found - first
        error = difference.std(ddof=1) / len(difference) ** 0.5 if context != contexts[0] else None
        rows.append({"context": context, "loss": found.mean(), "difference": difference.mean(), "error": error})
    return {"tokens": tokens, "places": len(windows), "rows": rows}


def spots(texts: Sequence[np.ndarray], length: int, places: int) -> np.ndarray:
    """[places, length] pieces of the documents, evenly spread and not overlapping."""
    pieces = [text[i : i + length] for text in texts for i in range(0, len(text) - length + 1, length)]
    if len(pieces) < 2:
        raise ValueError(f"the documents have {len(pieces)} pieces of {length} tokens; at least 2 are needed")
    chosen = np.linspace(0, len(pieces) - 1, min(places, len(pieces))).astype(int)
    return np.stack([pieces[i] for i in chosen]).astype(np.int64)


@torch.no_grad()
def tail_losses(model: DLAForCausalLM, windows: np.ndarray, context: int, tokens: int) -> np.ndarray:
    """[places] the mean loss of the last ``tokens`` tokens, each after at least ``context`` others."""
    ids = torch.from_numpy(windows[:, -(context + tokens) :])
    found: list[Tensor] = []
    for part in ids.split(max(1, TOKENS_AT_ONCE // ids.shape[1])):
        targets = torch.full_like(part, IGNORED)
        targets[:, -tokens - 1 : -1] = part[:, -tokens:]
        part, targets = part.to(model.device), targets.to(model.device)
        losses = model(part, shift_labels=targets, loss_reduction="none", use_cache=False).loss
        found.append(losses.sum(1).cpu() / tokens)
    return torch.cat(found).double().numpy()
