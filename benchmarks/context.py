"""What a longer context is worth: the same tokens of a text are predicted after short and after long contexts.

    python benchmarks/context.py MODEL SOURCE [--contexts T ...] [--tokens N] [--places N]

MODEL is a saved model's folder, SOURCE a text as in a recipe's data.validation. Prints JSON: the mean loss after each
context, and its difference to the shortest with the standard error of that. The difference is one of the same tokens,
place by place, so what the tokens are has no part in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dla.models import DLAForCausalLM
from dla.models.load import load_model
from dla.models.loss import IGNORED
from dla.text import model_tokenizer
from dla.training.data.documents import documents
from dla.training.data.encoding import encode
from dla.training.recipe import Source

TOKENS_AT_ONCE = 16384


def measure(
    model: DLAForCausalLM, texts: Sequence[np.ndarray], contexts: Sequence[int], tokens: int, places: int
) -> dict[str, Any]:
    """A row for each context, from the shortest on."""
    contexts = sorted(contexts)
    windows = spots(texts, contexts[-1] + tokens, places)
    losses = {context: tail_losses(model, windows, context, tokens) for context in contexts}
    rows = []
    for context, found in losses.items():
        difference = found - losses[contexts[0]]
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 256, 512, 1024, 1920], metavar="T")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="that are predicted (%(default)s)")
    parser.add_argument("--places", type=int, default=256, metavar="N", help="at most (%(default)s)")
    parser.add_argument("--field", default="text", help="the column or key of the text (%(default)s)")
    parser.add_argument("--tokenizer", help="(the model's)")
    args = parser.parse_args(argv)
    model = load_model(args.model, dtype=None)
    tokenizer = model_tokenizer(args.model, args.tokenizer, model.config.vocab_size)
    texts = encode(tokenizer, list(documents(Source(args.source, field=args.field))))
    figures = measure(model, texts, args.contexts, args.tokens, args.places)
    print(json.dumps({"model": args.model, "source": args.source, **figures}, indent=2))


if __name__ == "__main__":
    main()
