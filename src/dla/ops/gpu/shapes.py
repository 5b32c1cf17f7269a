"""The paper's shapes, and all that their layers launch, found on tensors without numbers."""

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from dla.ops.decide.decided import Decided, Seen
from dla.ops.gpu.launch import Launch, launches
from dla.ops.problem import OPERANDS, Layout, MemoryKind, Problem
from dla.ops.rules import Rules
from dla.ops.segmentation import Segmentation
from dla.ops.state import DynamicState, LinearState, LogLinearState, State
from dla.ops.state.slots import Slots

MEMORIES: tuple[MemoryKind, ...] = get_args(MemoryKind)


@dataclass(frozen=True)
class LayerShape:
    """One layer of a model, on one sequence."""

    name: str
    heads: int
    key_heads: int
    dk: int
    dv: int
    beta: bool  # delta steps
    length: int = 16384
    capacity: int = 30
    dtype: torch.dtype = torch.bfloat16


PAPER = (
    LayerShape("Mamba-2 780M", heads=48, key_heads=1, dk=128, dv=64, beta=False),
    LayerShape("Gated DeltaNet 1.3B", heads=6, key_heads=6, dk=256, dv=512, beta=True),
)


@dataclass(frozen=True)
class Launched:
    """A launch, and of what."""

    shape: str
    memory: str
    stage: str
    launch: Launch


# Routed reads and the soft gate are the dynamic memory's
KINDS: tuple[tuple[str, MemoryKind, bool, bool], ...] = (
    *((memory, memory, False, False) for memory in MEMORIES),
    ("dynamic, routed", "dynamic", True, False),
    ("dynamic, soft gate", "dynamic", False, True),
)


def launched(shape: LayerShape) -> Iterator[Launched]:
    """Every launch of a prefill, its gradients and a decoding step, for each memory, routed reads and the soft gate."""
    for name, memory, routed, soft in KINDS:
        for stage, seen in stages(shape, memory, routed, soft):
            for each in seen:
                yield Launched(shape.name, name, stage, each)


def stages(shape: LayerShape, memory: MemoryKind, routed: bool, soft: bool) -> Iterator[tuple[str, list[Launch]]]:
    """The launches of every stage that there is, and that can run this."""
    prefill = replace(problem(shape, memory, shape.length, None, routed), temperature=0.1 if soft else None)
    decided: Any = None
    if memory == "dynamic" and (decide := able("decide", prefill)):
        with launches() as seen:
            decided = decide.decide(prefill)
        yield "decide", seen
    elif memory == "dynamic":
        decided = by_others(prefill)
    training = replace(prefill, wants_state=False, **leaves(prefill))
    if attend := able("attend", prefill):
        with launches() as seen:
            try:
                attend.attend(replace(prefill, wants_state=not soft), decided)
            except NotImplementedError:  # how large a final state is may depend on numbers
                seen.clear()
                attend.attend(replace(prefill, wants_state=False), decided)
        yield "attend", seen
        yield "gradients", gradients(training, attend, decided)
    step = problem(shape, memory, 1, empty_state(shape, memory, routed), routed)
    if not soft and (decode := able("decode", step)):
        with launches() as seen:
            decode.decode(step)
        yield "decode", seen


def leaves(prefill: Problem) -> dict[str, Any]:
    """The operands of a problem, with gradients."""
    return {name: x.detach().requires_grad_() for name, x in zip(OPERANDS, prefill.operands(), strict=True)
            if x is not None}  # fmt: skip


def gradients(training: Problem, attend: Any, decided: Any) -> list[Launch]:
    """What is launched behind the outputs for the gradients of all inputs."""
    inputs = [x for x in training.operands() if x is not None and x.requires_grad]
    with launches() as seen:
        o, _ = attend.attend(training, decided)
        forward = len(seen)
        torch.autograd.grad(o, inputs, torch.empty_like(o), allow_unused=True)
    return seen[forward:]


def by_others(prefill: Problem) -> Any:
    """Decisions as those would have made them who can, without numbers."""
    layout, v = prefill.layout, prefill.v
    death = torch.empty(layout.batch, layout.time, v.shape[2], dtype=torch.int32, device="meta")
    k, v = (layout.flat(x).float() for x in (prefill.k, v))
    return Decided(Segmentation(death.float(), death.bool(), death), Seen.empty(k, v) if prefill.soft else None)


def able(stage: str, asked: Problem) -> Any:
    """The module of a stage in Triton, if there is one and it can run this."""
    name = f"dla.ops.gpu.{stage}"
    module = None if importlib.util.find_spec(name) is None else importlib.import_module(name)
    return module if module is not None and module.unable(asked) is None else None


def problem(shape: LayerShape, memory: MemoryKind, length: int, state: State | None, routed: bool) -> Problem:
    """A call of one sequence, on tensors without numbers."""

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(1, length, *sizes, dtype=dtype, device="meta")

    levels = (shape.length - 1).bit_length() + 1
    lam = {"single": None, "log_linear": empty(shape.heads, levels), "dynamic": empty(shape.heads, shape.capacity)}
    return Problem(
        memory=memory,
        layout=Layout.of(1, length, None),
        q=empty(shape.key_heads, shape.dk, dtype=shape.dtype),
        k=empty(shape.key_heads, shape.dk, dtype=shape.dtype),
        v=empty(shape.heads, shape.dv, dtype=shape.dtype),
        lam=lam[memory],
        g=empty(shape.heads),
        beta=empty(shape.heads) if shape.beta else None,
        route=empty(shape.heads) if routed and memory == "dynamic" else None,
        scale=shape.dk**-0.5,
        state=state,
        wants_state=True,
        inplace=state is not None,
        rules=Rules(capacity=shape.capacity),
    )


def empty_state(shape: LayerShape, memory: MemoryKind, routed: bool) -> State:
    """A state to decode on, without numbers."""
    sizes = 1, shape.heads, shape.dk, shape.dv
    if memory == "single":
        return LinearState.empty(sizes, torch.float32, "meta")
    if memory == "log_linear":
        return LogLinearState.empty(sizes, torch.float32, "meta", shape.length)
    return DynamicState(Slots.empty(sizes, shape.capacity, routed, torch.float32, "meta"), shape.capacity)
