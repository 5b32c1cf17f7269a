"""Checkpoint folders: config.json, weights in safetensors or pickled tensors, and the tokenizer's files."""

import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dla.files import read_object
from dla.text import first_line

Tensors = dict[str, Tensor]

SHARD_BYTES = 5_000_000_000
COMPANIONS = (
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*.model",
)


def locate(source: str | Path) -> Path:
    """The folder of a checkpoint: a local one, or the Hugging Face hub's copy of "organisation/name"."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"src must be a checkpoint folder, got the file {folder}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise ValueError(
            f'src must be a checkpoint folder or the name of one on the Hugging Face hub ("organisation/name"); '
            f"there is no folder {folder}"
        )
    return _download(str(source))


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=["config.json", "model*.safetensors*", *COMPANIONS]))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=["config.json", "pytorch_model*.bin*", *COMPANIONS]))
    except Exception as error:  # of the network, the hub or the disk, each with errors of its own
        raise ValueError(
            f"src: there is no folder {name!r}, and it could not be fetched from the Hugging Face hub either "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    return folder


def check_target(target: str | Path) -> Path:
    """Refuse a folder that holds anything."""
    folder = Path(target).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"dst must be a new or an empty folder, got the file {folder}")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"dst must be a new or an empty folder, and {folder} is not empty")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands, with infinities in either of their spellings as numbers."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a checkpoint folder: it has no config.json")
    return read_object(folder / "config.json", _decode_float)


def _decode_float(content: dict[str, Any]) -> Any:
    """transformers writes infinity as {"__float__": "Infinity"}."""
    if content.keys() == {"__float__"}:
        return float(content["__float__"])
    return content


def read_tensors(folder: Path) -> Tensors:
    """All tensors of the weight files, mapped from them rather than read where the file allows it."""
    kinds: tuple[tuple[str, Callable[[Path], Tensors]], ...] = (
        ("model.safetensors", _load_safetensors),
        ("pytorch_model.bin", _load_pickle),
    )
    for name, load in kinds:
        if (folder / name).is_file():
            return load(folder / name)
        if (folder / f"{name}.index.json").is_file():
            return _load_shards(folder / f"{name}.index.json", load)
    names = " or ".join(f"{name}[.index.json]" for name, _ in kinds)
    raise ValueError(f"{folder} has no weights: {names} is needed")


def _load_shards(index: Path, load: Callable[[Path], Tensors]) -> Tensors:
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(_is_file_name(place) for place in places.values()):
        raise ValueError(f"{index} must have a weight_map from tensor names to files beside it")
    tensors: Tensors = {}
    for place in sorted(set(places.values())):
        if not (index.parent / place).is_file():
            raise ValueError(f"{index.parent / place} is missing")
        shard = load(index.parent / place)
        for name in shard:
            if places.get(name) != place:
                raise ValueError(f"{index.parent / place} holds {name}, which {index.name} does not expect there")
        tensors |= shard
    for name, place in places.items():
        if name not in tensors:
            raise ValueError(f"{index.parent / place} lacks {name}, which {index.name} expects there")
    return tensors


def _is_file_name(place: object) -> bool:
    return isinstance(place, str) and place not in ("", ".", "..") and Path(place).name == place


def _load_safetensors(path: Path) -> Tensors:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {first_line(error)}") from error


def _load_pickle(path: Path) -> Tensors:
    """Tensors alone: torch's restricted unpickler refuses a file that asks for anything else, and runs none of it."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is damaged or holds more than tensors, which would run code of its author; it was not loaded"
        ) from error
    except Exception as error:  # a damaged pickle fails in as many ways as there are bytes
        raise ValueError(f"{path} is not a whole file of tensors: {first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} must hold a dictionary of tensors by name, got {type(content).__name__}")
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"{path}: {name} must be a dense tensor")
    return {name: tensor.detach() for name, tensor in content.items()}


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], pickled: bool = False) -> None:
    """model.safetensors, or several files and their index where one would be larger than ``SHARD_BYTES``.

    pickled: pytorch_model.bin, one file of any size, in which a tensor under two names is written once.
    """
    from huggingface_hub import save_torch_state_dict

    own: dict[int, Tensor] = {}  # views are copied out of their storage, which would be written whole
    for tensor in tensors.values():
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        own.setdefault(id(tensor), tensor if whole else tensor.contiguous().clone())
    written = {name: own[id(tensor)] for name, tensor in tensors.items()}
    if pickled:
        torch.save(written, folder / "pytorch_model.bin")
    else:
        save_torch_state_dict(written, folder, max_shard_size=SHARD_BYTES, metadata={"format": "pt"})


def copy_companions(source: Path, target: Path) -> None:
    """The tokenizer's files and the generation settings."""
    for path in sorted({path for pattern in COMPANIONS for path in source.glob(pattern)}):
        if path.is_file():
            shutil.copyfile(path, target / path.name)
