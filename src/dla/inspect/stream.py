"""`dla inspect stream`: the operator at work on a synthetic stream with planted changes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dla.inspect.figures import describe
from dla.inspect.pictures import draw_partitions
from dla.inspect.streams import Stream, correlated
from dla.inspect.theory import block_heterogeneity, fenwick_blocks, fixed_blocks
from dla.ops import Segmentation, segment
from dla.ops.rules import MERGES
from dla.report import table
from dla.report.found import Found
from dla.report.plots import NO_PICTURE

LENGTH, HEADS, DK, DV = 2048, 4, 16, 16
CAPACITY, TAU = 30, 0.6

TEXT = """\
A stream of {length} tokens in {segments} planted segments, {heads} heads, dk = {dk}, dv = {dv}, seed {seed}.
A token whose score reaches τ = {tau} opens a state; with {capacity} states alive, the merge rule first joins
two neighbours.

What is kept at the end (over all heads):

{partitions}

The bound of Theorem 1 (for a query of norm 1) measures how mixed the tokens inside a state are. It is not an
error of the operator: a state is the sum of its tokens, and reading a sum is exact.
W: how many dense states a read touches, counting a state of few tokens as its tokens.
At changes: the share of the kept states' beginnings at which the stream really changes.

The second run of each operator on this machine; the first one also loads what it needs:

{operators}

{picture}"""


@dataclass(frozen=True)
class Partition:
    """A stream cut into contiguous blocks."""

    name: str
    spans: list[tuple[int, int]]  # (start, end) of each block, end exclusive
    bound: float  # Theorem 1 for a query of norm 1
    spread: list[float]  # per block: mean squared distance of its tokens from their mean; 1 = the whole stream's


def run(out: Path, *, seed: int = 0) -> Found:
    """What the memory keeps of a stream under each merge rule; a picture of it goes to the folder ``out``."""
    # No decay and no delta step: what a token contributes is then k vᵀ throughout, as the theorem has it.
    stream = replace(correlated(seed, length=LENGTH, heads=HEADS, dk=DK, dv=DV, lam_width=CAPACITY), g=None)
    rules: dict[str, Segmentation] = {
        rule: segment(stream.k, stream.v, tau=TAU, capacity=CAPACITY, merge=rule) for rule in MERGES
    }
    heads = [list(partitions(stream, rules, head)) for head in range(HEADS)]
    sizes = {"seed": seed, "length": LENGTH, "heads": HEADS, "dk": DK, "dv": DV, "segments": int(stream.changes.sum())}
    figures: dict[str, Any] = {
        "stream": sizes,
        "tau": TAU,
        "capacity": CAPACITY,
        "partitions": [summary(rows, rules, stream.changes[0]) for rows in zip(*heads, strict=True)],
        "operators": time_operators(stream),
        "picture": None,
    }
    first, path = rules["density"], out / "segmentation.png"
    try:
        drawn = draw_partitions(heads[0], first.score[0, :, 0], first.boundary[0, :, 0], stream.changes[0], TAU)
        out.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn)
        figures["picture"] = str(path)
    except ImportError:
        figures["note"] = NO_PICTURE
    shapes = [{**row, "output": "×".join(map(str, row["output"]))} for row in figures["operators"]]
    tables = {"partitions": table(figures["partitions"]), "operators": table(shapes)}
    picture = figures.get("note", f"Picture: {path}")
    return Found(TEXT.format(**sizes, tau=TAU, capacity=CAPACITY, **tables, picture=picture), figures)


def partitions(stream: Stream, rules: dict[str, Segmentation], head: int) -> Iterator[Partition]:
    """What each rule kept of one head's stream, beside partitions that do not look at the content."""
    k, v = stream.k[0, :, head].double(), stream.v[0, :, head].double()
    u = torch.einsum("tk,tv->tkv", k, v).flatten(1)  # [T, dk·dv] what each token writes
    for rule, segmentation in rules.items():
        yield partition(rule, u, [end - start for start, end in segmentation.spans(0, head)])
    fenwick = fenwick_blocks(LENGTH)
    yield partition("fixed blocks", u, fixed_blocks(LENGTH, CAPACITY))
    yield partition("Fenwick (Log-Linear)", u, fenwick)
    yield partition("fixed, as many as Fenwick", u, fixed_blocks(LENGTH, len(fenwick)))


def partition(name: str, u: Tensor, blocks: Sequence[int]) -> Partition:
    """The figures of a partition of the contributions u [T, d] into blocks of the given lengths."""
    within, lengths = block_heterogeneity(u, blocks), torch.tensor(blocks)
    bound = (lengths * within).sqrt().sum()  # of Theorem 1: it depends on the query's norm alone
    whole = block_heterogeneity(u, [len(u)]) / len(u)
    spread = within / lengths / whole.clamp_min(torch.finfo(torch.float64).tiny)
    spans = [(end - n, end) for end, n in zip(accumulate(blocks), blocks, strict=True)]
    return Partition(name, spans, bound.item(), spread.tolist())


def summary(heads: tuple[Partition, ...], rules: dict[str, Segmentation], changes: Tensor) -> dict[str, Any]:
    """One row of the table: a partition, its figures taken over all heads."""
    name = heads[0].name
    counts = torch.tensor([end - start for p in heads for start, end in p.spans], dtype=torch.float64)
    quartiles = counts.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    figures = describe(rules[name], DK, DV) if name in rules else {}
    begins = [start for p in heads for start, _ in p.spans[1:]]
    return {
        "partition": name,
        "boundary rate": figures.get("boundary_rate"),
        "states": len(counts) / len(heads),
        "tokens: min": int(counts.min()),
        **dict(zip(("25%", "50%", "75%"), quartiles, strict=True)),
        "max": int(counts.max()),
        "at changes": float(changes[begins].double().mean()),
        "W": figures.get("W"),
        "bound": sum(p.bound for p in heads) / len(heads),
    }


def time_operators(stream: Stream) -> list[dict[str, Any]]:
    """Run each operator on the stream twice, and time the second: the first call pays for what it loads."""
    rows = []
    for name, memory in {"dynamic": "dynamic", "log_linear": "log_linear", "linear": "single"}.items():
        for _ in range(2):
            start = time.perf_counter()
            with torch.no_grad():
                output, state = stream.attend(memory, CAPACITY, output_final_state=True)
            seconds = time.perf_counter() - start
        rows.append({"operator": name, "output": list(output.shape), "seconds": seconds, "state bytes": state.nbytes})
    return rows
