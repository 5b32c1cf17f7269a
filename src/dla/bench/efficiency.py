"""`dla reproduce efficiency`: the paper's figure of throughput and memory, over batch sizes and over context lengths.

Measured are a prefill of the context and one decoded token, of the same model with one state a head ("vanilla"), with
Log-Linear's levels and with DLA. Each model has a process of its own, all of them for the whole run: they take turns,
point by point, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dla.bench.common import machine
from dla.bench.timing import peak_extra_bytes
from dla.inspect.observe import observe
from dla.machine import keep_freed_memory
from dla.models import DLAForCausalLM, preset
from dla.names import check_known
from dla.plotting import (
    FONT,
    INK,
    QUIET,
    Style,
    bytes_text,
    label_ends,
    new_figure,
    png,
    room_for,
    styles,
    tidy,
)
from dla.report import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"single": "Vanilla", "log_linear": "Log-Linear", "dynamic": "DLA"}
CONTEXT, BATCH = 128, 1  # of the points over batch sizes, and over contexts
LINE = 120  # characters of the note below the picture
OBSERVED = 128  # tokens in which boundaries are counted
MEASURED = "prefill of the context and one decoded token"
PAPER = "Mamba-2 780M on one A100: DLA above Log-Linear in throughput and below it in memory"
MALLOC_DEFAULT = 1 << 17  # bytes: glibc's thresholds as a process starts
HEIGHT, PANEL, FOOT = 5.6, 1.55, 1.05  # inches: the picture, one of its panels, and what is below them
START, BETWEEN = 0.098, 0.105  # of the left panels, and between columns, in fractions of the width

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    preset: str
    batches: tuple[int, ...]  # at context 128
    contexts: tuple[int, ...]  # at batch 1
    device: str = "cpu"
    dtype: str = "float32"
    repeats: int = 3

    def points(self) -> list[tuple[int, int]]:
        """(batch, context) of every measurement, each once."""
        return list(dict.fromkeys([*((b, CONTEXT) for b in self.batches), *((BATCH, c) for c in self.contexts)]))


SCALES = {
    "paper": Plan("mamba2-780m", tuple(2**i for i in range(6)), tuple(2**i for i in range(7, 15))),
    "tiny": Plan("mamba2-tiny", (1, 2, 4, 8), (128, 512, 2048)),
}


def run(
    *,
    scale: str = "tiny",
    out: Path | None = None,
    batches: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    repeats: int = 3,
    as_json: bool = False,
) -> int:
    """Measure, print a table, write ``efficiency.json`` and ``efficiency.png`` to ``out``; the exit code.

    Args:
        scale: "paper" is Mamba-2 780M, in bfloat16 on a GPU if there is one; "tiny" a small model on the CPU.
        out: a folder (None: out/reproduce/SCALE). The JSON is there from the first measurement on.
        batches: sizes at context 128, and contexts: lengths at batch 1, instead of the scale's own.
        repeats: runs of each measurement; their median counts.
    """
    try:
        import matplotlib  # noqa: F401  -- known to be missing before the long work, not after it

        plan = make_plan(scale, batches, contexts, repeats, torch.cuda.is_available())
    except ImportError:
        error: object = "the figure needs matplotlib: pip install 'dynamic-linear-attention[plot]'"
    except ValueError as caught:
        error = caught
    else:
        return _run(scale, plan, out or Path("out/reproduce") / scale, as_json)
    print(f"dla reproduce efficiency: {error}", file=sys.stderr)
    return 2


def make_plan(
    scale: str, batches: Sequence[int] | None, contexts: Sequence[int] | None, repeats: int, gpu: bool
) -> Plan:
    """What to measure at a scale, with its sizes replaced by those given. ``gpu``: whether there is one."""
    check_known("scale", [scale], SCALES)
    own = SCALES[scale]
    batches = own.batches if batches is None else batches
    contexts = own.contexts if contexts is None else contexts
    for name, values in {"batches": batches, "contexts": contexts, "repeats": [repeats]}.items():
        if not values or min(values) < 1:
            raise ValueError(f"{name} must be at least 1, got {min(values) if values else 'none'}")
    device, dtype = ("cuda", "bfloat16") if gpu and scale == "paper" else ("cpu", "float32")
    return Plan(own.preset, tuple(sorted(set(batches))), tuple(sorted(set(contexts))), device, dtype, repeats)


def _run(scale: str, plan: Plan, out: Path, as_json: bool) -> int:
    if scale == "paper" and plan.device == "cpu":
        print(f"No GPU found: {plan.preset} in float32 on the CPU takes hours.", file=sys.stderr, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "efficiency.json"

    def keep(report: Row) -> None:
        file.write_text(json.dumps(report, indent=2) + "\n")

    try:
        report = collect(scale, plan, keep)
    except RuntimeError as error:
        print(f"dla reproduce efficiency: {error}", file=sys.stderr)
        return 1
    keep(report)
    picture = file.with_suffix(".png")
    picture.write_bytes(png(draw(report)))
    print(json.dumps(report, indent=2) if as_json else text(report))
    print(f"{file}\n{picture}", file=sys.stderr)
    return 1 if any("failed" in row for row in report["rows"]) else 0


def collect(scale: str, plan: Plan, keep: Callable[[Row], None]) -> Row:
    """Measure every point with every memory in turn; the report. ``keep`` gets what there is after each of them."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    with ExitStack() as stack:
        workers = {memory: stack.enter_context(closing(Worker(command(plan, memory)))) for memory in NAMES}
        models = {memory: worker.facts() for memory, worker in workers.items()}
        rows: list[Row] = []
        report = {
            "scale": scale,
            "preset": plan.preset,
            "device": models["single"]["device"],
            "dtype": plan.dtype,
            "measured": MEASURED,
            "repeats": plan.repeats,
            "batches": plan.batches,
            "contexts": plan.contexts,
            "weights": "random",
            "boundary rate": models["dynamic"]["boundary rate"],
            "note": note(models["dynamic"]["boundary rate"]),
            "paper": PAPER,
            "machine": machine(),
            "models": models,
            "rows": rows,
        }
        bar = stack.enter_context(tqdm(total=len(plan.points()) * len(NAMES), desc="efficiency", disable=None))
        for batch, context in plan.points():
            for memory, worker in workers.items():
                rows.append({"memory": memory, "batch": batch, "context": context})
                rows[-1] |= worker.ask(batch=batch, context=context, repeats=plan.repeats)
                bar.write(_line(rows[-1]), file=sys.stderr)
                bar.update()
                keep(report)
    return {**report, "DLA / Log-Linear": against_log_linear(rows)}


