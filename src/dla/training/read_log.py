"""The log of a run, for those who draw it: every figure is checked to be one, and a refusal names the line."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dla.report.jsonl import read
from dla.training.fields import Fields, integer, refuse
from dla.training.monitor import LOG, Record

MEMORY = ("boundary_rate", "live_states", "W")  # of a layer, that are drawn
LAST = 10**15  # steps and positions that an axis can hold


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
    kinds: dict[str, list[Record]] = {kind: [] for kind in _CHECKS}
    lines = list(read(file))
    for line in lines:
        if not line.whole and line is lines[-1]:
            continue
        try:
            record = Fields(line.value if line.whole else None)
            if _kind(record) in kinds:
                kinds[_kind(record)].append(record.value)
        except ValueError as error:
            said = error if line.whole else "it is damaged"
            raise ValueError(f"{file}, line {line.number}: not a record of a run: {said}") from error
    if not kinds["step"]:
        raise ValueError(f"{file} holds no step yet")
    return RunLog(name, kinds["step"], kinds["evaluation"], [r for r in kinds["memory"] if r.get("memory")])


def _kind(record: Fields) -> str:
    """The kind of a record whose figures can be drawn."""
    kind = record.text("kind")
    if record.integer("step") > LAST:
        raise refuse("step", f"an integer <= {LAST}", record["step"])
    if kind in _CHECKS:
        _CHECKS[kind](record)
    return kind


def _check_step(record: Fields) -> None:
    for name in ("loss", "grad_norm", "lr"):
        _check_figure(record.name(name), record.value.get(name))


def _check_evaluation(record: Fields) -> None:
    _check_figure("validation_loss", record.value.get("validation_loss"))
    places = Fields(record.value.get("by_position", {}), "by_position")
    for place in places:
        if not re.fullmatch("[0-9]+-[0-9]{1,15}", place):
            raise refuse("by_position", 'ranges of positions such as "64-127"', place)
        _check_figure(places.name(place), places[place], missing=False)


def _check_memory(record: Fields) -> None:
    for i, layer in enumerate(record.items("memory")):
        fields = Fields(layer, f"memory[{i}]")
        integer(fields.name("layer"), fields["layer"])
        for name in MEMORY:
            _check_figure(fields.name(name), fields[name], missing=False)


_CHECKS: dict[str, Callable[[Fields], None]] = {
    "step": _check_step,
    "evaluation": _check_evaluation,
    "memory": _check_memory,
}


def _check_figure(where: str, value: object, missing: bool = True) -> None:
    """Refuse what is no number; one that is not finite is a number, and is not drawn."""
    if value is None and missing:
        return
    if type(value) not in (int, float):
        raise refuse(where, "a number", value)
    try:
        float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise refuse(where, "a number that a float can hold", value) from None
