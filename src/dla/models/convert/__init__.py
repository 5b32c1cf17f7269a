"""Checkpoints of others to ours and back, and single-state models to the same function with more memory.

Nothing is computed on the weights: every tensor keeps its bits and its dtype, and only names, the order of rows and the
configuration change. Checkpoints are only ever read as tensors; a pickle that asks for anything else is refused.

files.py reads and writes folders; translate.py turns one model into another, by formats.py (how others name and cut
their tensors) and configs.py (what their config.json says).
"""

import json
import shutil
from pathlib import Path
from typing import Any

from dla.models.card import write_card
from dla.models.config import DLAConfig
from dla.models.convert import files
from dla.models.convert.formats import FORMATS
from dla.models.convert.translate import check_upgrade, from_dla, our_config, to_dla, upgrade
from dla.names import check_choice
from dla.report.found import Found

__all__ = ["convert", "from_dla", "run", "to_dla", "upgrade"]


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
        memory: "log_linear", "dynamic", "paper" or "recommended" gives a model of one state a head such a memory. It
            computes the same until it is trained: all states have the weight 1, or with the routed reads of
            "recommended" 0.998 at least (see ``upgrade``).
        overrides: options of that memory, e.g. capacity=16.
    """
    to = to or "dla"
    check_choice("to", to, ("dla", *FORMATS))
    if to != "dla" and memory not in (None, "single"):
        raise ValueError(f'to="{to}" holds models of one state a head; memory="{memory}" needs to="dla"')
    check_upgrade(memory, overrides)
    folder, source = files.check_target(dst), files.locate(src)
    foreign = files.read_config(source)
    try:
        our_config(foreign)
    except ValueError as error:
        raise ValueError(f"{source / 'config.json'}: {error}") from error
    weights = files.read_tensors(source)
    try:
        config, tensors = to_dla(foreign, weights)
        if memory is not None:
            config, tensors = upgrade(config, tensors, memory, **overrides)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    if to == "dla":
        _write(source, folder, config, tensors, pickled=False)
        return config
    written, tensors = from_dla(config, tensors, to)
    _write(source, folder, written, tensors, pickled=FORMATS[to].pickled)
    return written


def run(src: str, dst: Path, *, to: str, memory: str | None) -> Found:
    """``convert`` for the command line."""
    convert(src, dst, to=to, memory=memory)
    sizes = [tensor.numel() for tensor in files.read_tensors(dst.expanduser()).values()]
    return Found(f"{dst}: {to} checkpoint, {len(sizes)} tensors, {sum(sizes) / 1e6:.1f}M numbers")


def _write(
    source: Path, folder: Path, config: DLAConfig | dict[str, Any], tensors: files.Tensors, pickled: bool
) -> None:
    """config.json comes last, so that what has one is whole."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        files.write_tensors(folder, tensors, pickled)
        files.copy_companions(source, folder)
        if isinstance(config, DLAConfig):
            write_card(folder, config)
            config.save_pretrained(folder)
        else:
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder)
        if not new:
            folder.mkdir()
        raise
