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
from dla.report.marked import fill, markdown

LENGTH = 16384
LAYERS = (2, 4)
GPU_BYTES = 80e9
RANKS = 4
PRESETS = ("mamba2-780m", "gdn-1.3b")
MEMORIES = ("single", "log_linear", "paper", "recommended")


class Allocations(TorchDispatchMode):
    """Bytes of all that is made inside and still alive, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
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
    """Of a model of some layers: bytes of its weights, and the most that a step takes beside them and their gradients."""

    weights: int
    activations: int


def step(name: str, memory: str, layers: int, recompute: bool, length: int = LENGTH) -> Step:
    """One sequence forward and backward, under autocast to bfloat16."""
    config = preset(name, memory=memory, num_hidden_layers=layers)
    with torch.device("meta"):
        model = DLAForCausalLM(config).train()
        ids = torch.zeros(1, length, dtype=torch.int64)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
    weights = sum(p.numel() * 4 for p in model.parameters())
    fx_config.meta_nonzero_assume_all_nonzero = True  # every token counts in the loss
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with Allocations() as seen, autocast():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return Step(weights, seen.peak)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--document", type=Path, default=Path(__file__).parents[1] / "docs" / "gpu.md")
    parser.parse_args(argv)
    for memory in MEMORIES:
        for recompute in (False, True):
            print(memory, recompute, *(step("mamba2-780m", memory, n, recompute) for n in LAYERS), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
