"""The log of a run, for those who draw it: every figure is checked to be one, and a refusal names the line."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from dla.report.jsonl import read
from dla.training.monitor import LOG, Record
from dla.typed import Limit, Natural, convert

LAST = 10**15  # steps and positions that an axis can hold
PLACE = re.compile("[0-9]+-[0-9]{1,15}")
PLACES = Limit('ranges of positions such as "64-127"', lambda x: all(map(PLACE.fullmatch, x)))


class AnyLine(TypedDict):
    """What every line of a log has."""

    kind: str
    step: Annotated[Natural, Limit(f"an integer <= {LAST}", lambda x: x <= LAST)]


# Figures may be missing, and may be numbers that are not finite: those are not drawn.


class StepLine(TypedDict, total=False):
    loss: float | None
    grad_norm: float | None
    lr: float | None


class EvaluationLine(TypedDict, total=False):
    validation_loss: float | None
    by_position: Annotated[dict[str, float], Limit("an object {…}"), PLACES]


class LayerFigures(TypedDict):
    layer: Natural
    boundary_rate: float
    live_states: float
    W: float


class MemoryLine(TypedDict):
    memory: list[LayerFigures]


KINDS: dict[str, Any] = {"step": StepLine, "evaluation": EvaluationLine, "memory": MemoryLine}


@dataclass(frozen=True)
class RunLog:
    """The records of a log, by kind."""

    name: str
    steps: list[Record]
    evaluations: list[Record]
    memory: list[Record]


def read_run(folder: Path, name: str) -> RunLog:
    """The log of a run's folder. A last line that is still being written, or was cut short, is left out.

    Raises:
        ValueError: a line is no record, or holds what cannot be drawn, and which.
    """
    file = folder / LOG
    if not file.is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no {LOG}")
    kinds: dict[str, list[Record]] = {kind: [] for kind in KINDS}
    lines = list(read(file))
    for line in lines:
        if not line.whole and line is lines[-1]:
            continue
        try:
            record = convert("", line.value if line.whole else None, AnyLine)
            kind = record["kind"]
            if kind in KINDS:
                kinds[kind].append(convert("", record, KINDS[kind]))
        except ValueError as error:
            said = error if line.whole else "it is damaged"
            raise ValueError(f"{file}, line {line.number}: not a record of a run: {said}") from error
    if not kinds["step"]:
        raise ValueError(f"{file} holds no step yet")
    return RunLog(name, kinds["step"], kinds["evaluation"], [r for r in kinds["memory"] if r.get("memory")])
