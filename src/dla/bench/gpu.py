"""`dla bench gpu`: whether the Triton kernels are right on this machine's GPU, and how fast, as one text to hand on.

Without a GPU there is nothing to time. The two proofs that need none are run then: a few cases in Triton's interpreter,
and what the kernels take of an A100 when they are compiled for it.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dla import __version__
from dla.bench import gpu_timing, gpu_training
from dla.bench.common import Figures, say
from dla.bench.gpu_cases import OPERATORS
from dla.bench.gpu_checks import Checked
from dla.bench.gpu_outcomes import ON_A_GPU, outcomes, outcomes_on_a_gpu
from dla.bench.gpu_text import as_text, proven, verdict
from dla.files import read_object, write_whole
from dla.ops.gpu import configs
from dla.ops.gpu.runtime import missing
from dla.ops.gpu.shapes import PAPER, LayerShape
from dla.report import table
from dla.report.found import Found

DTYPES = (torch.float32, torch.bfloat16)
NO_COMPLAINT = "no kernel spills, or takes more than 160 KB of shared memory"


def run(
    *, tune: bool = False, efficiency: bool = True, rounds: int = 20, length: int = 16384, out: Path | None = None
) -> Found:
    """Check and time the kernels, and draw the paper's efficiency figure; the exit code is 1 if one is wrong.

    tune: try a few tile sizes for each kernel first, and keep the fastest on disk. efficiency: run `dla reproduce
    efficiency` at the paper's scale. rounds: to take medians of. length: tokens of a sequence.
    """
    if not torch.cuda.is_available():
        return without_gpu(out)
    found: Figures = {"machine": machine()}
    checks: list[Checked] = []
    for dtype in DTYPES:
        checks += outcomes(ON_A_GPU, "cuda", dtype)
        say(f"{dtype}: stages are checked, gradients are next")
        checks += outcomes_on_a_gpu("cuda", dtype)
    found["checks"] = [x.figures() for x in checks]
    say(verdict(found, checks))
    shapes = [replace(shape, length=length) for shape in PAPER]
    found |= times(shapes, tune, rounds)
    found["training"] = [row for shape in shapes for row in gpu_training.measured(shape, "cuda", rounds)]
    notes = []
    if efficiency:
        from dla.bench.efficiency import run as draw

        drawn = draw(scale="paper")
        found["efficiency"], notes = drawn.figures, [drawn.text]
    found["verdict"] = verdict(found, checks)
    return Found(as_text(found, checks), found, out, notes, code=int(not proven(checks)))


def times(shapes: Sequence[LayerShape], tune: bool, rounds: int) -> Figures:
    """Of everything that needs no gradients; and what was chosen before, if that is asked for."""
    found: Figures = {}
    made = {shape.name: gpu_timing.calls(shape, "cuda") for shape in shapes}
    if tune:
        own = {f"{shape} {name}": call for shape, of in made.items() for name, call in of.items() if ours(name)}
        found["tuned"] = keep(configs.device_name(), gpu_timing.tuned(own, partial(gpu_timing.seconds, rounds=rounds)))
    found["times"] = [
        {"shape": shape, **gpu_timing.timed(name, call, rounds)}
        for shape, of in made.items()
        for name, call in of.items()
    ]
    return found


def without_gpu(
    out: Path | None,
    interpret: Callable[[], Sequence[Checked]] | None = None,
    compile_all: Callable[[], Sequence[Any]] | None = None,
) -> Found:
    """The two proofs; what they are made by may be given."""
    say("there is no GPU here: a few cases in Triton's interpreter, and the kernels compiled for an A100")
    checks = list((interpret or interpreted)())
    compiled = list((compile_all or compiled_here)())
    complaints = [x.complaint for x in compiled if x.complaint]
    found: Figures = {
        "machine": machine(),
        "checks": [x.figures() for x in checks],
        "resources": [x.figures() for x in compiled],
        "complaints": complaints,
    }
    found["verdict"] = verdict(found, checks)
    taken = "What the kernels take of an A100, at the paper's shapes\n\n" + table([x.row() for x in compiled])
    text = as_text(found, checks, [taken, "\n".join(dict.fromkeys(complaints)) or NO_COMPLAINT])
    note = "nothing was run on a GPU: there is none here"
    return Found(text, found, out, [note], code=int(bool(complaints) or not proven(checks)))


def interpreted() -> list[Checked]:
    """A few cases in a process that interprets."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError("triton is not installed: pip install 'dynamic-linear-attention[gpu]'")
    command = [sys.executable, "-m", "dla.bench.gpu_outcomes"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the interpreter failed: {' '.join(done.stderr.split())[-300:]}")
    return [Checked.of(x) for x in json.loads(done.stdout)]


def compiled_here() -> list[Any]:
    from dla.bench.gpu_resources import compiled

    return list(compiled([80]))


def keep(device: str, chosen: dict[str, configs.Config]) -> dict[str, configs.Config]:
    """Write down what was fastest on a device, beside what other devices like."""
    place = configs.file()
    place.parent.mkdir(parents=True, exist_ok=True)
    known = read_object(place) if place.exists() else {}
    write_whole(place, json.dumps({**known, device: chosen}, indent=2).encode())
    configs.tuned.cache_clear()
    say(f"kept in {place}")
    return chosen


def machine() -> Figures:
    """What a reader of the figures must know."""
    found: Figures = {"dla": __version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    for package in ("triton", "fla-core", "flash-linear-attention"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "capability": f"{properties.major}.{properties.minor}",
                  "sms": properties.multi_processor_count, "cuda": torch.version.cuda}  # fmt: skip
    return found | {"triton runs": f"no: {reason}" if (reason := missing()) else "yes"}


def ours(name: str) -> bool:
    """Whether a call that is timed runs kernels of this package."""
    return name.partition(":")[0] in OPERATORS
