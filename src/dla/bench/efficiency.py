"""`dla reproduce efficiency`: the paper's figure of throughput and memory, over batch sizes and over context lengths.

Measured are a prefill of the context and one decoded token, of the same model with one state a head ("vanilla"), with
Log-Linear's levels and with DLA. Each model has a process of its own, all of them for the whole run: they take turns,
point by point, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import torch

from dla.bench.common import Figures, machine, say
from dla.bench.timing import Worker
from dla.names import check_known
from dla.report import table
from dla.report.found import Found
from dla.report.plots import FONT, NO_MATPLOTLIB, QUIET, Style, drawing, label_ends, png, styles
from dla.report.words import bytes_text, count_text, duration, few_digits
from dla.typed import SOME, Count, check_fields

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"single": "Vanilla", "log_linear": "Log-Linear", "dynamic": "DLA"}
CONTEXT, BATCH = 128, 1  # of the points over batch sizes, and over contexts
FIGURES = {"tokens/s": "Throughput, tokens/s", "runtime bytes": "Runtime memory"}
LINE = 120  # characters of the note below the picture
MEASURED = "prefill of the context and one decoded token"
PAPER = "Mamba-2 780M on one A100: DLA above Log-Linear in throughput and below it in memory"

Sizes = Annotated[tuple[Count, ...], SOME]


@dataclass(frozen=True)
class Sweep:
    """What is measured."""

    preset: str
    batches: Sizes  # at context 128
    contexts: Sizes  # at batch 1
    device: str = "cpu"
    dtype: str = "float32"
    repeats: Count = 3

    def points(self) -> list[tuple[int, int]]:
        """(batch, context) of every measurement, each once."""
        return list(dict.fromkeys([*((b, CONTEXT) for b in self.batches), *((BATCH, c) for c in self.contexts)]))


SWEEPS = {  # by their scale
    "paper": Sweep("mamba2-780m", tuple(2**i for i in range(6)), tuple(2**i for i in range(7, 15))),
    "tiny": Sweep("mamba2-tiny", (1, 2, 4, 8), (128, 512, 2048)),
}


def run(
    *,
    scale: str = "tiny",
    out: Path | None = None,
    batches: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    repeats: int = 3,
) -> Found:
    """Measure, and write ``efficiency.json`` and ``efficiency.png`` to ``out``; the exit code is 1 if a point failed.

    Args:
        scale: "paper" is Mamba-2 780M, in bfloat16 on a GPU if there is one; "tiny" a small model on the CPU.
        out: a folder (None: out/reproduce/SCALE). The JSON is there from the first measurement on.
        batches: sizes at context 128, and contexts: lengths at batch 1, instead of the scale's own.
        repeats: runs of each measurement; their median counts.
    """
    try:
        import matplotlib  # noqa: F401  -- known to be missing before the long work, not after it
    except ImportError as error:
        raise ImportError(f"the figure needs matplotlib: {NO_MATPLOTLIB}") from error
    sweep = make_sweep(scale, batches, contexts, repeats, torch.cuda.is_available())
    if scale == "paper" and sweep.device == "cpu":
        say(f"No GPU found: {sweep.preset} in float32 on the CPU takes hours.")
    file = (out or Path("out/reproduce") / scale) / "efficiency.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    report = collect(scale, sweep, lambda found: file.write_text(json.dumps(found, indent=2) + "\n"))
    picture = file.with_suffix(".png")
    picture.write_bytes(png(draw(report)))
    failed = any("failed" in row for row in report["rows"])
    return Found(text(report), report, file, [f"figures in {file}, a picture in {picture}"], code=1 if failed else 0)


def make_sweep(
    scale: str, batches: Sequence[int] | None, contexts: Sequence[int] | None, repeats: int, gpu: bool
) -> Sweep:
    """What to measure at a scale, with its sizes replaced by those given. ``gpu``: whether there is one."""
    check_known("scale", [scale], SWEEPS)
    sizes = {"batches": batches, "contexts": contexts}
    chosen: dict[str, Any] = {name: tuple(sorted(set(values))) for name, values in sizes.items() if values is not None}
    device, dtype = ("cuda", "bfloat16") if gpu and scale == "paper" else ("cpu", "float32")
    sweep = replace(SWEEPS[scale], device=device, dtype=dtype, repeats=repeats, **chosen)
    check_fields(sweep)
    return sweep


def collect(scale: str, sweep: Sweep, keep: Callable[[Figures], object]) -> Figures:
    """Measure every point with every memory in turn; the report. ``keep`` gets what there is after each of them."""
    asked = [(memory, batch, context) for batch, context in sweep.points() for memory in NAMES]
    say(f"{len(asked)} measurements; loading {sweep.preset} with {', '.join(NAMES.values())}")
    with ExitStack() as stack:
        workers = {memory: stack.enter_context(closing(Worker(*command(sweep, memory)))) for memory in NAMES}
        models = {memory: worker.ask() for memory, worker in workers.items()}
        rows: list[Figures] = []
        report = {
            "scale": scale,
            "preset": sweep.preset,
            "device": models["single"]["device"],
            "dtype": sweep.dtype,
            "measured": MEASURED,
            "repeats": sweep.repeats,
            "batches": sweep.batches,
            "contexts": sweep.contexts,
            "weights": "random",
            "boundary rate": models["dynamic"]["boundary rate"],
            "note": note(models["dynamic"]["boundary rate"]),
            "paper": PAPER,
            "machine": machine(),
            "models": models,
            "rows": rows,
        }
        start = time.perf_counter()
        for memory, batch, context in asked:
            rows.append({"memory": memory, "batch": batch, "context": context})
            try:
                rows[-1] |= workers[memory].ask(batch=batch, context=context, repeats=sweep.repeats)
            except ChildProcessError as error:
                rows[-1]["failed"] = str(error)
            keep(report)
            say(_line(rows[-1]) + left([b * (c + 1) for _, b, c in asked], len(rows), time.perf_counter() - start))
    return {**report, "DLA / Log-Linear": against_log_linear(rows)}


def left(tokens: Sequence[int], done: int, seconds: float) -> str:
    """How many measurements, of so many tokens each, are left, and how long they take if a token takes what it did."""
    if done == len(tokens):
        return ""
    about = duration(seconds * sum(tokens[done:]) / sum(tokens[:done]))
    return f" ({len(tokens) - done} of {len(tokens)} left, about {about})"


def command(sweep: Sweep, memory: str) -> list[str]:
    """What starts the process of a memory."""
    model = {"name": sweep.preset, "memory": memory, "device": sweep.device, "dtype": sweep.dtype}
    return [sys.executable, "-m", "dla.bench.efficiency_worker", json.dumps(model)]


def note(rate: float) -> str:
    """What must be known of the weights to read the figures."""
    if rate > 0.9:
        return (
            f"The weights are random, and with them nearly every token opens a state ({100 * rate:.1f} % of them do): "
            "the costliest case for DLA."
        )
    return f"The weights are random, and with them {100 * rate:.1f} % of the tokens open a state; each costs DLA time."


def against_log_linear(rows: Sequence[Figures]) -> dict[str, list[float]]:
    """The smallest and the largest ratio of DLA's figures to Log-Linear's, over the points that both have."""
    found: dict[str, list[float]] = {}
    for name in ("tokens/s", "runtime bytes"):
        values = {(row["memory"], row["batch"], row["context"]): row.get(name) for row in rows}
        pairs = [(x, values.get(("log_linear", *at))) for (memory, *at), x in values.items() if memory == "dynamic"]
        ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
        found |= {name: [min(ratios), max(ratios)]} if ratios else {}
    return found


def text(report: Figures) -> str:
    """The figures as a table, a line for each point, with what is to be said about them."""
    shown: dict[tuple[int, int], Figures] = {}
    columns = {"tok/s": ("tokens/s", 1), "MiB": ("runtime bytes", 1 << 20)}
    for unit, (name, size) in columns.items():
        for row in report["rows"]:
            at = (row["batch"], row["context"])
            line = shown.setdefault(at, {"batch": at[0], "context": at[1]})
            line[f"{NAMES[row['memory']]} {unit}"] = None if row.get(name) is None else row[name] / size
    paper = {"tokens/s": "above 1", "runtime bytes": "below 1"}
    ratios = [
        f"{name} {low:.2f} to {high:.2f} (paper: {paper[name]})"
        for name, (low, high) in report["DLA / Log-Linear"].items()
    ]
    said = [
        f"{report['preset']}, {report['dtype']} on {report['device']}: {MEASURED}; memory is the "
        "peak beside the weights.",
        table(list(shown.values())),
        f"DLA as a multiple of Log-Linear: {', '.join(ratios)}." if ratios else "",
        report["note"],
        *(_line(row) for row in report["rows"] if "failed" in row),
    ]
    return "\n\n".join(part for part in said if part)


def _line(row: Figures) -> str:
    figures = f"failed: {row['failed']}" if "failed" in row else f"{few_digits(row['tokens/s'])} tokens/s"
    if row.get("runtime bytes") is not None:
        figures += f", {bytes_text(row['runtime bytes'])}"
    return f"{NAMES[row['memory']]}, batch {row['batch']}, context {row['context']}: {figures}"


# The picture.


def draw(report: Figures) -> Figure:
    """Throughput above, memory below; over batch sizes on the left, over contexts on the right."""
    style = styles(list(NAMES.values()))
    sweeps = (("batch", report["batches"], "context", CONTEXT), ("context", report["contexts"], "batch", BATCH))
    with drawing(5.6) as figure:
        figure.suptitle(MEASURED.capitalize(), x=0.01, ha="left", fontsize=FONT + 1.5)
        figure.supxlabel(_footnote(report), x=0.01, ha="left", fontsize=FONT - 1, color=QUIET)
        axes = figure.subplots(2, 2)
        ends = {}
        for line, (name, unit) in zip(axes, FIGURES.items(), strict=True):
            for ax, (varied, values, fixed, at) in zip(line, sweeps, strict=True):
                rows = [row for row in report["rows"] if row[fixed] == at and row[varied] in values]
                ends[ax] = _lines(ax, rows, varied, name, style)
                _axes(ax, [row[name] for row in report["rows"] if row.get(name)], values, name)
                ax.set_title(f"{unit} ({fixed} {at})", fontsize=FONT)
                ax.set_xlabel("batch size" if varied == "batch" else "context, tokens")
        for ax in axes[:, 1]:
            label_ends(ax, ends[ax], style)
    return figure


def _footnote(report: Figures) -> str:
    lost = sum("failed" in row for row in report["rows"])
    missing = f" Measurements that failed and are left out: {lost}." if lost else ""
    model = f"{report['preset']}, {report['dtype']} on {report['device']}."
    return fill(f"{model} {report['note']} Memory is the peak beside the weights.{missing}", LINE)


def _lines(
    ax: Axes, rows: Sequence[Figures], varied: str, name: str, style: Mapping[str, Style]
) -> list[tuple[str, float, float]]:
    """Draw a line for each memory through the points that were measured; the name and place of each one's end."""
    ends = []
    for memory, label in NAMES.items():
        points = sorted((row[varied], row[name]) for row in rows if row["memory"] == memory and row.get(name))
        if points:
            x, y = zip(*points, strict=True)
            ax.plot(x, y, color=style[label].colour, marker="o", markersize=3.5, zorder=3, clip_on=False)
            ends.append((label, x[-1], y[-1]))
    return ends


def _axes(ax: Axes, shown: Sequence[float], across: Sequence[int], name: str) -> None:
    """Logarithmic axes with plain numbers: ticks at the points across; upwards at 1, 2, 5 or at powers of two."""
    from matplotlib.ticker import LogLocator

    ax.set_xscale("log", base=2)
    ax.set_xticks(across, [count_text(x) for x in across])
    if len(across) > 1:
        ax.set_xlim(across[0], across[-1])
    memory = name == "runtime bytes"
    ax.set_yscale("log", base=2 if memory else 10)
    if shown:
        room = max((max(shown) / min(shown)) ** 0.08, 1.1)
        ax.set_ylim(min(shown) / room, max(shown) * room)
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(2, numticks=6) if memory else LogLocator(10, subs=(1, 2, 5), numticks=8))
    ax.yaxis.set_major_formatter((lambda y, _: bytes_text(y)) if memory else (lambda y, _: count_text(y, 1000)))
