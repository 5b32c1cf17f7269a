"""Refusals: every bad argument raises a ValueError that names it, what came and what is accepted, before any work."""

import math
import os
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dla.names import check_choice
from dla.ops.problem import Problem, compute_dtype
from dla.ops.rules import MERGES, SCORES, Rules
from dla.ops.segmentation import ALIVE, Segmentation
from dla.ops.state import DynamicState, State
from dla.ops.state.pools import STORED


def check_operands(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    lam: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    route: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Shapes, dtypes, devices and, where that costs no sync, values."""
    for name, needed in (("k", k), ("v", v)):
        check_tensor(name, needed)
        if needed.dim() != 4:
            raise ValueError(f"{name} must be [batch, time, heads, dim], got shape {list(needed.shape)}")
    B, T, Hk, dk = k.shape
    H = v.shape[2]
    if v.shape[:2] != (B, T):
        raise ValueError(f"v must be [{B}, {T}, heads, dv] to go with k {list(k.shape)}, got {list(v.shape)}")
    if 0 in (Hk, dk, H, v.shape[3]):
        raise ValueError(f"k and v need at least one head and one channel, got {list(k.shape)} and {list(v.shape)}")
    if H % Hk:
        raise ValueError(f"k has {Hk} key heads, which must divide the {H} heads of v")
    heads = (B, T, H)
    shapes: dict[str, list[Any]] = {"q": [(B, T, Hk, dk)], "g": [heads], "beta": [heads], "route": [(H,), heads]}
    for name, x in {"q": q, "v": v, "lam": lam, "g": g, "beta": beta, "route": route}.items():
        if x is None:
            continue
        check_tensor(name, x)
        if name == "lam" and (x.dim() != 4 or x.shape[:3] != (B, T, H) or x.shape[3] == 0):
            raise ValueError(f"lam must be [{B}, {T}, {H}, slots >= 1], got {list(x.shape)}")
        if name in shapes and x.shape not in shapes[name]:
            wanted = " or ".join(str([*shape]) for shape in shapes[name])
            raise ValueError(f"{name} must be {wanted} to go with k and v, got {list(x.shape)}")
        accepted = {k.dtype} if name in ("q", "v") else {k.dtype, torch.float32}
        if x.dtype not in accepted:
            raise ValueError(f"{name} must be {' or '.join(sorted(map(str, accepted)))} to go with k, got {x.dtype}")
        if x.device != k.device:
            raise ValueError(f"{name} must be on {k.device} like k, got {x.device}")
    check_cu_seqlens(cu_seqlens, B, T)
    if g is not None and values_are_cheap(g) and _any_positive(g):
        raise ValueError(f"g is a log-decay and must be <= 0, got values up to {g.max().item():.3g}")


def _any_positive(x: Tensor) -> bool:
    """On CPUs by numpy: torch's threads would go on spinning for a while, and take time from the kernels'."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return bool((x.detach().numpy() > 0).any())
    return bool((x > 0).any())


def check_tensor(name: str, x: object) -> None:
    """Refuse what is not a floating-point tensor."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a floating-point tensor, got {got}")


def values_are_cheap(x: Tensor) -> bool:
    """Whether the values of x may be looked at: never while compiling, on GPUs only when debugging."""
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return False
    if x.device.type == "cpu":
        return x.dim() < 2 or x.shape[1] > 1  # a decoding step must stay fast
    return os.environ.get("DLA_DEBUG") == "1"


def check_cu_seqlens(cu_seqlens: Tensor | None, batch: int, time: int) -> None:
    """Ends of packed sequences: [0, ..., time], never decreasing."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens must be an int32 or int64 tensor, got {got}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens must be one-dimensional with at least one entry, got {list(cu_seqlens.shape)}")
    if batch != 1:
        raise ValueError(f"cu_seqlens packs sequences in a batch of one, got a batch of {batch}")
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != time or any(a > b for a, b in pairwise(ends)):
        shown = ends if len(ends) <= 8 else f"{ends[:4]} … {ends[-4:]}"
        raise ValueError(f"cu_seqlens must start at 0, never decrease and end at {time} (the time of k), got {shown}")


def check_rules(rules: Rules) -> None:
    """Numbers and names that a dynamic memory can decide by."""
    if not isinstance(rules.tau, int | float) or not (math.isfinite(rules.tau) and rules.tau >= 0):
        raise ValueError(f"tau must be a finite number >= 0, got {rules.tau!r}")
    if rules.capacity is not None and (type(rules.capacity) is not int or rules.capacity < 2):
        raise ValueError(f"capacity must be an integer >= 2 or None (never merge), got {rules.capacity!r}")
    check_choice("merge", rules.merge, MERGES)
    check_choice("score", rules.score, SCORES)
    if rules.block is not None and (type(rules.block) is not int or rules.block < 1):
        raise ValueError(f"block must be an integer >= 1 or None (boundaries by score), got {rules.block!r}")


def check_scale(scale: float | None) -> None:
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or None (dk ** -0.5), got {scale!r}")