def note(rate: float) -> str:
    """What must be known of the weights to read the figures."""
    if rate > 0.9:
        return (
            f"The weights are random, and with them nearly every token opens a state ({100 * rate:.1f} % of them do): "
            "the costliest case for DLA."
        )
    return f"The weights are random, and with them {100 * rate:.1f} % of the tokens open a state; each costs DLA time."


def against_log_linear(rows: Sequence[Row]) -> dict[str, list[float]]:
    """The smallest and the largest ratio of DLA's figures to Log-Linear's, over the points that both have."""
    found: dict[str, list[float]] = {}
    for name in ("tokens/s", "runtime bytes"):
        values = {(row["memory"], row["batch"], row["context"]): row.get(name) for row in rows}
        pairs = [(x, values.get(("log_linear", *at))) for (memory, *at), x in values.items() if memory == "dynamic"]
        ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
        found |= {name: [min(ratios), max(ratios)]} if ratios else {}
    return found


def text(report: Row) -> str:
    """The figures as a table, a line for each point, with what is to be said about them."""
    shown: dict[tuple[int, int], Row] = {}
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


def _line(row: Row) -> str:
    figures = f"failed: {row['failed']}" if "failed" in row else f"{row['tokens/s']:.4g} tokens/s"
    if row.get("runtime bytes") is not None:
        figures += f", {bytes_text(row['runtime bytes'])}"
    return f"{NAMES[row['memory']]}, batch {row['batch']}, context {row['context']}: {figures}"


# The processes.


def command(plan: Plan, memory: str) -> list[str]:
    """What starts the process of a memory: it runs ``main``."""
    model = {"name": plan.preset, "memory": memory, "device": plan.device, "dtype": plan.dtype}
    return [sys.executable, "-m", "dla.bench.efficiency", json.dumps(model)]


