"""What a checkpoint holds and where: ``.metadata``, which DCP writes as a pickle, read as data and checked.

Only DCP's own descriptions may be in it, and every entry must lie within the files that the checkpoint's record lists.
"""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dla.report import shown
from dla.training.pickle_data import Made, Named, parse
from dla.training.record import Record, RefusedError, reason
from dla.typed import BadValueError, Limit, Natural, convert

METADATA = ".metadata"
OF_DCP = "torch.distributed.checkpoint."
CLASSES = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")
KNOWN = {
    OF_DCP + "metadata": (*CLASSES, "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    OF_DCP + "filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),  # and its types of numbers
    # where the checkpoint was written, which is not read; the module's name depends on the version of Python
    **dict.fromkeys(("pathlib", "pathlib._local"), ("PosixPath", "WindowsPath")),
}
Extent = Annotated[Natural, Limit("a size that a tensor can have", lambda x: x < 2**62)]


class Place(NamedTuple):
    """Where an entry, or a piece of a tensor, lies."""

    file: str
    offset: int
    length: int


def read_metadata(folder: Path, record: Record) -> Metadata:
    """What a checkpoint holds, as DCP knows it; ``storage_data`` has the ``Place`` of every entry or piece.

    Raises:
        RefusedError: ``.metadata`` is not what DCP writes for a run.
    """
    files = {file: about["bytes"] for file, about in record["files"].items()}
    try:
        if METADATA not in files:
            raise ValueError("it is not among the files of the record")
        return _metadata(parse((folder / METADATA).read_bytes(), _is_known), files)
    except (ValueError, OSError) as error:
        raise RefusedError(f"{folder} is refused: {METADATA}: {reason(error)}") from error


def _is_known(named: Named) -> bool:
    dtype = named.module == "torch" and isinstance(vars(torch).get(named.name), torch.dtype)
    return dtype or named.name in KNOWN.get(named.module, ())


def _metadata(content: object, files: dict[str, int]) -> Metadata:
    top = _state("it", content, "Metadata", "state_dict_metadata", "storage_data")
    places: dict[MetadataIndex, Place] = {}
    for key, info in _dict("storage_data", top["storage_data"]).items():
        index = _state("a key of storage_data", key, "MetadataIndex", "fqn")
        name = convert("fqn of a key of storage_data", index["fqn"], str)
        where, begin = f"storage_data of {shown(name)}", index.get("offset")
        piece = None if begin is None else _size(f"the piece of {where}", begin)
        places[MetadataIndex(name, piece)] = _place(where, info, files)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in _dict("state_dict_metadata", top["state_dict_metadata"]).items():
        where = f"the entry {shown(name)}"
        entries[convert("the name of an entry", name, str)] = found = _entry(where, entry)
        pieces: list[torch.Size | None] = [None]
        if isinstance(found, TensorStorageMetadata):
            pieces = [chunk.offsets for chunk in found.chunks if chunk.sizes.numel()]
        if any(MetadataIndex(name, piece) not in places for piece in pieces):
            raise ValueError(f"{where} has no place in storage_data")
    return Metadata(entries, storage_data=places)


def _entry(where: str, value: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, Made) and value.what.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(where, value, "TensorStorageMetadata", "properties", "size", "chunks")
    size = _size(f"size of {where}", state["size"])
    if not isinstance(state["chunks"], list):
        raise BadValueError(f"chunks of {where}", "a list", state["chunks"])
    chunks = []
    for i, chunk in enumerate(state["chunks"]):
        part = _state(f"chunks[{i}] of {where}", chunk, "ChunkStorageMetadata", "offsets", "sizes")
        sizes = [_size(f"{name} of chunks[{i}] of {where}", part[name]) for name in ("offsets", "sizes")]
        chunks.append(ChunkStorageMetadata(*sizes))
    _check_chunks(where, size, chunks)
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(where, state["properties"])), size, chunks)


def _check_chunks(where: str, size: torch.Size, chunks: list[ChunkStorageMetadata]) -> None:
    """Refuse pieces that are not the whole tensor, which would leave some of it as it was in memory.

    The ranks split tensors along the first dimension; a rank may have nothing of a small one.
    """
    end = 0  # along the first dimension; a number is a tensor of one row without columns
    for chunk in sorted(chunks, key=lambda chunk: (*chunk.offsets[:1], *chunk.sizes[:1])):
        if chunk.sizes.numel() == 0:
            continue
        fits = len(chunk.offsets) == len(chunk.sizes) == len(size) and chunk.sizes[1:] == size[1:]
        if not fits or any(chunk.offsets[1:]) or (*chunk.offsets, end)[0] != end:
            break
        end += (*chunk.sizes, 1)[0]
    else:
        if end == ((*size, 1)[0] if size.numel() else 0):
            return
    raise ValueError(f"the pieces of {where} are not all of its {list(size)}")


def _dtype(where: str, value: object) -> torch.dtype:
    """Of a tensor's properties; the others describe no tensor that is saved here."""
    made = isinstance(value, Made) and value.what.name == "TensorProperties"
    named = value.state[0] if made and isinstance(value.state, tuple) and value.state else None  # type: ignore[attr-defined]
    found = vars(torch).get(named.name) if isinstance(named, Named) else None
    if not isinstance(found, torch.dtype):
        raise BadValueError(f"properties of {where}", "those of a tensor, its dtype the first of them", value)
    return found


def _place(where: str, value: object, files: dict[str, int]) -> Place:
    state = _state(where, value, "_StorageInfo", "relative_path", "offset", "length")
    file, offset, length = state["relative_path"], state["offset"], state["length"]
    if not isinstance(file, str) or file not in files:
        raise BadValueError(f"{where}: relative_path", "a file of the record", file)
    convert(f"{where}: offset", offset, Natural)
    convert(f"{where}: length", length, Natural)
    if offset + length > files[file]:
        raise ValueError(f"{where}: it ends at byte {offset + length} of {file}, which has {files[file]}")
    if state.get("transform_descriptors"):
        raise BadValueError(f"{where}: transform_descriptors", "none", state["transform_descriptors"])
    return Place(file, offset, length)


def _state(where: str, value: object, kind: str, *fields: str) -> dict[Any, Any]:
    """The attributes of an object of one of DCP's classes, ``fields`` among them."""
    state = value.state if isinstance(value, Made) and value.what.name == kind else None
    if not isinstance(state, dict):
        raise BadValueError(where, f"an object {kind}", value)
    for field in fields:
        if field not in state:
            raise ValueError(f"{field} of {where} is missing")
    return state


def _dict(where: str, value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise BadValueError(where, "a dictionary", value)
    return value


def _size(where: str, value: object) -> torch.Size:
    arguments = value.arguments if isinstance(value, Made) and value.what == ("torch", "Size") else None
    if not isinstance(arguments, tuple) or len(arguments) != 1 or not isinstance(arguments[0], tuple):
        raise BadValueError(where, "a torch.Size", value)
    return torch.Size([convert(where, number, Extent) for number in arguments[0]])
