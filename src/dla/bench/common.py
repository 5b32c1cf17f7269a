"""What the benchmarks share beside their clock: models, the machine, figures that are held to a limit, reports."""

import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dla.ops.cpu import library

if TYPE_CHECKING:
    from dla.models import DLAForCausalLM

Row = dict[str, Any]


def machine() -> Row:
    """What the figures of a report were measured on."""
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "compiled scan": library.missing() is None,
        "machine": platform.machine(),
    }


def random_model(name: str, memory: str) -> "DLAForCausalLM":
    """A preset with random weights, the same each time."""
    from dla.models import DLAForCausalLM, preset

    torch.manual_seed(0)
    return DLAForCausalLM(preset(name, memory=memory)).eval()


def held_to(required: str, figure: str, value: float, **more: Any) -> Row:
    """A figure with its limit, such as ">= 30 x", and whether that holds."""
    sign, bound = required.replace(",", "").split()[:2]
    holds = value >= float(bound) if sign == ">=" else value <= float(bound)
    return {"figure": figure, "value": value, "required": required, "holds": holds, **more}


def say(line: str) -> None:
    """How far a benchmark is, for who waits for it."""
    print(line, file=sys.stderr, flush=True)


def deliver(report: Row, text: str, out: Path | None, as_json: bool) -> None:
    """Write a report to a file, if one is named, and print it: as JSON, or what there is of text for people."""
    written = json.dumps(report, indent=2)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(written + "\n")
    if as_json or text:
        print(written if as_json else text)
