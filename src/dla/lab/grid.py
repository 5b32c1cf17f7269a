"""Grids of experiments in TOML files.

name = "recall"
seeds = [0, 1, 2]

[training]            # of every row; see `Training`
steps = 1000

[model]               # of every row; options of DLAConfig
backbone = "mamba2"
hidden_size = 64

[[task]]              # every task is run with every row and seed
name = "recall"
pairs = 16
evaluations = [{ length = 384 }]

[[row]]
label = "DLA"
memory = "dynamic"
tau = [0.4, 0.6]      # a list makes one row for each of its values

[[row]]
label = "single, as large"
match = "DLA tau=0.6" # a row of single states or softmax, sized to the memory that row had alive on average
training = { lr = [3e-3, 1e-2] }
"""

import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from dla.lab.controls import control
from dla.lab.measure import matched
from dla.lab.trial import Training, Trial
from dla.models import DLAConfig, DLAForCausalLM
from dla.models.configurations import spelled_out
from dla.names import check_known, nearest
from dla.report import is_number, shown

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
TOP = ("name", "seeds", "training", "model", "task", "row")
OWN = ("label", "control", "match", "training")  # keys of a row that are no option of the model
TABLES = ("training", "control")  # keys whose value may be a table
LISTS = ("layers", "time_step_limit")  # options of the model that are lists themselves


@dataclass(frozen=True)
class Grid:
    """The trials of a grid, in the order of the file."""

    name: str
    trials: tuple[Trial, ...]


