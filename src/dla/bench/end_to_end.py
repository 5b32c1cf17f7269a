"""`dla bench models`: a prompt and some tokens with whole models of random weights, each in a process of its own."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dla.bench.common import Figures, say
from dla.bench.timing import in_new_process, peak_extra_bytes
from dla.choices import MEMORIES
from dla.models import DLACache, DLAConfig, DLAForCausalLM
from dla.models.load import find_config, load_model
from dla.report import table
from dla.report.found import Found

THEIRS = "transformers"
CHUNK = 64  # of transformers' Mamba-2


def run(*, preset: str, prompt: int, new_tokens: int, out: Path | None = None) -> Found:
    """Measure every memory of a preset, and transformers' model of the same size where there is one."""
    config = find_config(preset)
    contenders = [*MEMORIES] if config.backbone != "softmax" else ["single"]
    if config.backbone == "mamba2" and not config.intermediate_size:
        contenders.append(THEIRS)
    rows: list[Figures] = []
    for contender in contenders:
        arguments = {"preset": preset, "contender": contender, "prompt": prompt, "new_tokens": new_tokens}
        rows.append({"model": contender, **in_new_process("dla.bench.end_to_end", **arguments)})
        say(f"{contender}: {rows[-1]['seconds']:.1f} s")
    report = {"preset": preset, "prompt": prompt, "new tokens": new_tokens, "dtype": "float32", "rows": rows}
    return Found(table(rows), report, out)


def main(arguments: str) -> None:
    """One contender: builds it, reads the prompt, decodes greedily, prints the figures."""
    wanted = json.loads(arguments)
    config, contender = find_config(wanted["preset"]), wanted["contender"]
    ours = contender != THEIRS
    model = load_model(wanted["preset"], memory=contender, device="cpu") if ours else _theirs(config)
    ids = torch.randint(0, config.vocab_size, (1, wanted["prompt"]))
    figures: Figures = {"parameters": sum(x.numel() for x in model.parameters())}
    with torch.inference_mode():
        figures["peak extra bytes"] = peak_extra_bytes(lambda: _go(model, ids, wanted["new_tokens"], figures))
    figures["weight bytes"] = sum(x.nbytes for x in model.parameters())
    print(json.dumps(figures))


def _go(model: nn.Module, ids: Tensor, new_tokens: int, figures: Figures) -> None:
    ours = isinstance(model, DLAForCausalLM)
    start = time.perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1)
    figures["prefill seconds"] = time.perf_counter() - start
    for _ in range(new_tokens):
        past = {"past_key_values": out.past_key_values} if ours else {"cache_params": out.cache_params}
        out = model(out.logits[:, -1:].argmax(-1), use_cache=True, **past)
    figures["seconds"] = time.perf_counter() - start
    figures["ms/token"] = 1000 * (figures["seconds"] - figures["prefill seconds"]) / new_tokens
    cache = out.past_key_values if ours else out.cache_params
    figures["cache bytes"] = cache.nbytes if isinstance(cache, DLACache) else _their_bytes(cache)


def _theirs(config: DLAConfig) -> nn.Module:
    """transformers' Mamba-2 of the same sizes."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = Mamba2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_heads=config.num_heads,
        head_dim=config.head_v_dim,
        state_size=config.head_k_dim,
        n_groups=config.num_key_heads,
        expand=config.num_heads * config.head_v_dim // config.hidden_size,
        tie_word_embeddings=config.tie_word_embeddings,
        chunk_size=CHUNK,
    )
    torch.manual_seed(0)
    return Mamba2ForCausalLM(sizes).eval()


def _their_bytes(cache: Any) -> int:
    found = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [x for value in found for x in (value.values() if isinstance(value, dict) else [value])]
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


if __name__ == "__main__":
    main(sys.argv[1])
