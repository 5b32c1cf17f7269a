"""The processes of a run: one alone, or those that torchrun started. The model knows nothing of them."""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from dla.training.recipe import Compute

PATIENCE = datetime.timedelta(hours=4)  # that ranks wait for each other: one of them may be turning text into tokens
CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    mesh: DeviceMesh | None = None  # over which the weights are sharded; None for a process alone
    saving: dist.ProcessGroup | None = None  # a group of their own for ranks that save while they train

    @property
    def main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def total(self, *numbers: float) -> list[float]:
        """Sums over all ranks."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums)
        result: list[float] = sums.tolist()
        return result

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def shard(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Split the weights over the ranks, block by block, so that a rank has one block's whole at a time."""
        if self.mesh is None:
            model.to(self.device)
            return
        for module in (*blocks, model):  # each goes to the device as it is split
            fully_shard(module, mesh=self.mesh)


def find_device(wanted: str) -> torch.device:
    """This process's device; of several GPUs the one that torchrun gave it."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError('compute.device="cuda" needs a GPU, and torch sees none; use "cpu" or "auto"')
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def join(compute: Compute) -> World:
    """The world of this process: what torchrun's variables say, or alone."""
    device = find_device(compute.device)
    size = int(os.environ.get("WORLD_SIZE", 1))
    shard = compute.shard or max(1, size // compute.replicate)
    if shard * compute.replicate != size:
        raise ValueError(
            f"compute.shard={shard} times compute.replicate={compute.replicate} must be the number of ranks, {size}"
        )
    if size == 1:
        return World(device=device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    shape = (shard,) if compute.replicate == 1 else (compute.replicate, shard)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return World(dist.get_rank(), size, device, mesh, dist.new_group(backend="gloo", timeout=PATIENCE))


def leave(world: World) -> None:
    if world.size > 1:
        dist.destroy_process_group()
