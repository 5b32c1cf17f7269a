"""`dla bench step`: a training step of the lab's small models, beside another checkout's if there is one.

Every checkout runs in a process of its own, which stays alive; a round takes a step of one, then of the other, so that
whatever else the machine does falls on both, and their ratio holds.
"""

import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import dla
from dla.bench.common import Figures, machine, say
from dla.bench.timing import Worker, in_turn, ratio, spread, workers
from dla.report import table
from dla.report.found import Found

PARTS = ("forward", "backward", "step")
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "tie_word_embeddings": True, "initializer_range": 0.1, "capacity": 16}
RECALL = {"hidden_size": 64, "num_heads": 2, "head_k_dim": 8, "head_v_dim": 32, "intermediate_size": 128}
TEXT = {"hidden_size": 128, "num_heads": 2, "head_k_dim": 16, "head_v_dim": 64, "intermediate_size": 256}
SHAPES: dict[str, dict[str, Any]] = {  # of study/: recall, needle and text
    "32 x 96, width 64": {"batch": 32, "length": 96, "targets": 0.17, "model": {**RECALL, "vocab_size": 72}},
    "16 x 256, width 64": {"batch": 16, "length": 256, "targets": 0.1, "model": {**RECALL, "vocab_size": 72}},
    "8 x 512, width 128": {"batch": 8, "length": 512, "targets": 1.0, "model": {**TEXT, "vocab_size": 256}},
}
BACKBONES = ("linear", "mamba2", "gated_deltanet")
MEMORIES: dict[str, dict[str, Any]] = {
    "single": {},
    "log_linear": {"memory": "log_linear"},
    "dynamic": {"memory": "dynamic"},
    "dynamic, routed": {"memory": "dynamic", "routed": True, "sharpness": "token"},
    "dynamic, soft gate": {"memory": "dynamic", "temperature": 0.1},
}


def run(
    *, against: Path | None = None, only: str = "", repeats: int = 9, threads: int = 1, out: Path | None = None
) -> Found:
    """Time forward, backward and whole steps on as many threads as a process of the lab has.

    Args:
        against: the folder of another checkout (with its compiled library, if it is to have one) to compare with.
        only: cases that have these words, in any order, in their names.
    """
    if against is not None and not (against / "src" / "dla").is_dir():
        raise ValueError(f"{against} is not a checkout: it has no src/dla")
    wanted = list(cases(only))
    if not wanted:
        raise ValueError(f"no case has all of {only!r} in its name")
    rows = []
    sources = [Path(dla.__file__).parents[1], *([] if against is None else [against / "src"])]
    with workers(sources, threads=threads) as processes:
        for name, case in wanted:
            rows.append({**name, **measure(processes, case, repeats)})
            say("  ".join(f"{x:.2f}" if isinstance(x, float) else str(x) for x in _shown(rows[-1]).values()))
    text, ratios = table([_shown(row) for row in rows]), medians(rows)
    if ratios:
        text += "\n\nnew / old, median over shapes and backbones\n" + table(ratios)
    report = {"machine": {**machine(), "threads": threads}, "repeats": repeats, "medians": ratios, "rows": rows}
    return Found(text, report, out)


def cases(only: str = "") -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """What is timed: the names of shape, backbone and memory, and what the worker gets."""
    for (shape, sizes), backbone, (memory, options) in product(SHAPES.items(), BACKBONES, MEMORIES.items()):
        names = {"shape": shape, "backbone": backbone, "memory": memory}
        if all(word in " ".join(names.values()) for word in only.split()):
            length = {"max_position_embeddings": sizes["length"]}
            yield names, {**sizes, "model": {"backbone": backbone, **SMALL, **sizes["model"], **length, **options}}


def measure(workers: Sequence[Worker], case: dict[str, Any], repeats: int) -> Figures:
    """Seconds of this checkout's parts, with quartiles, and their ratios to the other's, round by round."""
    row: Figures = {}
    own, *others = in_turn(workers, case, repeats)
    for p, part in enumerate(PARTS):
        seconds = [found[p] for found in own]
        row[part] = spread(seconds)
        for other in others:
            theirs = [found[p] for found in other]
            row |= {f"{part}, other": spread(theirs), f"{part}, ratio": ratio(seconds, theirs)}
    return row


def medians(rows: Sequence[Figures]) -> list[Figures]:
    """The median ratio of each part over shapes and backbones, memory by memory; nothing without another checkout."""
    found: list[Figures] = []
    for memory in dict.fromkeys(row["memory"] for row in rows):
        own = [row for row in rows if row["memory"] == memory and "step, ratio" in row]
        if own:
            ratios = {part: statistics.median(row[f"{part}, ratio"]["median"] for row in own) for part in PARTS}
            found.append({"memory": memory, **ratios})
    return found


def _shown(row: Figures) -> Figures:
    """A row of the table: milliseconds, and quartiles of the step and of its ratio."""
    shown: Figures = {name: row[name] for name in ("shape", "backbone", "memory")}
    shown |= {f"{part} ms": 1000 * row[part]["median"] for part in PARTS}
    shown["quartiles"] = " … ".join(f"{1000 * row['step'][end]:.1f}" for end in ("low", "high"))
    if "step, ratio" in row:
        ratio = row["step, ratio"]
        shown["new / old"] = ratio["median"]
        shown["its quartiles"] = f"{ratio['low']:.2f} … {ratio['high']:.2f}"
    return shown
