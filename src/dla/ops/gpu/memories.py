"""The three memories, each as a plan over one plain recurrence: which kernels run, in their order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dla.ops.chunked.lifetimes import Lifetimes
from dla.ops.chunked.tokens import tokens_after
from dla.ops.decide.decided import Decided
from dla.ops.gpu.key_sums import key_sums_of
from dla.ops.gpu.levels import last_blocks, levels_of
from dla.ops.gpu.outputs import outputs_of
from dla.ops.gpu.routing import routed_weights
from dla.ops.gpu.slots import slots_of
from dla.ops.gpu.spans import matrices_of
from dla.ops.gpu.starts import starts_of
from dla.ops.gpu.states import states_of
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.problem import Problem
from dla.ops.segmentation import ALIVE
from dla.ops.state import DynamicState, LinearState, LogLinearState, State
from dla.ops.state.base import take_rows


@dataclass(frozen=True)
class Operands:
    """A problem's tensors on the flat token axis, heads side by side."""

    q: Tensor  # [tokens, Hk, dk]
    k: Tensor  # [tokens, Hk, dk]
    v: Tensor  # [tokens, H, dv]
    lam: Tensor | None  # [tokens, H, width]
    g: Tensor | None  # [tokens, H] float32

    @classmethod
    def of(cls, problem: Problem) -> "Operands":
        assert problem.q is not None
        g = None if problem.g is None else problem.layout.flat(problem.g).float().contiguous()
        q, k, v, lam = (side_by_side(problem.flat(x)) for x in (problem.q, problem.k, problem.v, problem.lam))
        assert q is not None and k is not None and v is not None
        return cls(q, k, v, lam, g)


def side_by_side(x: Tensor | None) -> Tensor | None:
    """x [tokens, heads, dim], a copy if its heads do not lie side by side; tokens may be apart."""
    if x is None or (x.stride(2) == 1 and x.stride(1) == x.shape[2]):
        return x
    return x.contiguous()


def linear(problem: Problem) -> tuple[Tensor, State | None]:
    x, tiles = Operands.of(problem), Tiles.of(problem.layout, problem.device)
    initial = None if problem.state is None else problem.state.matrix[:, :, None]
    states = states_of(x.k, x.v, x.g, initial, tiles)
    o = problem.layout.unflat(outputs_of(x.q, x.k, x.v, None, problem.scale, "single", states, tiles))
    if not problem.wants_state:
        return o, None
    return o, LinearState(matrix=states.last(tiles), length=problem.length())


def log_linear(problem: Problem) -> tuple[Tensor, State | None]:
    x, state, device = Operands.of(problem), problem.state, problem.device
    assert x.lam is not None
    if state is None:
        start, initial, carried = torch.zeros(problem.shape[0], dtype=torch.int64, device=device), None, 0
        tiles = Tiles.of(problem.layout, device)
    else:
        start, initial, carried = state.length, state.dense(), state.levels.shape[2]
        tiles = Tiles.of(problem.layout, device, lead=start % CHUNK)
    longest = max(problem.layout.lengths, default=0)
    levels = ((1 << carried) - 1 + longest).bit_length()  # of the longest sequence at most
    states = states_of(x.k, x.v, x.g, initial, tiles)
    plan = levels_of(x.lam, start, carried, max(levels, 1), tiles)
    o = outputs_of(x.q, x.k, x.v, x.lam, problem.scale, "log_linear", states, tiles, plan)
    o = problem.layout.unflat(o)
    if not problem.wants_state:
        return o, None
    end = problem.length()
    width = max((n.bit_length() for n in end.tolist()), default=0)
    made = matrices_of(x.k, x.v, *last_blocks(start, end, carried, width), states, tiles)  # oldest first
    there = (end[:, None] >> torch.arange(width, device=device)) & 1
    older = there.sum(1, keepdim=True) - there.cumsum(1)  # than the block of each bit
    place = torch.where(there == 1, older, width - 1)  # free places are the last, and zero
    return o, LogLinearState(levels=take_rows(made, place[:, None].expand(made.shape[:3])), length=end)


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


def dynamic(problem: Problem, decided: Decided) -> tuple[Tensor, State | None]:
    x, tiles, lives = Operands.of(problem), Tiles.of(problem.layout, problem.device), Lives.of(problem, decided)
    assert x.lam is not None
    made, capacity, recency = decided.segmentation, problem.rules.capacity, problem.slot_order == "recency"
    keeps = problem.wants_state and capacity is not None
    starts = starts_of(lives.death, lives.initial_death, tiles, lives.states, ends=keeps)
    states = states_of(x.k, x.v, x.g, lives.matrices, tiles)
    lam, sums = x.lam, None
    if problem.route is not None:  # weights of each state, oldest first
        sums = key_sums_of(x.k, lives.keys, tiles)
        route = problem.layout.flat(problem.route).float().contiguous()
        lam, recency = routed_weights(x.q, x.lam, route, sums, starts, tiles, recency), False
    plan = slots_of(lam, starts, tiles, recency)
    o = outputs_of(x.q, x.k, x.v, lam, problem.scale, "dynamic", states, tiles, plan, lives.death, recency)
    o = problem.layout.unflat(o)
    if not problem.wants_state:
        return o, None
    if capacity is None:
        return o, tokens_after(problem, made)
    position, count = starts.position[tiles.count :], starts.count[tiles.count :]
    matrices = matrices_of(x.k, x.v, position, count, states, tiles)
    keys = None if sums is None else sums.between(position, count, tiles)
    counts, info = made.tally(None if problem.state is None else problem.state.info, capacity)
    return o, DynamicState.of_matrices(matrices, counts, info, keys, problem.length(), capacity)
