"""A checkpoint of a run as a model for `from_pretrained`."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from dla.models import DLAConfig, DLAForCausalLM
from dla.report.found import Found
from dla.training.checkpoint import load_weights
from dla.training.data.encoding import end_token, find_tokenizer
from dla.training.describe import describe
from dla.training.recipe.read import model_config, read_recipe
from dla.training.record import CorruptError, check, name, steps_in


def export(
    run: Path,
    out: Path | None = None,
    step: int | None = None,
    *,
    dtype: str | None = None,
    license: str | None = None,
) -> Path:
    """Save the model of a checkpoint, with its tokenizer and its card; it stops where documents end.

    Args:
        out: the folder for it; None: run/model.
        step: of the checkpoint; None: the newest whole one.
        dtype: of the weights, one of ``choices.DTYPES``; None: as they were trained.
        license: for the card, by the hub's name for it, such as "apache-2.0"; None: not known.

    Raises:
        ValueError: there is no such run or checkpoint, or it cannot be read.
    """
    if not (run / "recipe.toml").is_file():
        raise ValueError(f"{run} is not the folder of a run: it has no recipe.toml")
    recipe = read_recipe(run / "recipe.toml")
    step = _find(run / "checkpoints", step)
    config: DLAConfig = model_config(recipe)
    with torch.device("meta"):
        model = DLAForCausalLM(config)
    model = model.to(torch.float64 if recipe.compute.dtype == "float64" else torch.float32)
    model.to_empty(device="cpu")
    model.tie_weights()
    load_weights(run / "checkpoints" / name(step), model)
    tokenizer = find_tokenizer(recipe.data.tokenizer, config.vocab_size)
    if config.eos_token_id is None:
        config.eos_token_id = model.generation_config.eos_token_id = end_token(tokenizer)
    out = out or run / "model"
    disable_progress_bar()
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    model.save_pretrained(out, training=describe(run, recipe, step, dynamic=config.dynamic), license=license)
    tokenizer.save_pretrained(out)
    return out


def run(folder: Path, **options: Any) -> Found:
    """`dla train export`: where the model is."""
    return Found(str(export(folder, **options)))


def _find(checkpoints: Path, step: int | None) -> int:
    """The step of a checkpoint that is whole."""
    steps = steps_in(checkpoints)
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        raise ValueError(f"{checkpoints} has no checkpoint of step {step}; there are those of {there or 'none'}")
    for found in reversed(steps if step is None else [step]):
        try:
            check(checkpoints / name(found))
            return found
        except CorruptError as error:
            if step is not None:
                raise
            print(f"{error}; trying the one before", file=sys.stderr)
    raise ValueError(f"{checkpoints} has no whole checkpoint")
