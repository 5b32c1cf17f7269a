"""Grids of experiments in TOML files: every row with every task and every seed. docs/lab.md has an example."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch

from dla.choices import spelled_out
from dla.files import read_toml
from dla.lab.controls import control
from dla.lab.measure import matched
from dla.lab.trial import Training, Trial
from dla.models import DLAConfig, DLAForCausalLM
from dla.names import check_known
from dla.typed import NONE, SOME, TABLE, AnyTable, Limit, Seed, Text, convert, hints

NAME = Limit(
    "letters, digits and any of '_.-', not beginning with a dot",  # results go to a folder of this name
    re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*").fullmatch,
)
TABLES = ("training", "control")  # keys whose value may be a table
LISTS = ("layers", "time_step_limit")  # options of the model that are lists themselves


@dataclass(frozen=True)
class Grid:
    """The trials of a grid, in the order of the file."""

    name: str
    trials: tuple[Trial, ...]


class TaskTable(TypedDict):
    """A task: its name, what it is evaluated with besides, and options of its own."""

    name: Text
    evaluations: NotRequired[list[AnyTable]]


class RowTable(TypedDict, total=False):
    """Keys of a row that are no option of the model."""

    label: str
    control: str | AnyTable
    match: str
    training: AnyTable


@dataclass(frozen=True)
class Content:
    """What a grid file holds."""

    name: Annotated[str, NAME]
    seeds: Annotated[tuple[Seed, ...], SOME]
    task: Annotated[tuple[Annotated[TaskTable, TABLE], ...], SOME]
    row: Annotated[tuple[AnyTable, ...], SOME]  # any value may be a list of values
    model: AnyTable = field(default_factory=dict)
    training: AnyTable = field(default_factory=dict)


def read_grid(path: str | Path) -> Grid:
    """A grid file; every mistake in it is refused with where it is."""
    content = read_toml(Path(path), "grid")
    try:
        return make_grid(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def make_grid(content: dict[str, Any]) -> Grid:
    """A grid from what its file holds."""
    asked: Content = convert("", content, Content)
    for i, row in enumerate(asked.row):
        convert(f"row[{i}].label", row.get("label", ""), str)
    rows = [made for row in asked.row for made in _spread(row)]
    trials = [_trial(asked, task, row, seed) for task in asked.task for row in rows for seed in asked.seeds]
    _check_labels(trials)
    for trial in trials:
        try:  # whether it can be
            config = trial.config()
            if trial.control is not None:
                with torch.device("meta"):
                    control(DLAForCausalLM(config), trial.control)
            if trial.match is not None:
                matched(config, 1024, trial.tasks()[0].length)
        except (ValueError, TypeError) as error:
            raise ValueError(f"row {trial.label!r}: {error}") from error
    return Grid(asked.name, tuple(trials))


def _spread(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each combination of the values of its lists, also of those in its tables."""
    tables = {"": row, **{name: row[name] for name in TABLES if isinstance(row.get(name), dict)}}
    axes = [(table, name, value) for table, items in tables.items() for name, value in items.items()
            if isinstance(value, list) and (table or name not in LISTS)]  # fmt: skip
    label = row.get("label", "")
    for table, name, value in axes:
        if not value:
            where = f"{table}.{name}" if table else name
            raise ValueError(f"{where} of row {label!r} is an empty list, which makes no row")
    for values in itertools.product(*(value for _, _, value in axes)):
        made, words = deepcopy(row), [label]
        for (table, name, _), value in zip(axes, values, strict=True):
            (made[table] if table else made)[name] = value
            words.append(f"{name}={value}")
        made["label"] = " ".join(words).strip()
        convert(f"row {made['label']!r}", made, RowTable)
        yield made


def _trial(asked: Content, task: TaskTable, row: dict[str, Any], seed: int) -> Trial:
    where = f"row {row['label']!r}"
    if not row["label"]:
        raise ValueError("every row needs a label")
    options = {**asked.model, **{name: value for name, value in row.items() if name not in hints(RowTable)}}
    check_known(where, options, [*(f.name for f in fields(DLAConfig)), "temperature"])
    options = {name: None if value == NONE else value for name, value in options.items()}
    convert(f"{where}: memory", options.get("memory", ""), str)
    chosen = {**asked.training, **row.get("training", {})}
    check_known(f"{where}: training", chosen, hints(Training))
    made = Trial(
        grid=asked.name,
        label=row["label"],
        model=spelled_out(options, f"{where}: memory"),
        task={name: value for name, value in task.items() if name != "evaluations"},
        seed=seed,
        training=Training(**chosen),
        evaluations=tuple(task.get("evaluations", ())),
        control=row.get("control"),
        match=row.get("match"),
    )
    tasks = made.tasks()
    if len({each.vocab_size for each in tasks}) > 1:
        raise ValueError(f"the evaluations of task {task['name']!r} must keep its vocabulary")
    given = options.get("vocab_size", tasks[0].vocab_size)
    if isinstance(given, int) and given < tasks[0].vocab_size:
        raise ValueError(f"{where}: vocab_size must be at least the task's, {tasks[0].vocab_size}, got {given}")
    return made


def _check_labels(trials: Iterable[Trial]) -> None:
    labels, keys = {trial.label: trial for trial in trials}, Counter(trial.key for trial in trials)
    for trial in trials:
        if keys[trial.key] > 1:
            raise ValueError(f"label {trial.label!r} stands for two equal rows")
        if trial.match is not None:
            check_known(f"row {trial.label!r}: match", [trial.match], labels)
            if labels[trial.match].match is not None:
                raise ValueError(f"row {trial.label!r}: match={trial.match!r} is itself sized to another row")
