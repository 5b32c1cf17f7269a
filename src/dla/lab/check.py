"""What a line of a results file must be: field by field, so that whatever reads results need not ask.

A figure that is not a number (NaN, infinite, null or left out) is one that a run does not have: a diverged run has no
loss. A figure of another kind, or out of its range, is a damaged line.
"""

import math
from collections.abc import Callable
from typing import Any

from dla.report import check_value, is_number, shown

LARGEST = 1e100  # beyond it sums of squares leave floating point
REQUIRED = {"key": str, "label": str, "task": dict, "seed": int}
# Fields that may be left out or null.
KINDS: dict[str, type | tuple[type, ...]] = {
    "grid": str,
    "match": str,
    "error": str,
    "control": (str, dict),
    "diverged": bool,
    **dict.fromkeys(("model", "training", "versions", "memory", "skipping"), dict),
    **dict.fromkeys(("curve", "evaluations"), list),
}
# Their least and most.
FIGURES = {
    "accuracy": (0.0, 1.0),
    "chance": (0.0, 1.0),
    "loss": (-LARGEST, LARGEST),
    **dict.fromkeys(("parameters", "state_bytes", "state_bytes_held", "seconds"), (0.0, LARGEST)),
}


def check_run(run: object, where: str) -> None:
    """Refuse what is no run; ``where`` is its file and line."""
    if not isinstance(run, dict):
        raise ValueError(f"{where}: a run must be an object, got {type(run).__name__}")
    check_value(run, where)
    for name, kind in REQUIRED.items():
        _require(_is(run.get(name), kind), where, name, f"of type {kind.__name__}", run.get(name))
    for name, kinds in KINDS.items():
        right = run.get(name) is None or _is(run[name], kinds)
        words = " or ".join(one.__name__ for one in (kinds if isinstance(kinds, tuple) else (kinds,)))
        _require(right, where, name, f"of type {words}", run.get(name))
    _check_task(run["task"], where, "task")
    if not isinstance(run["task"].get("name"), str):
        raise ValueError(f"{where}: 'task' must have a name, got {shown(run['task'])}")
    if isinstance(run.get("control"), dict):
        _require(isinstance(run["control"].get("name"), str), where, "control", "a table with a name", run["control"])
    _check_figures(run, where)
    for name in ("memory", "skipping"):
        for key, value in (run.get(name) or {}).items():
            _require(_is_figure(value, -LARGEST, LARGEST), where, f"{name}.{key}", "a number or null", value)
    _each(run, "curve", where, _is_point, "[step, loss, accuracy]")
    _each(run, "evaluations", where, _is_evaluation, "an object with a task")
    for number, evaluation in enumerate(run.get("evaluations") or [], 1):
        _check_task(evaluation["task"], where, f"evaluations, {number}: task")
        _check_figures(evaluation, f"{where}: evaluations, {number}")


def _check_figures(found: dict[str, Any], where: str) -> None:
    for name, (least, most) in FIGURES.items():
        accepted = f"a number from {least:g} to {most:g}, or null"
        _require(_is_figure(found.get(name), least, most), where, name, accepted, found.get(name))


def _check_task(task: dict[str, Any], where: str, name: str) -> None:
    length = task.get("length")
    right = length is None or (_is(length, int) and 1 <= length <= LARGEST)
    _require(right, where, f"{name}.length", "a whole number of at least 1", length)


def _each(run: dict[str, Any], name: str, where: str, fits: Callable[[Any], bool], what: str) -> None:
    for value in run.get(name) or []:
        _require(fits(value), where, name, f"a list of {what}", value)


def _is_point(point: Any) -> bool:
    return (
        isinstance(point, list)
        and len(point) == 3
        and is_number(point[0])
        and 0 <= point[0] <= LARGEST
        and _is_figure(point[1], -LARGEST, LARGEST)
        and _is_figure(point[2], 0.0, 1.0)
    )


def _is_evaluation(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("task"), dict)


def _is_figure(value: object, least: float, most: float) -> bool:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return True
    return is_number(value) and least <= value <= most


def _is(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Of a kind; true and false are no numbers."""
    return isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))


def _require(right: bool, where: str, name: str, accepted: str, given: object) -> None:
    if not right:
        raise ValueError(f"{where}: {name!r} must be {accepted}, got {shown(given)}")
