"""What a run tells while it trains: on the console, in log.jsonl and, if asked for, to TensorBoard."""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from dla.files import write_whole
from dla.report.jsonl import Writer, read

Record = dict[str, Any]
LOG = "log.jsonl"
SCALARS = ("loss", "lr", "grad_norm", "temperature", "tokens_per_second", "memory_bytes", "mfu")
WAITING = 0.05  # of the time: from there on the console tells how long the run waits for data
POSITIONS = 10  # most losses by position that the console shows


class Monitor:
    """What a run tells: a live line on the console, log.jsonl and, if asked for, TensorBoard files.

    Only the main rank's speaks. ``flops_per_token`` (forward) may be set anew when live states have been measured.
    ``evaluated``: the step of the last evaluation before ``start``, 0 without any.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        start: int,
        every: int,
        tensorboard: bool,
        flops_per_token: float,
        peak_flops: float | None,
        speaks: bool = True,
    ) -> None:
        self.steps, self.every, self.speaks, self.evaluated = steps, every, speaks, 0
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._window: deque[Record] = deque(maxlen=every)
        self._live: float | None = None  # states, mean of the dynamic layers
        if not speaks:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._board = _board(folder / "tensorboard", start) if tensorboard else None
        records = cut_log(folder / LOG, start)
        self.evaluated = max((r["step"] for r in records if r["kind"] == "evaluation"), default=0)
        self._log = Writer(folder / LOG)
        self._console = _console(steps, start)

    def step(self, record: Record) -> None:
        """After every step: step (how many are done), loss, lr, grad_norm, temperature, tokens (of all ranks), seconds
        (with those waited for data), waited, skipped.
        """
        if not self.speaks:
            return
        self._window.append(record)
        timing = self._timing()
        at = record["step"]
        tells = at % self.every == 0 or at == self.steps
        line = {**record, **timing} if tells else record
        self._write("step", line, {name: line[name] for name in SCALARS if name in line})
        self._console.step(at, self._figures(record, timing), record["seconds"], tells)

    def evaluation(self, record: Record) -> None:
        """step, validation_loss, perplexity and by_position, {"0-63": loss, …}."""
        by_position = {f"validation_loss/{place}": loss for place, loss in record.get("by_position", {}).items()}
        losses = {name: record[name] for name in ("validation_loss", "perplexity")}
        self._write("evaluation", record, {**losses, **by_position})
        self.note(evaluation_text(record))

    def memory(self, record: Record) -> None:
        """step and memory, for each dynamic layer what ``memory_of`` says."""
        layers = [(layer["layer"], name, x) for layer in record["memory"] for name, x in layer.items()]
        self._write("memory", record, {f"memory/{name}/layer {i}": x for i, name, x in layers if name != "layer"})
        live = [layer["live_states"] for layer in record["memory"]]
        self._live = sum(live) / len(live) if live else None

    def note(self, text: str) -> None:
        """A line for people."""
        if self.speaks:
            self._console.note(text)

    def close(self) -> None:
        if not self.speaks:
            return
        self._console.close()
        self._log.close()
        if self._board is not None:
            self._board.close()

    def _write(self, kind: str, record: Record, charted: Mapping[str, float | None]) -> None:
        if not self.speaks:
            return
        self._log.append({"kind": kind, **record})
        if self._board is not None:
            for name, x in charted.items():
                if x is not None:
                    self._board.add_scalar(name, x, record["step"])

    def _timing(self) -> dict[str, float]:
        """Of the last steps. What lies between steps, such as an evaluation, is in no step's seconds."""
        rate = sum(r["tokens"] for r in self._window) / max(sum(r["seconds"] for r in self._window), 1e-9)
        timing: dict[str, float] = {"tokens_per_second": rate, "memory_bytes": peak_memory()}
        if self.peak_flops:
            mfu = 3 * self.flops_per_token * rate / self.peak_flops  # the backward pass costs two forward
            if mfu <= 1:  # else the peak, timed while a CPU was busy with other things, is none
                timing["mfu"] = mfu
        return timing

    def _figures(self, record: Record, timing: Mapping[str, float]) -> dict[str, str]:
        """What the console shows of a step."""
        losses = [r["loss"] for r in self._window if math.isfinite(r["loss"])]
        waited = sum(r["waited"] for r in self._window) / max(sum(r["seconds"] for r in self._window), 1e-9)
        figures = {
            "loss": f"loss {sum(losses) / len(losses):.4f}" if losses else "loss not finite",
            "lr": f"lr {record['lr']:.2e}",
            "rate": f"{_thousands(timing['tokens_per_second'])} tokens/s",
            "memory": f"{timing['memory_bytes'] / 1e9:.2f} GB",
            "mfu": f"MFU {timing['mfu']:.1%}" if "mfu" in timing else "",
            "live": f"{self._live:.1f} live states" if self._live is not None else "",
            "waited": f"{waited:.0%} waiting for data" if waited > WAITING else "",
        }
        return {name: text for name, text in figures.items() if text}


