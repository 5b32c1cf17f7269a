"""What the queries of a call read, and with which weights: all that its outputs and their gradients are made of.

A reading is a stream of values with its plan. A call has one, and two with the soft gate (streams.py). Its states are
made again where they are needed: they are the largest that there is.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dla.ops.chunked.lifetimes import Lifetimes
from dla.ops.decide.decided import Decided
from dla.ops.gpu.key_sums import KeySums, key_sums_of
from dla.ops.gpu.levels import levels_of
from dla.ops.gpu.outputs import outputs_of
from dla.ops.gpu.plan import ReadPlan
from dla.ops.gpu.routing import routed_weights
from dla.ops.gpu.slots import slots_of
from dla.ops.gpu.starts import Starts, starts_of
from dla.ops.gpu.states import States, states_of
from dla.ops.gpu.streams import Streams
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.problem import MemoryKind, Problem
from dla.ops.segmentation import ALIVE


@dataclass(frozen=True)
class FlatOperands:
    """A problem's tensors on the flat token axis, heads side by side."""

    q: Tensor  # [tokens, Hk, dk]
    k: Tensor  # [tokens, Hk, dk]
    v: Tensor  # [tokens, H, dv]
    lam: Tensor | None  # [tokens, H, width]
    g: Tensor | None  # [tokens, H] float32
    route: Tensor | None  # [tokens, H] float32

    @classmethod
    def of(cls, problem: Problem) -> "FlatOperands":
        assert problem.q is not None
        q, k, v, lam = (side_by_side(problem.flat(x)) for x in (problem.q, problem.k, problem.v, problem.lam))
        assert q is not None and k is not None and v is not None
        g, route = (None if x is None else problem.layout.flat(x).float().contiguous()
                    for x in (problem.g, problem.route))  # fmt: skip
        return cls(q, k, v, lam, g, route)


def side_by_side(x: Tensor | None) -> Tensor | None:
    """x [tokens, heads, dim], a copy if its heads do not lie side by side; tokens may be apart."""
    if x is None or (x.stride(2) == 1 and x.stride(1) == x.shape[2]):
        return x
    return x.contiguous()


@dataclass(frozen=True)
class Lives:
    """When states begin and end, in the sequences' own times, and what was carried in, oldest first."""

    death: Tensor  # [tokens, H] int32
    states: int  # most that live at once
    initial_death: Tensor | None = None  # [N, H, carried] int32
    matrices: Tensor | None = None  # [N, H, carried, dk, dv]
    keys: Tensor | None = None  # [N, H, carried, dk]

    @classmethod
    def of(cls, problem: Problem, decided: Decided) -> "Lives":
        made, layout, state, capacity = decided.segmentation, problem.layout, problem.state, problem.rules.capacity
        if capacity is None:
            return cls._without_capacity(problem, decided)
        death, initial = layout.flat(made.death), made.initial_death
        if layout.packed:
            origin = torch.tensor(layout.origins, dtype=torch.int32, device=death.device)
            death = since(death, layout.each_token(origin)[:, None])
            initial = None if initial is None else since(initial, origin[:, None, None])
        if state is None:
            return cls(death.contiguous(), capacity)
        assert initial is not None
        return cls(death.contiguous(), capacity, initial.contiguous(), state.dense(), state.keys)

    @classmethod
    def _without_capacity(cls, problem: Problem, decided: Decided) -> "Lives":
        """States that lam cannot tell apart are one, unless each has a weight of its own."""
        assert problem.lam is not None
        made, width = decided.segmentation, problem.lam.shape[-1]
        lifetimes = Lifetimes.of(made, problem.layout)
        if problem.routed:
            width = max(int(made.live_states().max()), 1) if made.boundary.numel() else 1
        else:
            lifetimes = lifetimes.sharing(width, problem.slot_order == "recency")
        death = lifetimes.deaths().int()
        return cls(death, width) if problem.state is None else cls(death, width, *lifetimes.carried_in(problem.state))


def since(death: Tensor, origin: Tensor) -> Tensor:
    """Deaths counted from an origin; those that mean something else stay."""
    return torch.where((death < 0) | (death == ALIVE), death, death - origin)


@dataclass(frozen=True)
class Reads:
    """``weights`` are lam, or what routed reads make of it; ``starts`` are those of the stream's plan."""

    memory: MemoryKind
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    scale: float
    tiles: Tiles
    initial: Tensor | None = None  # [N, H, carried, dk, dv]
    weights: Tensor | None = None  # [tokens, H, width]
    recency: bool = False
    plan: ReadPlan | None = None
    starts: Starts | None = None  # the dynamic memory's
    position: Tensor | None = None  # [N] int64, what the sequences of levels have seen before the call
    # of routed reads
    sums: KeySums | None = None
    hard: Starts | None = None  # the states' own starts

    def states(self) -> States:
        return states_of(self.k, self.v, self.g, self.initial, self.tiles)

    def outputs(self, states: States) -> Tensor:
        """[tokens, H, dv]"""
        death, birth = (None, None) if self.starts is None else (self.starts.of_tokens, self.starts.birth)
        return outputs_of(self.q, self.k, self.v, self.weights, self.scale, self.memory, states, self.tiles, self.plan,
                          death, self.recency, birth)  # fmt: skip


