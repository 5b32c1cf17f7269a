"""The one way to a model that is ready to use: the folder of a saved one, or a preset with random weights."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from dla import choices
from dla.files import read_object
from dla.machine import ensure_half_precision
from dla.models.causal_lm import DLAForCausalLM
from dla.models.config import DLAConfig, EndTokens
from dla.models.presets import PRESETS, preset
from dla.models.shipped import located, shipped
from dla.names import did_you_mean
from dla.text import first_line
from dla.typed import convert

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in choices.DTYPES}


def is_preset(name: str) -> bool:
    """Whether a model's name is no folder, so that its weights are random."""
    return not Path(located(name)).is_dir()


def find_config(name: str, memory: str | None = None) -> DLAConfig:
    """The configuration of a saved model's folder, or of a preset.

    Args:
        name: the folder, the preset, or the name of a model that comes with the package.
        memory: of the preset (None: "single"); a saved model has its own and takes None or that one.
    """
    if is_preset(name):
        if Path(name).exists():
            raise ValueError(f"{name} is not a folder")
        if name not in PRESETS:
            raise ValueError(f"no such folder or preset: {name}{did_you_mean(name, [*PRESETS, *shipped()])}")
        return preset(name, memory or "single")
    name = located(name)
    file = Path(name) / "config.json"
    if not file.is_file():
        raise ValueError(f"{name} has no config.json, so it is not a saved model")
    kind = read_object(file).get("model_type")
    if kind != DLAConfig.model_type:
        raise ValueError(
            f"{name} holds a model of type {kind!r}, not {DLAConfig.model_type!r}; `dla convert` reads others"
        )
    config = DLAConfig.from_pretrained(name)
    if memory is not None and memory != config.memory:
        raise ValueError(f'{name} was made with memory="{config.memory}", which memory="{memory}" cannot change')
    return config


def load_model(
    name: str,
    *,
    memory: str | None = None,
    dtype: str | None = "float32",
    device: str | None = None,
    tau: float | None = None,
    capacity: int | None = None,
    state_dtype: str | None = None,
) -> DLAForCausalLM:
    """A model to use, in eval mode. What is wrong with its name or its files is a ValueError or OSError of one line.

    Args:
        name, memory: as for ``find_config``. The random weights of a preset are the same every time.
        dtype: one of ``DTYPES``; None: the one it was saved in.
        device: None: the GPU if there is one.
        tau, capacity, state_dtype: of its dynamic memory (``set_memory``); None: its own.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    config = find_config(name, memory)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's, for what is no device, or none here
        raise ValueError(f"device {device!r} cannot be used: {first_line(error)}") from error
    chosen = None if dtype is None else DTYPES[dtype]
    if chosen is not None and torch.device(device).type == "cpu":
        ensure_half_precision(chosen)
    model = _random(config, chosen) if is_preset(name) else _saved(located(name), chosen)
    if (tau, capacity, state_dtype) != (None, None, None):
        model.set_memory(tau=tau, capacity=capacity, state_dtype=state_dtype)
    return model.to(device).eval()


def _random(config: DLAConfig, dtype: torch.dtype | None) -> DLAForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a saved context is of use with the same weights only
        return DLAForCausalLM(config).to(dtype)


def _saved(folder: str, dtype: torch.dtype | None) -> DLAForCausalLM:
    try:
        with _progress_for_people():
            model: DLAForCausalLM = DLAForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    except Exception as error:  # transformers trusts the files beside the weights, and fails on them in many ways
        if isinstance(error, ValueError | OSError) and folder in str(error):
            raise
        reason = "the weights have other shapes than config.json says"
        if "ignore_mismatched_sizes" not in str(error):
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{folder} cannot be loaded: {reason}") from error
    settings = Path(folder) / "generation_config.json"
    convert(f"{settings}: eos_token_id", model.generation_config.eos_token_id, EndTokens)
    return model


@contextmanager
def _progress_for_people() -> Iterator[None]:
    """Without the progress bars of transformers, unless somebody is looking."""
    enabled = transformers_logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
