"""What the operator itself takes of a GPU's memory in training: by formula, and by a dry run of its allocations.

    python -m benchmarks.gpu_memory_operator [--document docs/gpu.md]

Bytes of one layer on one sequence at the paper's shapes: what stays between the forward and the backward pass beside
inputs and outputs, which layers hold anyway, and the most that there is at once on the way.
"""

import argparse
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu_memory import Allocations  # before Triton: it says that nothing may run
from dla.ops.gpu import attend
from dla.ops.gpu.delta_states import TYPICAL
from dla.ops.gpu.shapes import PAPER, LayerShape, able, by_others, leaves, problem
from dla.ops.gpu.tiles import CHUNK
from dla.ops.problem import MemoryKind
from dla.report.marked import fill, markdown

KINDS: tuple[tuple[MemoryKind, bool], ...] = (
    ("single", False),
    ("log_linear", False),
    ("dynamic", False),
    ("dynamic", True),
)


@dataclass(frozen=True)
class Part:
    """Of what stays between the passes."""

    what: str
    bytes: float


def kept(shape: LayerShape, memory: MemoryKind, soft: bool) -> Iterator[Part]:
    """By formula. N tokens and heads, chunks of 64, K states (with the soft gate one more), weights in float32."""
    heads, N = shape.heads, shape.length * shape.heads
    chunks = shape.length // CHUNK
    if memory == "dynamic":
        yield Part("scores (4), boundaries (1) and deaths (4): 9 N", 9 * N)
    if soft:
        width = shape.dk + shape.dv
        yield Part("what scores saw, S^T k and S v: 4 N (dk + dv)", 4 * N * width)
        yield Part("numbers on the way from scores to the gate: 48 N", 48 * N)
    if not shape.beta or memory == "single":
        return
    if memory == "log_linear":
        rows = (shape.length - 1).bit_length() + 1 + CHUNK
        yield Part("weights of levels and tokens: 4 N (levels + 64)", 4 * chunks * heads * rows * CHUNK)
        yield Part("their slots, the same for every head", 2 * chunks * rows * CHUNK)
        return
    rows = shape.capacity + soft + CHUNK
    yield Part("weights of states and tokens: 4 N (K + 64)", 4 * N * rows)
    yield Part("their slots: 2 N (K + 64)", 2 * N * rows)
    if soft:
        yield Part("slots and weights of both parts of own tokens: 6 N 64", 6 * N * CHUNK)
        yield Part("shares of matrices: 8 N matrices", 8 * N * TYPICAL[0])


def dry_run(shape: LayerShape, memory: MemoryKind, soft: bool) -> tuple[int, int, int]:
    """Bytes that stay, and the most in the forward and in the backward pass; all beside inputs and outputs."""
    asked = replace(problem(shape, memory, shape.length, None, False), temperature=0.1 if soft else None)
    training = replace(asked, wants_state=False, **leaves(asked))
    inputs = [x for x in training.operands() if x is not None]
    with Allocations() as seen:
        decided = None
        if memory == "dynamic":
            decide = able("decide", asked)
            decided = by_others(asked) if decide is None else decide.decide(asked)
        o, _ = attend.attend(training, decided)
        gc.collect()
        outputs = o.untyped_storage().nbytes()
        stays, forward = seen.bytes - outputs, seen.peak - outputs
        seen.peak = seen.bytes
        torch.autograd.grad(o, inputs, torch.empty_like(o), allow_unused=True)
        return stays, forward, seen.peak - outputs


def rows() -> Iterator[dict[str, str]]:
    for shape in PAPER:
        for memory, soft in KINDS:
            stays, forward, backward = dry_run(shape, memory, soft)
            yield {
                "layer": shape.name,
                "memory": memory + (", soft gate" if soft else ""),
                "MB kept, by formula": f"{sum(part.bytes for part in kept(shape, memory, soft)) / 1e6:.0f}",
                "MB kept": f"{stays / 1e6:.0f}",
                "most MB forward": f"{forward / 1e6:.0f}",
                "most MB backward": f"{backward / 1e6:.0f}",
            }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--document", type=Path, default=Path(__file__).parents[1] / "docs" / "gpu.md")
    for shape in PAPER:
        for memory, soft in KINDS:
            print(f"{shape.name}, {memory}{', soft gate' * soft}:")
            for part in kept(shape, memory, soft):
                print(f"  {part.bytes / 1e6:8.1f} MB  {part.what}")
    fill(parser.parse_args(argv).document, {"memory operator": markdown(list(rows()))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
