"""Refusals: every bad argument raises a ValueError that names it, what came and what is accepted, before any work."""

import math
import os
from itertools import pairwise

import torch
from torch import Tensor

from dla.ops.layout import compute_dtype
from dla.ops.rules import Rules
from dla.ops.state import DynamicState, State


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
    _check_ranks(k, v)
    B, T, Hk, dk = k.shape
    H = v.shape[2]
    if v.shape[:2] != (B, T):
        raise ValueError(f"v must be [{B}, {T}, heads, dv] to go with k {list(k.shape)}, got {list(v.shape)}")
    if 0 in (Hk, dk, H, v.shape[3]):
        raise ValueError(f"k and v need at least one head and one channel, got {list(k.shape)} and {list(v.shape)}")
    if H % Hk:
        raise ValueError(f"k has {Hk} key heads, which must divide the {H} heads of v")
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "q": (q, (B, T, Hk, dk)),
        "g": (g, (B, T, H)),
        "beta": (beta, (B, T, H)),
    }
    for name, (x, shape) in expected.items():
        if x is not None:
            check_tensor(name, x)
            if x.shape != shape:
                raise ValueError(f"{name} must be {list(shape)} to go with k and v, got {list(x.shape)}")
    if lam is not None:
        check_tensor("lam", lam)
        if lam.dim() != 4 or lam.shape[:3] != (B, T, H) or lam.shape[3] == 0:
            raise ValueError(f"lam must be [{B}, {T}, {H}, slots >= 1], got {list(lam.shape)}")
    if route is not None:
        check_tensor("route", route)
        if route.shape not in ((H,), (B, T, H)):
            raise ValueError(f"route must be [{H}] or [{B}, {T}, {H}], got {list(route.shape)}")
    _check_kinds(k, {"q": q, "v": v}, {"lam": lam, "g": g, "beta": beta, "route": route})
    check_cu_seqlens(cu_seqlens, B, T)
    if g is not None and values_are_cheap(g) and bool((g > 0).any()):
        raise ValueError(f"g is a log-decay and must be <= 0, got values up to {g.max().item():.3g}")


def _check_ranks(k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, time, heads, dim], got shape {list(x.shape)}")


def check_tensor(name: str, x: object) -> None:
    """Refuse what is not a floating-point tensor."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a floating-point tensor, got {got}")


def _check_kinds(k: Tensor, same: dict[str, Tensor | None], weights: dict[str, Tensor | None]) -> None:
    """One dtype for q, k and v; that or float32 for the rest; one device for all."""
    for name, x in {**same, **weights}.items():
        if x is None:
            continue
        accepted = {k.dtype} if name in same else {k.dtype, torch.float32}
        if x.dtype not in accepted:
            raise ValueError(f"{name} must be {' or '.join(sorted(map(str, accepted)))} to go with k, got {x.dtype}")
        if x.device != k.device:
            raise ValueError(f"{name} must be on {k.device} like k, got {x.device}")


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


def check_dynamic_state(state: DynamicState | None, capacity: int | None, routed: bool | None) -> None:
    """An initial state with the settings of this call; ``routed=None`` accepts both."""
    if state is None:
        return
    if state.capacity != capacity:
        raise ValueError(f"initial_state was made with capacity={state.capacity}, which must match, got {capacity}")
    if routed is not None and state.routed != routed:
        kept = "with" if state.routed else "without"
        raise ValueError(f"initial_state was made {kept} routed reads (route), which must stay so in one sequence")


def check_segmentation(
    seg: object,
    shape: tuple[int, ...],
    device: torch.device,
    rules: Rules,
    state: DynamicState | None,
    lengths: tuple[int, ...],
) -> None:
    """A given segmentation that fits the input, and whose decisions a memory could have made."""
    score, boundary, merged = (getattr(seg, name, None) for name in ("score", "boundary", "merged"))
    if not (isinstance(score, Tensor) and isinstance(boundary, Tensor) and isinstance(merged, Tensor)):
        raise ValueError(f"segmentation must be a Segmentation, got {type(seg).__name__}")
    for name, x in (("score", score), ("boundary", boundary), ("merged", merged)):
        if x.shape != shape:
            raise ValueError(f"segmentation.{name} must be {list(shape)} to go with v, got {list(x.shape)}")
        if x.device != device:
            raise ValueError(f"segmentation.{name} must be on {device} like k, got {x.device}")
    if boundary.dtype != torch.bool or merged.is_floating_point() or not score.is_floating_point():
        raise ValueError(
            "segmentation must hold a floating-point score, a bool boundary and an integer merged, "
            f"got {score.dtype}, {boundary.dtype}, {merged.dtype}"
        )
    if torch.compiler.is_compiling() or (device.type != "cpu" and os.environ.get("DLA_DEBUG") != "1"):
        return
    _check_decisions(boundary.flatten(0, 1), merged.flatten(0, 1), rules, state, lengths)


def _check_decisions(
    boundary: Tensor, merged: Tensor, rules: Rules, state: DynamicState | None, lengths: tuple[int, ...]
) -> None:
    merging = merged >= 0
    change = boundary.long() - merging.long()
    start = 0
    for n, length in enumerate(lengths):
        part = slice(start, start + length)
        before = change[part].cumsum(0) - change[part]  # [length, H] states alive before each step
        if state is not None:
            before = before + state.size[n]
        opens = boundary[part] | (before > 0)
        room = torch.ones_like(opens) if rules.capacity is None else before + change[part] <= rules.capacity
        fits = ~merging[part] | (boundary[part] & (merged[part] < before - 1))
        start += length
        if not bool((opens & room & fits).all()):
            raise ValueError(
                "segmentation is not one that a memory could make: a sequence's first token must be a boundary, "
                f"merges happen at boundaries between two states alive, at most capacity={rules.capacity} states live"
            )