def read_grid(path: str | Path) -> Grid:
    """A grid file; every mistake in it is refused with where it is."""
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no grid file {path}") from None
    except OSError as error:
        raise ValueError(f"the grid file cannot be read: {error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    try:
        return make_grid(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def make_grid(content: dict[str, Any]) -> Grid:
    """A grid from what its file holds."""
    check_known("the file", content, TOP)
    for name in ("name", "seeds", "task", "row"):
        if not content.get(name):
            raise ValueError(f"{name} is missing")
    _check_shape(content)
    common, training = content.get("model", {}), content.get("training", {})
    trials = [
        _trial(content["name"], dict(task), row, common, training, seed)
        for task in content["task"]
        for row in itertools.chain.from_iterable(map(_spread, content["row"]))
        for seed in content["seeds"]
    ]
    _check_labels(trials)
    for trial in trials:
        if trial.control is not None:
            _try_control(trial)
        if trial.match is None:
            trial.config()  # refuses what cannot be
        else:
            matched(trial.config(), 1024, trial.tasks()[0].length)  # refuses rows that cannot be sized
    return Grid(content["name"], tuple(trials))


def _check_shape(content: dict[str, Any]) -> None:
    """Refuse values of another kind than the keys of a grid have."""
    name, seeds = content["name"], content["seeds"]
    if not isinstance(name, str) or not NAME.fullmatch(name):  # results go to a folder of this name
        raise ValueError(f"name must be letters, digits and any of '_.-', not beginning with a dot, got {shown(name)}")
    if not isinstance(seeds, list) or any(type(seed) is not int or not 0 <= seed < 2**63 for seed in seeds):
        raise ValueError(f"seeds must be a list of integers >= 0, got {shown(seeds)}")
    for key in ("model", "training"):
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(f"{key} must be a table, got {shown(content[key])}")
    for key, own in (("task", "name"), ("row", "label")):
        tables = content[key]
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ValueError(f"{key} must be tables, [[{key}]], got {shown(tables)}")
        for table in tables:
            if not isinstance(table.get(own, ""), str):
                raise ValueError(f"{own} of a {key} must be text, got {shown(table[own])}")
    for task in content["task"]:
        if not task.get("name"):
            raise ValueError(f"every task needs a name, got {shown(task)}")
        others = task.get("evaluations", [])
        if not isinstance(others, list) or not all(isinstance(other, dict) for other in others):
            raise ValueError(f"evaluations of task {task['name']!r} must be a list of tables, got {shown(others)}")


def _check_row(row: dict[str, Any]) -> None:
    """Refuse values of another kind, once lists are spread."""
    for key, kinds in (("match", (str,)), ("training", (dict,)), ("control", (str, dict))):
        if key in row and not isinstance(row[key], kinds):
            raise ValueError(f"{key} of row {row['label']!r} cannot be {shown(row[key])}")


def _spread(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each combination of the values of its lists, also of those in its tables."""
    axes: list[tuple[tuple[str, ...], list[Any]]] = [
        ((name,), value) for name, value in row.items() if isinstance(value, list) and name not in LISTS
    ]
    for table in TABLES:
        inner = row.get(table)
        if isinstance(inner, dict):
            axes += [((table, name), value) for name, value in inner.items() if isinstance(value, list)]
    for path, value in axes:
        if not value:
            raise ValueError(f"{'.'.join(path)} of row {row.get('label', '')!r} is an empty list, which makes no row")
    for values in itertools.product(*(value for _, value in axes)):
        made = deepcopy(row)
        label = row.get("label", "")
        for (path, _), value in zip(axes, values, strict=True):
            (made if len(path) == 1 else made[path[0]])[path[-1]] = value
            label += f" {path[-1]}={value}"
        made["label"] = label.strip()
        _check_row(made)
        yield made


def _try_control(trial: Trial) -> None:
    """Refuse a control that cannot be."""
    with torch.device("meta"):
        try:
            control(DLAForCausalLM(trial.config()), trial.control)
        except (ValueError, TypeError) as error:
            raise ValueError(f"row {trial.label!r}: {error}") from error


def _trial(
    grid: str, task: dict[str, Any], row: dict[str, Any], common: dict[str, Any], training: dict[str, Any], seed: int
) -> Trial:
    evaluations = tuple(task.pop("evaluations", ()))
    options = {**common, **{name: value for name, value in row.items() if name not in OWN}}
    known = [f.name for f in fields(DLAConfig)]
    where = f"row {row['label']!r}"
    check_known(where, options, [*known, "temperature"])
    options = {name: None if value == "none" else value for name, value in options.items()}  # TOML has no null
    if not row["label"]:
        raise ValueError("every row needs a label")
    chosen = {**training, **row.get("training", {})}
    check_known(f"{where}: training", chosen, [f.name for f in fields(Training)])
    if not isinstance(options.get("memory", ""), str):
        raise ValueError(f"{where}: memory must be text, got {shown(options['memory'])}")
    made = Trial(
        grid=grid,
        label=row["label"],
        model=spelled_out(options),
        task=task,
        seed=seed,
        training=Training(**chosen),
        evaluations=evaluations,
        control=row.get("control"),
        match=row.get("match"),
    )
    tasks = made.tasks()
    if len({each.vocab_size for each in tasks}) > 1:
        raise ValueError(f"the evaluations of task {task['name']!r} must keep its vocabulary")
    given = options.get("vocab_size", tasks[0].vocab_size)
    if is_number(given) and given < tasks[0].vocab_size:
        raise ValueError(f"{where}: vocab_size must be at least the task's, {tasks[0].vocab_size}, got {given}")
    return made


def _check_labels(trials: Iterable[Trial]) -> None:
    labels = {trial.label: trial for trial in trials}
    seen: set[str] = set()
    for trial in trials:
        if trial.key in seen:
            raise ValueError(f"label {trial.label!r} stands for two equal rows")
        seen.add(trial.key)
        if trial.match is not None:
            if trial.match not in labels:
                near = nearest(trial.match, labels)
                raise ValueError(f"row {trial.label!r}: match={trial.match!r} is not known; the nearest is {near!r}")
            if labels[trial.match].match is not None:
                raise ValueError(f"row {trial.label!r}: match={trial.match!r} is itself sized to another row")