def of_single(problem: Problem) -> Reads:
    x, tiles = FlatOperands.of(problem), Tiles.of(problem.layout, problem.device)
    initial = None if problem.state is None else problem.state.matrix[:, :, None]
    return Reads("single", x.q, x.k, x.v, x.g, problem.scale, tiles, initial)


def of_levels(problem: Problem, columns: bool = False) -> Reads:
    x, state, device = FlatOperands.of(problem), problem.state, problem.device
    assert x.lam is not None
    if state is None:
        position, initial, carried = torch.zeros(problem.shape[0], dtype=torch.int64, device=device), None, 0
        tiles = Tiles.of(problem.layout, device)
    else:
        position, initial, carried = state.length, state.dense(), state.levels.shape[2]
        tiles = Tiles.of(problem.layout, device, lead=position % CHUNK)
    longest = max(problem.layout.lengths, default=0)
    levels = ((1 << carried) - 1 + longest).bit_length()  # of the longest sequence at most
    plan = levels_of(x.lam, position, carried, max(levels, 1), tiles, columns)
    return Reads("log_linear", x.q, x.k, x.v, x.g, problem.scale, tiles, initial, x.lam, plan=plan, position=position)


def of_states(problem: Problem, lives: Lives, columns: bool = False, ends: bool = False) -> Reads:
    """``ends``: the starts are also looked for at the sequences' ends, for states after the call."""
    x, tiles, recency = (
        FlatOperands.of(problem),
        Tiles.of(problem.layout, problem.device),
        problem.slot_order == "recency",
    )
    assert x.lam is not None
    starts = starts_of(lives.death, lives.initial_death, tiles, lives.states, ends)
    weights, sums = x.lam, None
    if x.route is not None:  # weights of each state, oldest first
        sums = key_sums_of(x.k, lives.keys, tiles)
        weights, recency = routed_weights(x.q, x.lam, x.route, sums, starts, tiles, recency), False
    plan = None if problem.soft else slots_of(weights, starts, tiles, recency, columns=columns)
    return Reads("dynamic", x.q, x.k, x.v, x.g, problem.scale, tiles, lives.matrices, weights, recency, plan, starts,
                   sums=sums, hard=starts)  # fmt: skip


def of_streams(problem: Problem, lives: Lives, streams: Streams, gate: Tensor, columns: bool = False) -> list[Reads]:
    """The soft gate's two: what stays in the state that was current, and what waits for the next one."""
    both = of_states(problem, lives)
    assert both.weights is not None
    made, living = [], streams.living if both.recency else None
    for share, (death, birth) in zip((1 - gate, gate), (streams.stays, streams.waits), strict=True):
        starts = starts_of(death, None, both.tiles, lives.states + 1, ends=False, birth=birth)
        plan = slots_of(both.weights, starts, both.tiles, both.recency, living, columns)
        v = (both.v * share[..., None]).to(both.v.dtype)
        made.append(replace(both, v=v, plan=plan, starts=starts))
    return made


def common(reading: Reads, states: States | None) -> dict[str, Any]:
    """The arguments by which every kernel of gradients knows what is read; ``states`` have decays, if there are any."""
    (_, H, dv), (_, key_heads, dk), tiles, plan = reading.v.shape, reading.k.shape, reading.tiles, reading.plan
    arguments: dict[str, Any] = {name: getattr(tiles, name) for name in
                                 ("first", "stop", "sequence", "offset", "lead", "chunks")}  # fmt: skip
    for name in ("position", "parts", "part_count", "weight", "slot_before"):
        arguments[name] = None if plan is None else getattr(plan, name)
    for name in ("q", "k", "v"):
        arguments |= {name: getattr(reading, name), f"{name}_stride": getattr(reading, name).stride(0)}
    starts, lam = reading.starts, reading.weights
    arguments |= (
        {"death": None, "birth": None} if starts is None else {"death": starts.of_tokens, "birth": starts.birth}
    )
    arguments |= {
        "lam": lam,
        "lam_stride": 0 if lam is None else lam.stride(0),
        "width": 0 if lam is None else lam.shape[2],
    }
    arguments |= {"G": None if states is None else states.G, "total": None if states is None else states.total}
    arguments |= {"carried": 0 if reading.initial is None else reading.initial.shape[2]}
    arguments |= {"K": 0 if plan is None else plan.states, "scale": reading.scale, "RECENCY": reading.recency}
    return arguments | {"H": H, "GROUP": H // key_heads, "DK": dk, "DV": dv, "C": CHUNK, "MEMORY": reading.memory}


def used(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a kernel has."""
    return {name: arguments[name] for name in kernel.arg_names}
