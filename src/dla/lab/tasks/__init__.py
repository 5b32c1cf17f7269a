"""Small tasks with exact answers, on which memories can be compared.

A task is a frozen set of options; `sample(batch, seed)` draws sequences with questions and their only right answers.
What is asked for was written before the question, and was drawn independently of all else, so that a reader who lost
the place where it stood is left with `chance`. To evaluate a model at another length, make the task with another
`length` (or `pairs`, `needles`, …): `vocab_size` depends on the options of the vocabulary alone.
"""

from dataclasses import fields
from typing import Any

from dla.lab.tasks.base import NO_TARGET, Batch, Task
from dla.lab.tasks.changes import Changes
from dla.lab.tasks.copying import Induction, SelectiveCopy
from dla.lab.tasks.needle import Needle
from dla.lab.tasks.recall import Overwrite, Recall
from dla.lab.tasks.text import Text
from dla.names import nearest

__all__ = ["NO_TARGET", "TASKS", "Batch", "Task", "make_task"]

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Recall, Needle, SelectiveCopy, Induction, Overwrite, Changes, Text)
}


def make_task(name: str, **options: Any) -> Task:
    """The task of that name; `make_task(**task.describe())` is the same task again."""
    if name not in TASKS:
        near = nearest(str(name), TASKS)
        raise ValueError(f"there is no task {name!r}; the nearest is {near!r}, of {', '.join(TASKS)}")
    accepted = [field.name for field in fields(TASKS[name])]
    for option in options:
        if option not in accepted:
            near = nearest(option, accepted)
            raise ValueError(f"{name} has no option {option!r}; the nearest is {near!r}, of {', '.join(accepted)}")
    return TASKS[name](**options)
