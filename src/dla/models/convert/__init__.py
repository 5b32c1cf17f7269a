"""Checkpoints of others to ours and back, and single-state models to the same function with more memory.

Nothing is computed on the weights: every tensor keeps its bits and its dtype, and only names, the order of rows and the
configuration change. Checkpoints are only ever read as tensors; a pickle that asks for anything else is refused.

files.py reads and writes folders; translate.py turns one model into another, by formats.py (how others name and cut
their tensors) and configs.py (what their config.json says).
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from dla.models.config import DLAConfig
from dla.models.convert.files import (
    Tensors,
    check_target,
    copy_companions,
    locate,
    read_config,
    read_tensors,
    write_json,
    write_tensors,
)
from dla.models.convert.formats import FORMATS
from dla.models.convert.translate import check_upgrade, from_dla, our_config, to_dla, upgrade
from dla.names import check_choice

__all__ = ["convert", "from_dla", "run", "to_dla", "upgrade"]

TARGETS = ("dla", *FORMATS)


def convert(
    src: str | Path, dst: str | Path, *, to: str | None = None, memory: str | None = None, **overrides: Any
) -> DLAConfig | dict[str, Any]:
    """Write the checkpoint ``src`` to the folder ``dst`` in another format, or with another memory; its configuration.

    Args:
        src: a folder with config.json and weights in safetensors or pytorch_model.bin (either may be sharded), by
            state-spaces (Mamba-2), transformers (Mamba-2), flash-linear-attention (Gated DeltaNet) or us; or the name
            of one on the Hugging Face hub.
        dst: a new or empty folder. Tokenizer files and generation_config.json are copied along.
        to: "dla" (also what None means), "transformers", "state-spaces" or "fla".
        memory: "log_linear" or "dynamic" gives a model of one state a head such a memory. It computes the same until it
            is trained: all states have the weight 1 (see ``upgrade``).
        overrides: options of that memory, e.g. capacity=16.
    """
    return _convert(src, dst, to, memory, overrides)[0]


def run(src: str, dst: Path, *, to: str | None, memory: str | None) -> int:
    """``convert`` for the command line; the exit code."""
    try:
        _, tensors = _convert(src, dst, to, memory, {})
    except (ValueError, OSError) as error:
        print(f"dla convert: {error}", file=sys.stderr)
        return 1
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"{dst}: {to or 'dla'} checkpoint, {len(tensors)} tensors, {count / 1e6:.1f}M numbers")
    return 0


def _convert(
    src: str | Path, dst: str | Path, to: str | None, memory: str | None, overrides: dict[str, Any]
) -> tuple[DLAConfig | dict[str, Any], Tensors]:
    target = "dla" if to is None else to
    check_choice("to", target, TARGETS)
    if target != "dla" and memory not in (None, "single"):
        raise ValueError(f'to="{target}" holds models of one state a head; memory="{memory}" needs to="dla"')
    check_upgrade(memory, overrides)
    folder = check_target(dst)
    source = locate(src)
    foreign = read_config(source)
    try:
        our_config(foreign)
    except ValueError as error:
        raise ValueError(f"{source / 'config.json'}: {error}") from error
    weights = read_tensors(source)
    try:
        config, tensors = to_dla(foreign, weights)
        if memory is not None:
            config, tensors = upgrade(config, tensors, memory, **overrides)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    if target == "dla":
        _write(source, folder, config, tensors, pickled=False)
        return config, tensors
    written, tensors = from_dla(config, tensors, target)
    _write(source, folder, written, tensors, pickled=FORMATS[target].pickled)
    return written, tensors


def _write(source: Path, folder: Path, config: DLAConfig | dict[str, Any], tensors: Tensors, pickled: bool) -> None:
    """config.json comes last, so that what has one is whole."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_tensors(folder, tensors, pickled)
        copy_companions(source, folder)
        if isinstance(config, DLAConfig):
            config.save_pretrained(folder)
        else:
            write_json(folder / "config.json", config)
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        if new:
            shutil.rmtree(folder)
        raise
