"""`dla bench step`: a training step of the lab's small models, beside another checkout's if there is one.

Every checkout runs in a process of its own, which stays alive; a round takes a step of one, then of the other, so that
whatever else the machine does falls on both, and their ratio holds.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dla
from dla.bench import step_worker
from dla.bench.figures import machine
from dla.report import table

Row = dict[str, Any]
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
    *,
    against: Path | None = None,
    only: str = "",
    repeats: int = 9,
    threads: int = 1,
    out: Path | None = None,
    as_json: bool = False,
) -> int:
    """Time forward, backward and whole steps on as many threads as a process of the lab has; the exit code.

    Args:
        against: the folder of another checkout (with its compiled library, if it is to have one) to compare with.
        only: cases that have these words, in any order, in their names.
    """
    if against is not None and not (against / "src" / "dla").is_dir():
        print(f"dla bench step: {against} is not a checkout: it has no src/dla", file=sys.stderr)
        return 2
    rows = []
    with ExitStack() as stack:
        sources = [Path(dla.__file__).parents[1], *([] if against is None else [against / "src"])]
        workers = [stack.enter_context(_worker(source, threads)) for source in sources]
        for name, case in cases(only):
            rows.append({**name, **measure(workers, case, repeats)})
            if not as_json:
                print(_line(rows[-1]), file=sys.stderr, flush=True)
    if not rows:
        print(f"dla bench step: no case has all of {only!r} in its name", file=sys.stderr)
        return 2
    report = {"machine": {**machine(), "threads": threads}, "repeats": repeats, "medians": medians(rows), "rows": rows}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2) if as_json else _text(report))
    return 0


def cases(only: str = "") -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """What is timed: the names of shape, backbone and memory, and what the worker gets."""
    for shape, sizes in SHAPES.items():
        for backbone in BACKBONES:
            for memory, options in MEMORIES.items():
                names = {"shape": shape, "backbone": backbone, "memory": memory}
                if all(word in " ".join(names.values()) for word in only.split()):
                    length = {"max_position_embeddings": sizes["length"]}
                    model = {"backbone": backbone, **SMALL, **sizes["model"], **length, **options}
                    yield names, {**sizes, "model": model}


def measure(workers: Sequence["Worker"], case: dict[str, Any], repeats: int) -> Row:
    """Seconds of this checkout's parts, with quartiles, and their ratios to the other's, round by round."""
    for worker in workers:
        worker.ask(case=case)
    rounds: list[list[list[float]]] = [[] for _ in workers]
    for i in range(repeats):  # who goes first changes
        for k in range(len(workers)) if i % 2 == 0 else reversed(range(len(workers))):
            rounds[k] += workers[k].ask(take=1)
    row: Row = {}
    for p, part in enumerate(PARTS):
        own = [found[p] for found in rounds[0]]
        row[part] = spread(own)
        if len(workers) > 1:
            other = [found[p] for found in rounds[1]]
            row[f"{part}, other"] = spread(other)
            row[f"{part}, ratio"] = spread([a / b for a, b in zip(own, other, strict=True)])
    return row


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles."""
    if len(values) < 2:
        return dict.fromkeys(("median", "low", "high"), values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def medians(rows: Sequence[Row]) -> list[Row]:
    """The median ratio of each part over shapes and backbones, memory by memory; nothing without another checkout."""
    found: list[Row] = []
    for memory in dict.fromkeys(row["memory"] for row in rows):
        own = [row for row in rows if row["memory"] == memory and "step, ratio" in row]
        if own:
            ratios = {part: statistics.median(row[f"{part}, ratio"]["median"] for row in own) for part in PARTS}
            found.append({"memory": memory, **ratios})
    return found


class Worker:
    """A process that takes steps with the package of one checkout."""

    def __init__(self, source: Path) -> None:
        command = [sys.executable, "-P", str(Path(step_worker.__file__).resolve())]
        env = {**os.environ, "PYTHONPATH": str(source.resolve())}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("a process that takes steps ended; what it said is above")
        return json.loads(answer)


@contextmanager
def _worker(source: Path, threads: int) -> Iterator[Worker]:
    worker = Worker(source)
    try:
        worker.ask(threads=threads)
        yield worker
    finally:
        worker.process.terminate()
        worker.process.wait()


def _shown(row: Row) -> Row:
    """A row of the table: milliseconds, and quartiles of the step and of its ratio."""
    shown: Row = {name: row[name] for name in ("shape", "backbone", "memory")}
    shown |= {f"{part} ms": 1000 * row[part]["median"] for part in PARTS}
    shown["quartiles"] = " … ".join(f"{1000 * row['step'][end]:.1f}" for end in ("low", "high"))
    if "step, ratio" in row:
        ratio = row["step, ratio"]
        shown["new / old"] = ratio["median"]
        shown["its quartiles"] = f"{ratio['low']:.2f} … {ratio['high']:.2f}"
    return shown


def _line(row: Row) -> str:
    return "  ".join(f"{x:.2f}" if isinstance(x, float) else str(x) for x in _shown(row).values())


def _text(report: Row) -> str:
    text = table([_shown(row) for row in report["rows"]])
    if report["medians"]:
        text += "\n\nnew / old, median over shapes and backbones\n" + table(report["medians"])
    return text