class Worker:
    """A process that holds one model and measures what it is asked to; after its death a new one takes its place."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._facts: Row | None = None

    def facts(self) -> Row:
        """What there is to say about the model itself. Raises RuntimeError if the process ended without a word."""
        if self._facts is None:
            self._facts = self._read()
        return self._facts

    def ask(self, **point: int) -> Row:
        """The figures of a point, or {"failed": why not}."""
        if self.process.poll() is not None:
            self._start()
        assert self.process.stdin is not None
        try:
            self.facts()
            self.process.stdin.write(json.dumps(point) + "\n")
            self.process.stdin.flush()
            return self._read()
        except (RuntimeError, BrokenPipeError) as error:
            return {"failed": str(error)}

    def _read(self) -> Row:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise RuntimeError(f"the process ended with exit code {code}" + " (out of memory?)" * (code == -9))
        answer: Row = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate()


def main(arguments: str) -> None:
    """Build a model, print what there is to say about it, then measure one point for each line that comes in."""
    model = build(**json.loads(arguments))
    print(json.dumps(describe(model)), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(model, **json.loads(line))), flush=True)


def build(name: str, memory: str, device: str = "cpu", dtype: str = "float32") -> DLAForCausalLM:
    """A model of random weights, the same each time."""
    torch.manual_seed(0)
    with torch.device(device):
        return DLAForCausalLM(preset(name, memory)).to(getattr(torch, dtype)).eval()


@torch.inference_mode()
def describe(model: DLAForCausalLM) -> Row:
    """Sizes, the device, and for DLA how often a token opens a state. Loads what a first call loads."""
    ids = _tokens(model, 1, OBSERVED)
    _go(model, ids)
    facts: Row = {
        "parameters": sum(x.numel() for x in model.parameters()),
        "weight bytes": _weight_bytes(model),
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
    }
    if model.config.dynamic:
        with observe(model) as seen:
            model(ids, use_cache=False, logits_to_keep=1)
        facts["boundary rate"] = statistics.mean(x.boundary.double().mean().item() for x in seen)
    return facts


@torch.inference_mode()
def measure(model: DLAForCausalLM, *, batch: int, context: int, repeats: int) -> Row:
    """Throughput and memory of a point, with the medians of its two parts; or {"failed": why not}."""
    ids = _tokens(model, batch, context)
    try:
        peak = _runtime_bytes(model, ids)
        times = [_go(model, ids) for _ in range(repeats)]
    except RuntimeError as error:  # torch says so of memory that is not there, on either device
        lacking = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        return {"failed": "out of memory" if lacking else str(error).partition("\n")[0]}
    finally:
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # the other models share the device
    seconds = statistics.median(sum(parts) for parts in times)
    return {
        "tokens/s": batch * (context + 1) / seconds,
        "runtime bytes": peak,
        "seconds": seconds,
        "prefill seconds": statistics.median(prefill for prefill, _ in times),
        "decode seconds": statistics.median(decode for _, decode in times),
    }


def _go(model: DLAForCausalLM, ids: Tensor) -> tuple[float, float]:
    """Read the context and decode a token: the seconds of each."""
    start = _now(model)
    out = model(ids, use_cache=True, logits_to_keep=1)
    middle = _now(model)
    model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
    return middle - start, _now(model) - middle


def _now(model: DLAForCausalLM) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _runtime_bytes(model: DLAForCausalLM, ids: Tensor) -> int | None:
    """The peak of memory beside the weights: what torch allocates on a GPU, resident memory on a CPU (Linux only)."""
    if model.device.type == "cuda":
        _go(model, ids)  # kernels are chosen in a first call, and that takes memory of its own
        torch.cuda.reset_peak_memory_stats()
        _go(model, ids)
        return torch.cuda.max_memory_allocated() - _weight_bytes(model)
    if sys.platform != "linux":
        return None
    _hand_back_freed_memory()
    peak = peak_extra_bytes(lambda: _go(model, ids))
    keep_freed_memory()  # for the times
    return peak


def _hand_back_freed_memory() -> None:
    """Give the system what is free, and from now on what becomes free: then resident memory is memory in use.

    Where the C library cannot (it is not glibc) peaks after the first may come out too low.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(-3, MALLOC_DEFAULT)  # M_MMAP_THRESHOLD
        library.mallopt(-1, MALLOC_DEFAULT)  # M_TRIM_THRESHOLD
        library.malloc_trim(0)


