"""What training takes of a GPU's memory: a dry run of a step's allocations, on tensors that have sizes and no numbers.

    python benchmarks/gpu_memory.py [--document docs/gpu.md]

Two models of few layers run forward and backward through the Triton kernels' code, of which nothing is launched; the
difference of their peaks is a layer's. Everything that torch allocates is counted, and nothing of what the allocator
loses to gaps.
"""

import argparse
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {"TRITON_INTERPRET": "1", "DLA_NO_COMPILED": "1"}  # before triton is imported: nothing may run

import torch
import torch.nn.functional as F
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dla.models import preset
from dla.models.causal_lm import DLAForCausalLM
from dla.ops import backends
from dla.ops.gpu.shapes import by_others
from dla.report.marked import fill, markdown

LENGTH = 16384
LAYERS = (2, 4)
GPU_BYTES = 80e9
RANKS = 4
PRESETS = ("mamba2-780m", "gdn-1.3b")
MEMORIES = (("single", False), ("log_linear", False), ("paper", False), ("paper", True), ("recommended", False))
USABLE = 0.9  # of a GPU: the rest is for gathered layers, the allocator's gaps and the driver


class Allocations(TorchDispatchMode):
    """Bytes of all that is made inside and still alive, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:  # what is changed in place
                self.count(x.untyped_storage())
        return made

    def count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.bytes -= size


@contextmanager
def autocast() -> Iterator[None]:
    """Products in bfloat16, as autocast has it, which does not know tensors without numbers."""

    def narrow(run: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            return run(*(x.bfloat16() if isinstance(x, torch.Tensor) else x for x in args), **more)

        return call

    with ExitStack() as stack:
        for name in ("linear", "conv1d"):
            stack.enter_context(mock.patch.object(F, name, narrow(getattr(F, name))))
        yield


@dataclass(frozen=True)
class Step:
    """Of a model of some layers: bytes of its weights, and most that a step takes beside them and their gradients."""

    weights: int
    activations: int


def step(name: str, memory: str, layers: int, recompute: bool, soft: bool, length: int = LENGTH) -> Step:
    """One sequence forward and backward, under autocast to bfloat16."""
    config = preset(name, memory=memory, num_hidden_layers=layers, **({"temperature": 0.1} if soft else {}))
    with torch.device("meta"):
        model = DLAForCausalLM(config).train()
        ids = torch.zeros(1, length, dtype=torch.int64)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
    weights = sum(p.numel() * 4 for p in model.parameters())
    fx_config.meta_nonzero_assume_all_nonzero = True  # every token counts in the loss
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    by_triton = backends.TABLE["decide"][0]
    others = backends.Implementation("chunked", by_others)  # they decide on the host
    with Allocations() as seen, autocast(), mock.patch.dict(backends.TABLE, decide=(by_triton, others)):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return Step(weights, seen.peak)


@dataclass(frozen=True)
class Takes:
    """Of a model's training on one sequence, in bytes."""

    layer: float  # every layer beside its weights, from forward to backward
    most: float  # what a step takes beside the layers' share and the weights: the layer at work, logits
    shards: float  # a rank's part of weights, gradients and AdamW's two averages, in float32

    def on_a_gpu(self, layers: int, sequences: int) -> float:
        return self.shards + sequences * (self.most + layers * self.layer)

    def sequences(self, layers: int) -> int:
        """How many fit at a time."""
        left = USABLE * GPU_BYTES - self.shards
        return max(0, int(left // (self.most + layers * self.layer)))


def takes(name: str, memory: str, recompute: bool, soft: bool, length: int = LENGTH) -> Takes:
    few, more = (step(name, memory, n, recompute, soft, length) for n in LAYERS)
    between = LAYERS[1] - LAYERS[0]
    layer = (more.activations - few.activations) / between
    weights = few.weights + (preset(name).num_hidden_layers - LAYERS[0]) * (more.weights - few.weights) / between
    return Takes(layer, few.activations - LAYERS[0] * layer, 4 * weights / RANKS)


def rows(length: int = LENGTH) -> Iterator[dict[str, str]]:
    for name, memory, soft in ((n, m, s) for n in PRESETS for m, s in MEMORIES):
        layers = preset(name).num_hidden_layers
        for recompute in (False, True):
            found = takes(name, memory, recompute, soft, length)
            yield {
                "model": name,
                "memory": memory + (", soft gate" if soft else ""),
                "recomputes": "yes" if recompute else "no",
                "GB a layer": f"{found.layer / 1e9:.2f}",
                "GB beside": f"{found.most / 1e9:.1f}",
                "GB on each of 4": f"{found.on_a_gpu(layers, 1) / 1e9:.0f}",
                "sequences that fit": str(found.sequences(layers)),
            }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--document", type=Path, default=Path(__file__).parents[1] / "docs" / "gpu.md")
    fill(parser.parse_args(argv).document, {"memory": markdown(list(rows()))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
