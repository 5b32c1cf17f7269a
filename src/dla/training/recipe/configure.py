"""From a recipe to the configuration of its model, and whether both can be."""

from pathlib import Path
from typing import Any

from dla.choices import spelled_out
from dla.models.config import DLAConfig
from dla.models.load import find_config
from dla.models.presets import PRESETS, preset
from dla.names import check_known
from dla.training.recipe import Recipe
from dla.training.recipe.schema import MODEL, NULL
from dla.typed import check_fields, convert

SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers")  # what a model without a preset must say, with its backbone


def model_config(recipe: Recipe) -> DLAConfig:
    """The configuration of the model that the recipe trains: of a preset, of a saved model, or made of its options.

    Its temperature is None: the trainer sets the gate's. A model is made for sequences of ``data.length`` at least.
    """
    options = _options(recipe)
    if "load" in options:
        return _saved(options["load"])
    name = options.pop("preset", None)
    given = options.get("max_position_embeddings")
    length = recipe.data.length
    if given is not None and given < length:
        raise ValueError(f"model.max_position_embeddings must be at least data.length = {length}, got {given}")
    try:
        config = DLAConfig(**spelled_out(options)) if name is None else preset(name, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"model: {' '.join(str(error).split())}") from error
    if given is None:
        config.max_position_embeddings = max(config.max_position_embeddings, length)
    return config


def check(recipe: Recipe) -> Recipe:
    """The recipe itself, if all its values can be; a ValueError names the first that cannot.

    Whether there is a model to load is seen when it is loaded.
    """
    check_fields(recipe)
    schedule, gate = recipe.schedule, recipe.gate
    if schedule.warmup > schedule.steps:
        raise ValueError(f"schedule.warmup must be at most schedule.steps = {schedule.steps}, got {schedule.warmup}")
    if gate.end > gate.start:
        raise ValueError(f"gate.end must be at most gate.start = {gate.start}, got {gate.end}")
    if "load" not in _options(recipe):
        model_config(recipe)
    return recipe


def _options(recipe: Recipe) -> dict[str, Any]:
    """The options of the model, if they go together; ``preset`` and ``load`` that are None are left out."""
    options = {name: x for name, x in recipe.model.items() if x is not None or name not in ("preset", "load")}
    check_known("model", options, MODEL)
    for name, value in options.items():
        convert(f"model.{name}", value, MODEL[name], NULL)
    for name in ("temperature", "gate_temperature"):
        if options.get(name) is not None:
            raise ValueError(f"model.{name} must be left out, as [gate] sets it, got {options[name]!r}")
    if "load" in options:
        others = ", ".join(f"model.{name}" for name in options if name != "load")
        if others:
            raise ValueError(f"model.load takes a model as it was saved, so leave out {others}")
    elif "preset" in options:
        check_known("model.preset", [options["preset"]], PRESETS)
    else:
        missing = [] if "layers" in options or "backbone" in options else ["backbone"]
        missing += [name for name in SHAPE if name not in options]
        if missing:
            shape = ", ".join(("backbone", *SHAPE))
            raise ValueError(f"model must have preset, load, or all of {shape}; it lacks {', '.join(missing)}")
    return options


def _saved(folder: str) -> DLAConfig:
    if not Path(folder).is_dir():
        raise ValueError(f"model.load must be the folder of a saved model, got {folder!r}")
    try:
        return find_config(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"model.load: {' '.join(str(error).split())}") from error
    except (AttributeError, TypeError, KeyError, RecursionError) as error:  # of transformers, where it meets other JSON
        raise ValueError(f"model.load: {folder}/config.json is no configuration: {type(error).__name__}") from error
