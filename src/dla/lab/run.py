"""`dla lab run`: the trials of a grid on this machine's cores, one line of results for each."""

import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers.utils.logging import disable_progress_bar

from dla.lab.grid import Grid, read_grid
from dla.lab.measure import matched
from dla.lab.trial import Trial, run_trial
from dla.machine import keep_freed_memory
from dla.report import is_number, shown
from dla.report.found import Found
from dla.report.jsonl import Writer, read

Result = dict[str, Any]
HEARD = 10  # steps after which a worker reports
_progress: Any = None  # in a worker: the queue to the parent


def run(path: str | Path, *, out: Path | None = None, workers: int | None = None, save_models: bool = False) -> Found:
    """Run what a grid file asks for and is not in its results yet."""
    grid = read_grid(path)
    file = (out or Path("out/lab") / grid.name) / "results.jsonl"
    results = run_grid(grid, file, workers, save_models)
    return Found(f"{len(results)} results in {file}; `dla lab report {file}` shows them")


def run_grid(grid: Grid, file: Path, workers: int | None = None, save_models: bool = False) -> list[Result]:
    """The results of all trials, in the order of the grid. Those already in ``file`` are not run again.

    ``save_models``: the trained models go to the folder models/KEY beside the file. There is a bar over the steps of
    all trials, and a line for each that is finished.
    """
    done = {result["key"]: result for result in read_results(file)}
    left = [trial for trial in grid.trials if trial.key not in done]
    steps = sum(trial.training.steps for trial in left)
    bar = tqdm(total=steps, unit=" steps", desc=grid.name, disable=not sys.stderr.isatty(), dynamic_ncols=True)
    folder = file.parent / "models" if save_models else None
    try:
        with bar, Writer(file, durable=True) as lines:
            for later in (False, True):  # rows that are sized to others run after these
                trials = [(trial, sized(trial, grid, done)) for trial in left if (trial.match is not None) == later]
                for trial, result in _run_all(trials, workers or os.cpu_count() or 1, bar, folder):
                    done[trial.key] = {**result, "key": trial.key}
                    lines.append(done[trial.key])
                    about = f"{trial.label}, {trial.task['name']}, seed {trial.seed}"
                    said = f"accuracy {result['accuracy']:.3f} in {result['seconds']:.0f} s"
                    count = sum(each.key in done for each in grid.trials)
                    bar.write(f"{count}/{len(grid.trials)} {about}: {said}", file=sys.stderr)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"with what is finished in {file}; the same command goes on from there") from None
    return [done[trial.key] for trial in grid.trials]


def sized(trial: Trial, grid: Grid, done: dict[str, Result]) -> Trial:
    """The trial as it is to run: with the memory of the row that it is matched to."""
    if trial.match is None:
        return trial
    wanted = (trial.match, trial.task, trial.seed)
    other = next(x for x in grid.trials if (x.label, x.task, x.seed) == wanted and x.match is None)
    found = done[other.key].get("state_bytes")
    if not is_number(found) or found < 0:
        what = f"the result of row {other.label!r}, seed {other.seed}"
        raise ValueError(f"{what}: 'state_bytes' must be a number >= 0, got {shown(found)}; mend or remove its line")
    sizes = matched(trial.config(), found, trial.tasks()[0].length)
    return replace(trial, model={**trial.model, **sizes})


def _run_all(
    trials: list[tuple[Trial, Trial]], workers: int, bar: tqdm, folder: Path | None
) -> Iterator[tuple[Trial, Result]]:
    """Results as they come, each with the trial as it was asked for; trials: these, and as they are to run."""
    if not trials:
        return
    context = multiprocessing.get_context("spawn")
    steps: Any = context.Queue()
    pool = ProcessPoolExecutor(min(workers, len(trials)), context, _start_worker, (steps,))
    try:
        # Processes that are started now never hear Ctrl-C, which is for their parent: that ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            running: dict[Future[Result], Trial] = {
                pool.submit(_work, trial, folder and folder / asked.key): asked for asked, trial in trials
            }
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while running:
            finished, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            with suppress(queue.Empty):
                while True:
                    bar.update(steps.get_nowait())
            for future in finished:
                asked = running.pop(future)
                yield asked, _result(future, asked)
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _result(future: Future[Result], trial: Trial) -> Result:
    """What a worker found; an OSError of one line if it could not."""
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise OSError("a worker was ended from outside, perhaps for lack of memory; try fewer --workers") from error
    except (RuntimeError, MemoryError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(f"row {trial.label!r}, task {trial.task['name']!r}, seed {trial.seed}: {reason}") from error


def _start_worker(steps: Any) -> None:
    global _progress
    _progress = steps
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    keep_freed_memory()
    disable_progress_bar()  # of every model saved


def _end_with_parent() -> None:
    """A worker whose parent was killed would go on for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(trial: Trial, folder: Path | None) -> Result:
    def progress(step: int) -> None:
        if step % HEARD == 0 or step == trial.training.steps:
            _progress.put((step - 1) % HEARD + 1)

    return run_trial(trial, progress, folder)


def read_results(file: Path) -> list[Result]:
    """The results in a file, without what a kill left of a last line; a line that is no result is refused."""
    lines = list(read(file))
    if lines and not lines[-1].whole:
        lines.pop()
    for line in lines:
        if not isinstance(line.value, dict) or not isinstance(line.value.get("key"), str):
            raise ValueError(f"{file}, line {line.number}, is not a result: mend it or remove it")
    return [line.value for line in lines]
