"""How everything here is timed: calls that take turns, medians with quartiles, peaks of memory, other processes."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

Times = dict[str, list[float]]


def now() -> float:
    """Seconds, as soon as a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int, *, warmup: int = 1, clock: Callable[[], Any] = now
) -> dict[str, list[Any]]:
    """Seconds of every call in each of the rounds, after ``warmup`` rounds that do not count.

    A round runs every call once: what else the machine does then falls on all of them, and their ratios hold.
    """
    times: dict[str, list[Any]] = {name: [] for name in calls}
    for i in range(warmup + rounds):
        for name, call in calls.items():
            start = clock()
            call()
            if i >= warmup:
                times[name].append(clock() - start)
    return times


def medians(times: Times) -> dict[str, float]:
    """The median of each call's rounds."""
    return {name: statistics.median(values) for name, values in times.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles."""
    if len(values) < 2:
        return dict.fromkeys(("median", "low", "high"), values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """The spread of the ratios of two calls, each of one round: what else the machine does changes between rounds."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """How far resident memory rises above its present level during ``call`` (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def in_new_process(module: str, **arguments: object) -> dict[str, float]:
    """Run ``python -m module`` with the arguments as one JSON object; the JSON object it prints."""
    command = [sys.executable, "-m", module, json.dumps(arguments)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, float] = json.loads(output)
    return result


class Worker:
    """A process that answers requests, each a line of JSON; after its death the next request starts it anew."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.command, self.environment = command, {**os.environ, **environment}
        self._start()

    def _start(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(self.command, text=True, env=self.environment, **pipes)

    def ask(self, **request: Any) -> Any:
        """The answer. Raises ChildProcessError if the process ends instead."""
        if self.process.poll() is not None:
            self._start()
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        if answer := self.process.stdout.readline():
            return json.loads(answer)
        code = self.process.wait()
        raise ChildProcessError(f"the process ended with exit code {code}" + " (out of memory?)" * (code == -9))

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate()


@contextmanager
def workers(sources: Sequence[Path], **request: Any) -> Iterator[list[Worker]]:
    """Processes that time cases (worker.py), each with the package of a checkout, whose ``src`` is given.

    They got a first request, and live until the end of the block.
    """
    script = str(Path(__file__).with_name("worker.py").resolve())
    with ExitStack() as stack:
        started = []
        for source in sources:
            worker = Worker(sys.executable, "-P", script, PYTHONPATH=str(source.resolve()))
            started.append(stack.enter_context(closing(worker)))
            worker.ask(**request)
        yield started


def in_turn(workers: Sequence[Worker], case: Mapping[str, Any], rounds: int) -> list[list[list[float]]]:
    """Seconds of a case's parts, for each worker in each round; who goes first changes from round to round."""
    for worker in workers:
        worker.ask(case=case)
    found: list[list[list[float]]] = [[] for _ in workers]
    for i in range(rounds):
        for k in range(len(workers)) if i % 2 == 0 else reversed(range(len(workers))):
            found[k] += workers[k].ask(take=1)
    return found