def check_temperature(temperature: float | None, carries_state: bool) -> None:
    if temperature is None:
        return
    if not (isinstance(temperature, int | float) and math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a finite number > 0 or None (the hard gate), got {temperature!r}")
    if carries_state:
        raise ValueError(
            f"temperature={temperature} is the soft gate of training, whose states cannot be carried: "
            "call without initial_state, output_final_state and inplace, or with temperature=None"
        )


def check_inplace(inplace: bool, state: State | None) -> None:
    if inplace and state is None:
        raise ValueError("inplace=True updates initial_state, which is None")


def check_state(state: State | None, kind: type[State], k: Tensor, v: Tensor, sequences: int) -> None:
    """An initial state of the right kind, shape, dtype and device."""
    if state is None:
        return
    if not isinstance(state, kind):
        raise ValueError(f"initial_state must be a {kind.__name__} or None, got {type(state).__name__}")
    H, dk, dv = v.shape[2], k.shape[3], v.shape[3]
    found = state.shape
    if found != (sequences, H, dk, dv):
        raise ValueError(
            f"initial_state must be of {sequences} sequences, {H} heads and {dk} x {dv} matrices, "
            f"got {found[0]} sequences, {found[1]} heads and {found[2]} x {found[3]}"
        )
    if state.dtype != compute_dtype(k.dtype):
        raise ValueError(f"initial_state must be {compute_dtype(k.dtype)} for inputs of {k.dtype}, got {state.dtype}")
    if state.device != k.device:
        raise ValueError(f"initial_state must be on {k.device} like k, got {state.device}")


def check_state_dtype(dtype: object, capacity: int | None, state: object) -> None:
    """What a dynamic memory's states may be held in."""
    if dtype is None:
        return
    if dtype not in STORED:
        kinds = ", ".join(map(str, STORED))
        raise ValueError(f"state_dtype must be one of {kinds} or None (as they are computed), got {dtype!r}")
    if capacity is None:
        raise ValueError(f"state_dtype={dtype} needs a capacity: without one, states are the tokens as they came")
    if isinstance(state, DynamicState) and state.state_dtype != dtype:
        raise ValueError(f"initial_state is held in {state.state_dtype}, which must stay so, got state_dtype={dtype}")


def check_dynamic_state(state: DynamicState | None, capacity: int | None, routed: bool | None) -> None:
    """An initial state with the settings of this call; ``routed=None`` accepts both."""
    if state is None:
        return
    if state.capacity != capacity:
        raise ValueError(f"initial_state was made with capacity={state.capacity}, which must match, got {capacity}")
    if routed is not None and state.routed != routed:
        kept = "with" if state.routed else "without"
        raise ValueError(f"initial_state was made {kept} routed reads (route), which must stay so in one sequence")


def check_segmentation(made: object, problem: Problem) -> None:
    """A given segmentation that fits the input, and whose decisions a memory could have made."""
    if not isinstance(made, Segmentation):
        raise ValueError(f"segmentation must be a Segmentation, got {type(made).__name__}")
    shape, device = problem.v.shape[:3], problem.device
    for name, kinds in (("score", None), ("boundary", [torch.bool]), ("death", [torch.int32])):
        x = getattr(made, name)
        if not isinstance(x, Tensor) or x.shape != shape:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"segmentation.{name} must be {list(shape)} to go with v, got {got}")
        if x.device != device:
            raise ValueError(f"segmentation.{name} must be on {device} like k, got {x.device}")
        if not (x.is_floating_point() if kinds is None else x.dtype in kinds):
            raise ValueError(f"segmentation.{name} must be {kinds or 'of floating point'}, got {x.dtype}")
    layout, size = problem.layout, None if problem.state is None else problem.state.size
    if made.lengths != (layout.lengths if layout.packed else None):
        raise ValueError("segmentation.lengths must be those of cu_seqlens, and None without it")
    if size is not None and (made.initial_death is None or made.initial_counts is None):
        raise ValueError("segmentation must have initial_counts and initial_death to go on from initial_state")
    if size is None and made.initial_death is not None and bool((made.initial_death >= 0).any()):
        raise ValueError("segmentation goes on from states, so that it needs their initial_state")
    if device.type == "cpu" or os.environ.get("DLA_DEBUG") == "1":
        _check_decisions(made, problem)


def _check_decisions(made: Segmentation, problem: Problem) -> None:
    capacity, death, T = problem.rules.capacity, made.death, problem.layout.time
    ends, step = (death >= 0) & (death < ALIVE), torch.arange(T, device=death.device)[:, None]
    fits = ((death >= 0) == made.boundary) & (~ends | ((death > step) & (death < T)))
    if bool(fits.all()) and made.initial_death is not None:
        same = problem.state is not None and (made.initial_death >= 0).sum(-1).equal(problem.state.size)
        fits = fits & same
    if bool(fits.all()):
        live, ending = made.live_states(), made.endings()
        fits = (live > 0) & ((ending == 0) | ((ending == 1) & made.boundary))
        fits = fits if capacity is None else fits & (live <= capacity)
    if not bool(fits.all()):
        raise ValueError(
            "segmentation is not one that a memory could make: a sequence's first token must be a boundary, "
            f"merges happen at boundaries between two states alive, at most capacity={capacity} states live"
        )
