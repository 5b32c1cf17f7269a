"""What a line of a results file must be: field by field, so that whatever reads results need not ask.

A figure that is not a number (NaN, infinite, null or left out) is one that a run does not have: a diverged run has no
loss. A figure of another kind, or out of its range, is a damaged line.
"""

from math import isfinite
from typing import Annotated, Any, NotRequired, TypedDict

from dla.report import check_value
from dla.typed import Count, Limit, convert

LARGEST = 1e100  # beyond it sums of squares leave floating point


def _from(least: float, most: float) -> Limit:
    """A range of figures; what is not finite is none at all."""
    words = f"from {least:g} to {most:g}"
    return Limit(f"a number {words}", lambda x: least <= x <= most or not isfinite(x), f"numbers {words}")


Part = Annotated[float, _from(0.0, 1.0)] | None
Figure = Annotated[float, _from(-LARGEST, LARGEST)] | None
Amount = Annotated[float, _from(0.0, LARGEST)] | None
Step = Annotated[float, Limit("a step", lambda x: 0 <= x <= LARGEST, "numbers")]
Point = tuple[Step, Figure, Part]  # loss and accuracy


class WithName(TypedDict):
    name: str


class TaskFields(TypedDict, total=False):
    length: Annotated[Count, Limit(f"an integer <= {LARGEST:g}", lambda x: x <= LARGEST)] | None


class NamedTask(TaskFields, WithName):
    """A task with its name, which those of evaluations need not repeat."""


class MeasuredFields(TypedDict, total=False):
    """What was measured."""

    accuracy: Part
    chance: Part
    loss: Figure
    parameters: Amount
    state_bytes: Amount
    state_bytes_held: Amount
    seconds: Amount


class EvaluationFields(MeasuredFields):
    """What was measured in one of the evaluations."""

    task: TaskFields


class RunFields(MeasuredFields):
    """A line of results."""

    key: str
    label: str
    seed: int
    task: NamedTask
    grid: NotRequired[str | None]
    match: NotRequired[str | None]
    error: NotRequired[str | None]
    control: NotRequired[str | WithName | None]
    diverged: NotRequired[bool | None]
    model: NotRequired[dict[str, Any] | None]
    training: NotRequired[dict[str, Any] | None]
    versions: NotRequired[dict[str, Any] | None]
    memory: NotRequired[dict[str, Figure] | None]
    skipping: NotRequired[dict[str, Figure] | None]
    curve: NotRequired[list[Point] | None]
    evaluations: NotRequired[list[EvaluationFields] | None]


def check_run(run: object, where: str) -> None:
    """Refuse what is no run; ``where`` is its file and line."""
    check_value(run, where)
    try:
        convert("", run, RunFields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