def _weight_bytes(model: DLAForCausalLM) -> int:
    return sum(x.numel() * x.element_size() for x in model.parameters())


def _tokens(model: DLAForCausalLM, batch: int, context: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (batch, context), generator=generator).to(model.device)


# The picture.


def draw(report: Row) -> Figure:
    """Throughput above, memory below; over batch sizes on the left, over contexts on the right."""
    style = styles(list(NAMES.values()))
    figure = new_figure(HEIGHT)
    width = (room_for(figure, list(style)) - START - BETWEEN) / 2
    sweeps = (("batch", report["batches"], "context", CONTEXT), ("context", report["contexts"], "batch", BATCH))
    for i, (name, unit) in enumerate((("tokens/s", "Throughput, tokens/s"), ("runtime bytes", "Runtime memory"))):
        bottom = FOOT + (1 - i) * (HEIGHT - FOOT - PANEL - 0.75)
        for column, (varied, values, fixed, at) in enumerate(sweeps):
            rows = [row for row in report["rows"] if row[fixed] == at and row[varied] in values]
            left = START + column * (width + BETWEEN)
            ax = figure.add_axes((left, bottom / HEIGHT, width, PANEL / HEIGHT))
            ends = _lines(ax, rows, varied, name, style)
            _axes(ax, [row[name] for row in report["rows"] if row.get(name)], values, name)
            ax.set_title(f"{unit} ({fixed} {at})", loc="left", fontsize=FONT, color=INK)
            ax.set_xlabel("batch size" if varied == "batch" else "context, tokens", fontsize=FONT, color=INK)
            if column == 1:
                label_ends(ax, ends, style)
    model = f"{report['preset']}, {report['dtype']} on {report['device']}"
    figure.text(0.02, 1 - 0.12 / HEIGHT, MEASURED.capitalize(), fontsize=FONT + 1.5, color=INK, va="top")
    figure.text(0.02, 1 - 0.33 / HEIGHT, model, fontsize=FONT, color=QUIET, va="top")
    figure.text(0.02, 0.1 / HEIGHT, _footnote(report), fontsize=FONT - 1, color=QUIET, va="bottom")
    return figure


def _footnote(report: Row) -> str:
    lost = sum("failed" in row for row in report["rows"])
    missing = f" Measurements that failed and are left out: {lost}." if lost else ""
    return fill(f"{report['note']} Memory is the peak beside the weights.{missing}", LINE)


def _lines(
    ax: Axes, rows: Sequence[Row], varied: str, name: str, style: Mapping[str, Style]
) -> list[tuple[str, float, float]]:
    """Draw a line for each memory through the points that were measured; the name and place of each one's end."""
    ends = []
    for memory, label in NAMES.items():
        points = sorted((row[varied], row[name]) for row in rows if row["memory"] == memory and row.get(name))
        if points:
            x, y = zip(*points, strict=True)
            ax.plot(x, y, color=style[label].colour, marker="o", markersize=3.5, linewidth=1.6, zorder=3, clip_on=False)
            ends.append((label, x[-1], y[-1]))
    return ends


def _axes(ax: Axes, shown: Sequence[float], across: Sequence[int], name: str) -> None:
    """Logarithmic axes with plain numbers: ticks at the points across; upwards at 1, 2, 5 or at powers of two."""
    from matplotlib.ticker import LogLocator

    from dla.training.plots import _count

    ax.set_xscale("log", base=2)
    ax.set_xticks(across, [_count(x) for x in across])
    if len(across) > 1:
        ax.set_xlim(across[0], across[-1])
    memory = name == "runtime bytes"
    ax.set_yscale("log", base=2 if memory else 10)
    if shown:
        room = max((max(shown) / min(shown)) ** 0.08, 1.1)
        ax.set_ylim(min(shown) / room, max(shown) * room)
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(2, numticks=6) if memory else LogLocator(10, subs=(1, 2, 5), numticks=8))
    ax.yaxis.set_major_formatter((lambda y, _: bytes_text(y)) if memory else (lambda y, _: _count(y, 1000)))
    tidy(ax)


if __name__ == "__main__":
    main(sys.argv[1])