def cut_log(file: Path, start: int) -> list[Record]:
    """Leave of a log the records up to step ``start``, none with 0, by a new file in place of the old; those."""
    kept = [line for line in read(file) if start and _is_record(line.value) and line.value["step"] <= start]
    write_whole(file, b"".join(line.content + b"\n" for line in kept))
    return [line.value for line in kept]


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("kind"), str) and type(value.get("step")) is int


# The console.


class _Lines:
    """Where nobody may be looking: a line now and then, with the time left by the clock on the wall."""

    def __init__(self, steps: int, start: int) -> None:
        self.steps, self.start = steps, start
        self.began: float | None = None

    def step(self, at: int, figures: Mapping[str, str], seconds: float, tells: bool) -> None:
        now = time.monotonic()
        self.began = now - seconds if self.began is None else self.began
        if tells:
            left = (now - self.began) / max(at - self.start, 1) * (self.steps - at)
            told = [figures["loss"], figures["lr"], figures["rate"], f"{timedelta(seconds=round(left))} left"]
            told += [text for text in figures.values() if text not in told]
            self.note(f"step {at:{len(str(self.steps))}}/{self.steps}  " + "  ".join(told))

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    """On a terminal: one live line, and notes above it."""

    def __init__(self, steps: int, start: int) -> None:
        self.bar = tqdm(total=steps, initial=start, unit=" steps", dynamic_ncols=True, file=sys.stderr)

    def step(self, at: int, figures: Mapping[str, str], seconds: float, tells: bool) -> None:
        self.bar.set_postfix_str(", ".join(text for name, text in figures.items() if name != "lr"), refresh=False)
        self.bar.update(at - self.bar.n)

    def note(self, text: str) -> None:
        self.bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()


def _console(steps: int, start: int) -> _Lines | _Bar:
    if sys.stderr.isatty():
        bar = _Bar(steps, start)
        if bar.bar.nrows is None or bar.bar.nrows > 0:  # tqdm draws nothing on terminals without a size
            return bar
        bar.close()
    return _Lines(steps, start)


def evaluation_text(record: Record) -> str:
    """An evaluation in a line."""
    text = f"step {record['step']}: validation loss {record['validation_loss']:.4f}"
    text += f", perplexity {record['perplexity']:.4g}"
    places = list(record.get("by_position", {}).items())
    if len(places) > POSITIONS:  # evenly spread, the first and the last among them
        places = [places[i * (len(places) - 1) // (POSITIONS - 1)] for i in range(POSITIONS)]
    if places:
        text += "; by position " + ", ".join(f"{place}: {loss:.3f}" for place, loss in places)
    return text


def _thousands(x: float) -> str:
    for unit in ("", "k", "M"):
        if x < 1000:
            return f"{x:.3g}{unit}"
        x /= 1000
    return f"{x:.3g}G"


def peak_memory() -> int:
    """Bytes: the most that tensors took on the GPU where one is used, else the most that the process had resident."""
    if torch.cuda.is_available() and torch.cuda.is_initialized() and (most := torch.cuda.max_memory_allocated()):
        return int(most)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _board(folder: Path, start: int) -> Any:
    """A writer of TensorBoard files; what an earlier run of the folder wrote past ``start`` does not count."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        package = "the tensorboard package: pip install tensorboard"
        raise ImportError(f"log.tensorboard needs {package}, or set it to false") from error
    return SummaryWriter(str(folder), purge_step=start + 1 if start else 0)
