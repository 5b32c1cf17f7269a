"""How far outputs lie apart when the same tokens are read at once, in pieces, and one by one.

    python benchmarks/pieces.py > benchmarks/pieces.json

For both backbones, all memories and three dtypes, the largest difference of a logit from those of the whole sequence
read at once, as a share of the largest logit. Beside it stands what leaving out the first half of the sequence does to
the last logits, so that one sees what the others are small against. Weights are random, of models of a million
parameters, and larger than at the start of a training, so that the memory is felt.

In bfloat16 the keys and values of a token depend in their last digits on how many tokens are read with it. Where nearly
every token opens a state, that is enough to merge another pair, and slots are numbered differently from there on. The
rows "dynamic, never merged" show what is left without that.
"""

import argparse
import json
import tempfile

import torch
from torch import Tensor
from transformers.utils import logging

from dla.models import DLACache, DLAForCausalLM, preset

PRESETS = ("mamba2-tiny", "gdn-tiny")
MEMORIES: dict[str, tuple[str, dict[str, object]]] = {
    "single": ("single", {}),
    "log_linear": ("log_linear", {}),
    "dynamic": ("dynamic", {}),
    "recommended": ("recommended", {}),
    "dynamic, never merged": ("dynamic", {"capacity": None}),
}
DTYPES = ("float64", "float32", "bfloat16")
SPREAD = 0.1  # of the random weights


@torch.inference_mode()
def logits(model: DLAForCausalLM, ids: Tensor, piece: int) -> Tensor:
    """[T, vocab] of the tokens ids [1, T], read so many at a time."""
    cache = DLACache(model.config.num_hidden_layers)
    read = [model(part, past_key_values=cache, use_cache=True).logits[0] for part in ids.split(piece, dim=1)]
    return torch.cat(read).double()


def make(name: str, memory: str, dtype: str) -> DLAForCausalLM:
    """A random model, saved and loaded in ``dtype`` as a trained one would be."""
    torch.manual_seed(0)
    memory, options = MEMORIES[memory]
    model = DLAForCausalLM(preset(name, memory, initializer_range=SPREAD, **options))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded: DLAForCausalLM = DLAForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return loaded.eval()


def measure(name: str, memory: str, dtype: str, length: int, piece: int) -> dict[str, object]:
    model = make(name, memory, dtype)
    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    whole = logits(model, ids, length)
    half = logits(model, ids[:, length // 2 :], length)
    apart = {"pieces": logits(model, ids, piece) - whole, "one by one": logits(model, ids, 1) - whole}
    apart["without the first half"] = half[-1] - whole[-1]
    shares = {key: float(difference.abs().max() / whole.abs().max()) for key, difference in apart.items()}
    return {"preset": name, "memory": memory, "dtype": dtype, **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=300, metavar="T", help="tokens (%(default)s)")
    parser.add_argument("--piece", type=int, default=77, metavar="N", help="tokens of a piece (%(default)s)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    rows = [
        measure(name, memory, dtype, args.length, args.piece)
        for name in PRESETS
        for memory in MEMORIES
        for dtype in DTYPES
    ]
    print(json.dumps({"length": args.length, "piece": args.piece, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
