"""`dla inspect stream`: the operator at work on a synthetic stream with planted changes."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dla.inspect.figures import describe
from dla.inspect.segmentation import Partition, draw, partition, token_states
from dla.inspect.streams import Stream, correlated
from dla.inspect.theory import fenwick_blocks, fixed_blocks
from dla.ops import Segmentation, segment
from dla.ops.rules import MERGES

LENGTH, HEADS, DK, DV = 2048, 4, 16, 16
CAPACITY, TAU = 30, 0.6

CAVEAT = (
    "The bound of Theorem 1 (for a query of norm 1) measures how mixed the tokens inside a state are. It is not an\n"
    "error of the operator: a state is the sum of its tokens, and reading a sum is exact."
)


def run(out: Path, *, as_json: bool = False, seed: int = 0) -> int:
    """Show what the memory keeps of a stream under each merge rule; the exit code."""
    # No decay and no delta step: what a token contributes is then k vᵀ throughout, as the theorem has it.
    stream = replace(correlated(seed, length=LENGTH, heads=HEADS, dk=DK, dv=DV, lam_width=CAPACITY), g=None)
    segmentations: dict[str, Segmentation] = {
        rule: segment(stream.k, stream.v, tau=TAU, capacity=CAPACITY, merge=rule) for rule in MERGES
    }
    heads = [partitions(stream, segmentations, head) for head in range(HEADS)]
    sizes = {"seed": seed, "length": LENGTH, "heads": HEADS, "dk": DK, "dv": DV}
    figures: dict[str, Any] = {
        "stream": {**sizes, "segments": int(stream.changes.sum())},
        "tau": TAU,
        "capacity": CAPACITY,
        "partitions": [summary(rows, segmentations) for rows in zip(*heads, strict=True)],
        "operators": time_operators(stream),
        "picture": None,
    }
    path = out / "segmentation.png"
    first = segmentations["density"]
    try:
        draw(path, heads[0], first.score[0, :, 0], first.boundary[0, :, 0], stream.changes[0], TAU)
        figures["picture"] = str(path)
    except ImportError:
        figures["note"] = "matplotlib is not installed, so no picture was drawn: pip install matplotlib"
    print(json.dumps(figures, indent=2) if as_json else render(figures))
    return 0


def partitions(stream: Stream, segmentations: dict[str, Segmentation], head: int) -> list[Partition]:
    """What each rule kept of one head's stream, beside partitions that do not look at the content."""
    u = token_states(stream.k[0, :, head].double(), stream.v[0, :, head].double())
    fenwick = fenwick_blocks(LENGTH)
    rows = []
    for rule, segmentation in segmentations.items():
        rows.append(partition(rule, u, [end - start for start, end in segmentation.spans(0, head)]))
    rows.append(partition("fixed blocks", u, fixed_blocks(LENGTH, CAPACITY)))
    rows.append(partition("Fenwick (Log-Linear)", u, fenwick))
    rows.append(partition("fixed, as many as Fenwick", u, fixed_blocks(LENGTH, len(fenwick))))
    return rows


def summary(heads: tuple[Partition, ...], segmentations: dict[str, Segmentation]) -> dict[str, Any]:
    """One row of the table: a partition, its figures taken over all heads."""
    name = heads[0].name
    counts = torch.tensor([n for p in heads for n in p.blocks], dtype=torch.float64)
    quartiles = counts.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    figures = describe(segmentations[name], DK, DV) if name in segmentations else {}
    return {
        "partition": name,
        "boundary rate": figures.get("boundary_rate"),
        "states": len(counts) / len(heads),
        "tokens: min": int(counts.min()),
        "25%": quartiles[0],
        "50%": quartiles[1],
        "75%": quartiles[2],
        "max": int(counts.max()),
        "W": figures.get("W"),
        "bound": sum(p.bound for p in heads) / len(heads),
    }


def time_operators(stream: Stream) -> list[dict[str, Any]]:
    """Run each operator on the stream once."""
    rows = []
    for name, memory in {"dynamic": "dynamic", "log_linear": "log_linear", "linear": "single"}.items():
        start = time.perf_counter()
        with torch.no_grad():
            output, state = stream.attend(memory, CAPACITY, output_final_state=True)
        seconds = time.perf_counter() - start
        rows.append({"operator": name, "output": list(output.shape), "seconds": seconds, "state bytes": state.nbytes})
    return rows


def render(figures: dict[str, Any]) -> str:
    """The figures as text."""
    from dla.report import table

    stream = figures["stream"]
    shapes = [{**row, "output": "×".join(map(str, row["output"]))} for row in figures["operators"]]
    return "\n".join(
        [
            f"A stream of {stream['length']} tokens in {stream['segments']} planted segments, {stream['heads']} heads, "
            f"dk = {stream['dk']}, dv = {stream['dv']}, seed {stream['seed']}.",
            f"A token whose score reaches τ = {figures['tau']} opens a state; with {figures['capacity']} states alive, "
            "the merge rule first joins two neighbours.",
            "",
            "What is kept at the end (over all heads):",
            "",
            table(figures["partitions"]),
            "",
            CAVEAT,
            "W: how many dense states a read touches, counting a state of few tokens as its tokens.",
            "",
            "One run of each operator on this machine, the first call included:",
            "",
            table(shapes),
            "",
            f"Picture: {figures['picture']}" if figures["picture"] else figures["note"],
        ]
    )
