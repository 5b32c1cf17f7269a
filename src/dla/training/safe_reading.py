"""Checkpoints of somebody else are read here: as tensors and plain values, without running anything in them.

torch's own way reads ``.metadata`` and every entry that is no tensor with pickle, which calls whatever the file says.
Here ``.metadata`` is data (checkpoint_metadata.py), and every entry is read by torch.load with ``weights_only``. DCP
still plans who reads what, so that any number of ranks can load.
"""

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from dla.report import shown
from dla.training.checkpoint_metadata import read_metadata
from dla.training.record import Record, RefusedError, reason
from dla.typed import BadValueError


def load(folder: Path, record: Record, state: dict[str, Any], group: dist.ProcessGroup | None, alone: bool) -> None:
    """Fill ``state`` with what a checkpoint has of it; all ranks of ``group`` together, or this process ``alone``.

    Raises:
        RefusedError: the checkpoint does not have it, or holds what it should not. Every rank raises it.
    """
    reader = DataReader(folder, read_metadata(folder, record))
    try:
        dcp.load(state, storage_reader=reader, planner=DataPlanner(), process_group=group, no_dist=alone)
    except CheckpointException as error:
        if any(isinstance(failure[0], KeyboardInterrupt) for failure in error.failures.values()):
            raise KeyboardInterrupt from error
        raise RefusedError(f"{folder} is refused: {reason(error)}") from error


class DataReader(FileSystemReader):
    """DCP's reader of files, but for the two parts of it that read: by what was checked, and only tensors."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.folder, self.metadata = folder, metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs, in the order of the files."""
        places = self.metadata.storage_data
        for item in sorted(plan.items, key=lambda item: places[item.storage_index]):
            place = places[item.storage_index]
            with (self.folder / place.file).open("rb") as file:
                file.seek(place.offset)
                data = io.BytesIO(file.read(place.length))
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, data)
            else:
                self._read_tensor(item, data, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensor(self, item: ReadItem, data: io.BytesIO, planner: LoadPlanner) -> None:
        name, offsets = item.storage_index.fqn, item.storage_index.offset
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == offsets and chunk.sizes.numel())
        tensor = safe_load(name, data)
        if type(tensor) is not Tensor or tensor.size() != sizes or tensor.layout != torch.strided:
            found = f"one of {list(tensor.shape)}" if isinstance(tensor, Tensor) else shown(tensor)
            raise ValueError(f"the entry {name!r} must be a tensor of {list(sizes)}, got {found}")
        target = planner.resolve_tensor(item).detach()
        begins = zip(item.storage_offsets, item.lengths, strict=True)
        target.copy_(tensor[tuple(slice(begin, begin + length) for begin, length in begins)])
        planner.commit_tensor(item, target)


class DataPlanner(DefaultLoadPlanner):
    """Takes tensors for tensors, and for other values plain ones of the same type."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        for item in plan.items:
            name = item.dest_index.fqn
            if item.type == LoadItemType.BYTE_IO and isinstance(self.state_dict[name], Tensor):
                raise ValueError(f"the entry {name!r} must be a tensor, got bytes")
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded, before = safe_load(name, value), self.state_dict[name]
        if not _alike(loaded, before):
            raise BadValueError(f"the entry {name!r}", f"a value such as {shown(before)}", loaded)
        *above, last = self.mappings[name]
        target: Any = self.original_state_dict
        for key in above:
            target = target[key]
        target[last] = loaded


def safe_load(name: str, data: io.BytesIO) -> Any:
    """What torch.save wrote, if it is tensors and plain values."""
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever damaged bytes may lead to
        raise ValueError(f"the entry {name!r} holds no plain value or tensor ({type(error).__name__})") from None


def _alike(loaded: Any, before: object) -> bool:
    """Whether a plain value can stand where another did: numbers for numbers, and an option may be left to torch."""
    if isinstance(before, tuple | list):
        return type(loaded) is type(before) and len(loaded) == len(before) and all(map(_alike, loaded, before))
    if before is None or isinstance(before, bool):
        return loaded is None or isinstance(loaded, bool)
    if isinstance(before, int | float):
        return type(loaded) in (int, float)
    return isinstance(before, str) and isinstance(loaded, str)
