"""`dla bench decoding`: time and memory of a token far into a context, for the memories of one model."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dla.bench.common import Row, deliver, random_model, say
from dla.models import DLACache, DLAForCausalLM
from dla.models.config import MEMORIES
from dla.report import table

PIECE = 4096  # tokens read at a time on the way to a context


def run(name: str, *, contexts: Sequence[int], tokens: int, out: Path | None = None, as_json: bool = False) -> int:
    """Decode ``tokens`` tokens from every context with every memory, print times and cache sizes; the exit code."""
    models = {memory: random_model(name, memory) for memory in MEMORIES}
    vocabulary = models["single"].config.vocab_size
    stream = torch.randint(0, vocabulary, (1, max(contexts) + tokens), generator=torch.Generator().manual_seed(1))
    caches: dict[str, DLACache | None] = dict.fromkeys(models)
    rows: list[Row] = []
    for context in sorted(contexts):
        row: Row = {"context": context}
        for memory, model in models.items():
            with torch.inference_mode():
                milliseconds, caches[memory], most = _measure(model, caches[memory], stream, context, tokens)
            row |= {f"{memory} ms": milliseconds, f"{memory} bytes": most}
        rows.append(row)
        say(f"context {context} done")
    deliver({"preset": name, "tokens": tokens, "rows": rows}, table(rows), out, as_json)
    return 0


def _measure(
    model: DLAForCausalLM, cache: DLACache | None, stream: Tensor, context: int, tokens: int
) -> tuple[float, DLACache, int]:
    """Milliseconds a token, averaged over ``tokens`` consecutive contexts, the cache there and its largest size."""
    seen = 0 if cache is None else cache.get_seq_length()
    while seen < context:
        piece = stream[:, seen : min(seen + PIECE, context)]
        cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        seen += piece.shape[1]
    assert cache is not None
    most, start = 0, time.perf_counter()
    for t in range(context, context + tokens):
        model(stream[:, t : t + 1], past_key_values=cache, use_cache=True)
        most = max(most, cache.nbytes)
    return 1000 * (time.perf_counter() - start) / tokens, cache, most
