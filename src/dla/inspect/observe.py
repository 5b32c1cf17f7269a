"""What the dynamic memories of a model decide while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dla.layers.memory import DynamicMemory
from dla.ops import Segmentation


@contextmanager
def observe(model: nn.Module) -> Iterator[list[Segmentation]]:
    """Collects the segmentation of every dynamic layer, call by call in the order in which they run.

    Each is computed once more beside the layer, from the sequence's start: for calls without a cache.
    """
    seen: list[Segmentation] = []

    def look(memory: nn.Module, args: tuple[Any, ...]) -> None:
        _, made, packing = args[:3]
        assert isinstance(memory, DynamicMemory)
        with torch.no_grad():
            seen.append(memory.decide(made, packing.cu_seqlens))

    hooks = [m.register_forward_pre_hook(look) for m in model.modules() if isinstance(m, DynamicMemory)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
