"""What the memories of a model are given and decide while it runs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dla.layers.call import Call
from dla.layers.memory import DynamicMemory, Operands
from dla.ops import Segmentation


@contextmanager
def watch(
    model: nn.Module, look: Callable[[Any, Tensor, Operands, Call], None], kind: type[nn.Module] = DynamicMemory
) -> Iterator[None]:
    """Calls ``look`` before every memory of a kind runs: with its input, what its mixer made of that, and the call."""

    def before(memory: Any, args: tuple[Any, ...]) -> None:
        with torch.no_grad():
            look(memory, *args[:3])

    with ExitStack() as hooks:
        for memory in model.modules():
            if isinstance(memory, kind):
                hooks.enter_context(memory.register_forward_pre_hook(before))
        yield


@contextmanager
def observe(model: nn.Module) -> Iterator[list[Segmentation]]:
    """Collects the segmentation of every dynamic layer, call by call in the order in which they run.

    Each is computed once more beside the layer, from the sequence's start: for calls without a cache.
    """
    seen: list[Segmentation] = []
    with watch(model, lambda memory, x, made, call: seen.append(memory.decide(made, call.packing.cu_seqlens))):
        yield seen
