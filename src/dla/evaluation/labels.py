"""What the rows of tables are called: the names of runs, and as much of their paths as tells them apart."""

from collections.abc import Sequence
from pathlib import Path

from dla.evaluation.results import Evaluation
from dla.report.values import grouped

MODEL = "model"  # the folder of a run that holds its model


def run_name(model: str) -> str:
    """What a model is called if nobody named it: its folder, its preset, or the run of out/cpu/dynamic/model."""
    return _end(_parts(model), 1)


def is_named(one: Evaluation) -> bool:
    """Whether somebody gave it a label. A folder's bare name, such as "model", is what others were called once."""
    return one.label not in ("", Path(one.model).name)


def row_names(evaluations: Sequence[Evaluation]) -> list[str]:
    """Of each evaluation, all different: with more of the model's path where they would be the same, then numbers."""
    labels = [one.label if is_named(one) else run_name(one.model) for one in evaluations]
    models = grouped(zip(labels, (one.model for one in evaluations), strict=True))
    names: list[str] = []
    for label, one in zip(labels, evaluations, strict=True):
        name = label
        if len(models[label]) > 1:
            path = _told_apart(one.model, models[label])
            name = path if label == run_name(one.model) else f"{label} [{path}]"
        again = sum(other == name or other.startswith(f"{name} #") for other in names)
        names.append(f"{name} #{again + 1}" if again else name)
    return names


def _told_apart(model: str, models: Sequence[str]) -> str:
    """The shortest end of a model's path that is not the end of another's."""
    own = _parts(model)
    others = [parts for other in models if (parts := _parts(other)) != own]
    alone = (n for n in range(1, len(own)) if all(parts[-n:] != own[-n:] for parts in others))
    return _end(own, next(alone, len(own)))


def _parts(model: str) -> tuple[str, ...]:
    """Of a model's path, without the folder that all runs have."""
    parts = Path(model).parts
    return parts[:-1] if len(parts) > 1 and parts[-1] == MODEL else parts


def _end(parts: tuple[str, ...], n: int) -> str:
    return str(Path(*parts[-n:])) if parts else ""
