"""A Mamba-2 mixer beside transformers' own with the same weights, both without their projections.

    python benchmarks/mixer.py [--tokens N] [--json FILE]

The projections, the same matrix products in both, are taken out: what goes in is given as the first one's output, and
the second one passes its input on. What is left is the convolution, the recurrence, the skip and the gated norm.
Rounds take turns; ratios are of medians, with the quartiles of the rounds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Mamba2Config, Mamba2ForCausalLM

from dla.bench.common import machine
from dla.bench.timing import interleaved, medians, ratio
from dla.cli import show
from dla.layers import Packing
from dla.layers.call import Call
from dla.models import DLAForCausalLM
from dla.models.convert import convert
from dla.report import table
from dla.report.found import Found

ROUNDS = 7
CHUNKS = (64, 256)  # transformers' chunk_size: which is faster depends on the machine


class Given(nn.Module):
    """In place of the first projection."""

    def __init__(self, made: Tensor) -> None:
        super().__init__()
        self.made = made
        self.weight = nn.Parameter(torch.empty(0))  # whose dtype and device the mixer asks for

    def forward(self, x: Tensor) -> Tensor:
        return self.made


@torch.no_grad()
def mixers(tokens: int, heads: int) -> tuple[dict[str, Callable[[], Tensor]], float]:
    """The calls by name, and how far their outputs differ, over the largest."""
    torch.manual_seed(0)
    hidden = 32 * heads  # expand 2, heads of 64
    calls: dict[str, Callable[[], Tensor]] = {}
    made: dict[int, Any] = {}
    for chunk in CHUNKS:
        config = Mamba2Config(vocab_size=64, hidden_size=hidden, num_hidden_layers=1, num_heads=heads, head_dim=64,
                              state_size=128, n_groups=1, chunk_size=chunk)  # fmt: skip
        made[chunk] = Mamba2ForCausalLM(config).eval()
        made[chunk].load_state_dict(made[CHUNKS[0]].state_dict())
    x = torch.randn(1, tokens, hidden)
    projected = made[CHUNKS[0]].backbone.layers[0].mixer.in_proj(x)
    for chunk, model in made.items():
        theirs = model.backbone.layers[0].mixer
        calls[f"transformers, chunks of {chunk}"] = lambda m=theirs: m(x)
    with tempfile.TemporaryDirectory() as folder:
        made[CHUNKS[0]].save_pretrained(Path(folder) / "theirs")
        for memory in ("single", "log_linear", "dynamic"):
            convert(Path(folder) / "theirs", Path(folder) / memory, memory=memory)
            ours = DLAForCausalLM.from_pretrained(Path(folder) / memory).eval().model.layers[0].mixer
            calls[memory] = lambda m=ours: m(x, Call(Packing(1, tokens)))
            without_projections(ours, projected)
    for model in made.values():
        without_projections(model.backbone.layers[0].mixer, projected)
    expected = calls[f"transformers, chunks of {CHUNKS[0]}"]()
    return calls, float((calls["single"]() - expected).abs().max() / expected.abs().max())


def without_projections(mixer: Any, projected: Tensor) -> None:
    mixer.in_proj, mixer.out_proj = Given(projected), nn.Identity()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    calls, difference = mixers(chosen.tokens, chosen.heads)
    seconds = interleaved(calls, ROUNDS)
    rows = []
    for name, median in medians(seconds).items():
        over = ratio(seconds[name], seconds["single"])
        rows.append({"mixer": name, "ms": 1e3 * median, "of one state": over.pop("median"), **over})
    text = f"{chosen.tokens} tokens, {chosen.heads} heads; outputs differ by {difference:.1e} of the largest"
    sizes = {"tokens": chosen.tokens, "heads": chosen.heads}
    report = {"machine": machine(), **sizes, "difference": difference, "rounds": ROUNDS, "mixers": rows}
    show(Found(f"{table(rows)}\n{text}", report, chosen.json), argparse.Namespace())


if __name__ == "__main__":
    main()
