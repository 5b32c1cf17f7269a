"""`dla bench decoding`: time and memory of a token far into a context, for the memories of one model."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dla.bench.common import Figures, say
from dla.choices import MEMORIES
from dla.models import DLACache, DLAForCausalLM
from dla.models.load import load_model
from dla.report import table
from dla.report.found import Found

PIECE = 4096  # tokens read at a time on the way to a context


@torch.inference_mode()
def run(*, preset: str, contexts: Sequence[int], tokens: int, out: Path | None = None) -> Found:
    """Decode ``tokens`` tokens from every context with every memory: times and cache sizes."""
    models = {memory: load_model(preset, memory=memory, device="cpu") for memory in MEMORIES}
    vocabulary = models["single"].config.vocab_size
    stream = torch.randint(0, vocabulary, (1, max(contexts) + tokens), generator=torch.Generator().manual_seed(1))
    caches = {memory: DLACache(model.config.num_hidden_layers) for memory, model in models.items()}
    rows: list[Figures] = []
    for context in sorted(contexts):
        rows.append({"context": context})
        for memory, model in models.items():
            milliseconds, most = _measure(model, caches[memory], stream, context, tokens)
            rows[-1] |= {f"{memory} ms": milliseconds, f"{memory} bytes": most}
        say(f"context {context} done")
    return Found(table(rows), {"preset": preset, "tokens": tokens, "rows": rows}, out)


def _measure(model: DLAForCausalLM, cache: DLACache, stream: Tensor, context: int, tokens: int) -> tuple[float, int]:
    """Milliseconds a token, averaged over ``tokens`` consecutive contexts, and the largest size of the cache there."""
    for seen in range(cache.get_seq_length(), context, PIECE):
        piece = stream[:, seen : min(seen + PIECE, context)]
        model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    most, start = 0, time.perf_counter()
    for t in range(context, context + tokens):
        model(stream[:, t : t + 1], past_key_values=cache, use_cache=True)
        most = max(most, cache.nbytes)
    return 1000 * (time.perf_counter() - start) / tokens, most
