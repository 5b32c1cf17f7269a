"""A small corpus, a small recipe, and `dla train` on them: in this process, in another, or in two ranks."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dla.cli import main

Record = dict[str, Any]

MODELS = {
    "single": {"backbone": "linear", "memory": "single"},
    "log_linear": {"backbone": "linear", "memory": "log_linear"},
    "dynamic": {"backbone": "linear", "memory": "dynamic", "capacity": 4},
    "routed": {"backbone": "linear", "memory": "dynamic", "capacity": 4, "routed": True},
    "softmax": {"backbone": "softmax"},
}
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_k_dim": 8,
    "head_v_dim": 8,
    "tie_word_embeddings": True,
}
WORDS = ("state", "memory", "token", "merge", "slot", "read", "write", "key", "value", "gate", "the", "a", "of", "is")
PATIENCE = 120  # seconds that something of another process is waited for


def write_corpus(folder: Path, files: int = 12, seed: int = 0) -> Path:
    """Text files of some kilobytes each."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        lines = (" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(draw.randint(40, 120)))
        (folder / f"{i:02}.txt").write_text("\n".join(lines))
    return folder


def write_settings(folder: Path, model: str = "dynamic", name: str = "recipe.toml", **more: Record) -> Path:
    """A recipe file of twelve steps on ``folder``/text; ``more``: further settings, by section."""
    if not (folder / "text").exists():
        write_corpus(folder / "text")
    sections: dict[str, Record] = {
        "model": {**SIZES, **MODELS[model]},
        "data": {"train": str(folder / "text"), "length": 64, "holdout": 0.2, "cache": str(folder / "cache")},
        "batch": {"sequences": 4},
        "optimizer": {"lr": 1e-2},
        "schedule": {"steps": 12, "warmup": 2},
        "compute": {"device": "cpu", "threads": 1},
        "checkpoint": {"every": 4, "export": False},
        "evaluation": {"every": 0, "sequences": 6},
        "log": {"memory_every": 0},
    }
    lines = [f"run = {json.dumps(str(folder / 'run'))}"]
    for section in {**sections, **more}:
        lines.append(f"[{section}]")
        values = {**sections.get(section, {}), **more.get(section, {})}
        lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
    file = folder / name
    file.write_text("\n".join(lines) + "\n")
    return file


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(x)}" for key, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


# What a run left behind.


def log(run: Path, kind: str) -> list[Record]:
    """The lines of a kind in a run's log; a line that is being written is left out."""
    file = run / "log.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def losses(run: Path) -> list[float]:
    """Of every step from the first: none is missing, none there twice."""
    steps = log(run, "step")
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    return [record["loss"] for record in steps]


def norms(run: Path) -> list[float]:
    return [record["grad_norm"] for record in log(run, "step")]


def saved_steps(run: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-????????"))


def rewind(run: Path, step: int) -> None:
    """Take the checkpoints after a step away, as if the run had been stopped there."""
    for later in (s for s in saved_steps(run) if s > step):
        shutil.rmtree(run / "checkpoints" / f"step-{later:08}")
    assert saved_steps(run)[-1] == step


def furthest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two sequences of one length."""
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


# Running.


def train(recipe: Path, run: Path, *options: object) -> int:
    """`dla train` in this process; the exit code."""
    return main(["train", str(recipe), "--run", str(run), *map(str, options)])


def trained(recipe: Path, run: Path, *options: object) -> list[float]:
    """The losses of a run that ended well."""
    assert train(recipe, run, *options) == 0
    return losses(run)


def command(recipe: Path, run: Path, *options: object, ranks: Sequence[str] = ()) -> list[str]:
    """The command line of a run; ``ranks``: options of torchrun, for more than one process."""
    # Without "--", torchrun takes --run for one of its own options.
    launcher = ["-m", "torch.distributed.run", *ranks, "-m", "--"] if ranks else ["-m"]
    return [sys.executable, *launcher, "dla.cli", "train", str(recipe), "--run", str(run), *map(str, options)]


def several(runs: Sequence[list[str]], ranks: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs one after another in the same processes, which saves their start: ``runs`` as ``command`` gives them."""
    arguments = [(free_port(), run[run.index("train") :]) for run in runs]
    launcher = [sys.executable, "-m", "torch.distributed.run", *ranks]
    return finished([*launcher, "-m", "tests.training.common", json.dumps(arguments)], cwd=Path(__file__).parents[2])


def two_ranks() -> list[str]:
    """Options of torchrun for two processes, with a port of their own."""
    return ["--nproc-per-node", "2", "--master-port", str(free_port())]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def started(
    arguments: list[str], variables: dict[str, str] | None = None, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process with its own group, of which nothing is left afterwards."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(arguments, env=variables, start_new_session=True, **{**pipes, **more})
    try:
        yield process
    finally:
        kill_group(process)
        process.communicate()


def kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a process and all that it started; torchrun's workers are no part of its group."""
    if process.poll() is None:
        for pid in (process.pid, *children(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """The processes that a process started and that are still there."""
    try:
        found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [child for first in found for child in (first, *children(first))]


def finished(arguments: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    with started(arguments, **more) as process:
        out, error = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(arguments, process.returncode, out, error)


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> bool:
    """Poll until something is so; False if the process ended before."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if condition():
            return True
        if process.poll() is not None:
            return bool(condition())
        time.sleep(0.002)
    raise TimeoutError


def _one_of_several(port: int, arguments: list[str]) -> int:
    """A run with a store of its own: torchrun's still has what the run before wrote."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    return main(arguments)


if __name__ == "__main__":
    sys.exit(max(_one_of_several(*run) for run in json.loads(sys.argv[1])))
