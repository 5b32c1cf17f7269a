"""The third stage in C++: one token of every sequence, on the carried state itself, in float32 and without beta."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.cpu.attend import MEMORIES
from dla.ops.cpu.binding import Arguments, call
from dla.ops.problem import Problem
from dla.ops.rules import FIRST_SCORE, TIE
from dla.ops.state import DynamicState, LogLinearState, State
from dla.ops.state.pools import longest_short, most_loose
from dla.ops.state.spans import GROWTH, Spans

WASTE = 10  # one part in so many of the pools may be free


class DecodeArgs(Arguments):
    """Mirrors the struct of the same name in args.h."""

    _fields_ = Arguments.fields(
        "memory sequences heads key_heads dk dv width recency threads states stored block state_score given "
        "longest_short most_loose pool_matrices pool_rows places_room free_rows free_matrices missing longest",
        "scale tau tie first_score",
        "q k v lam g route length matrices matrix factor rows count info key_sums places row_keys row_values "
        "row_coefficient norm free_row free_matrix score boundary merged o new_row freed fold freed_rows",
    )


def unable(problem: Problem) -> str | None:
    """Why this kernel cannot run a problem."""
    if problem.device.type != "cpu":
        return f"its tensors are on {problem.device.type}"
    if problem.v.dtype == torch.float64:
        return "the C++ kernels compute in float32, this is float64"
    if problem.beta is not None:
        return "the C++ kernels have no delta rule (beta) yet"
    if problem.memory == "dynamic":
        if problem.rules.capacity is None:
            return "the C++ decoding step needs a capacity"
        if problem.rules.merge != "density" and problem.given is None:
            return f"the C++ decoding step merges by density, this is {problem.rules.merge}"
    return None


@torch.no_grad()
def decode(problem: Problem) -> tuple[Tensor, State]:
    """The output [N, 1, H, dv] and the state after it, which is the given one if it may be changed."""
    state = problem.state if problem.inplace else problem.state.clone()
    N, H, dk, dv = problem.shape
    o = torch.empty(N, 1, H, dv)
    tensors: dict[str, Tensor | None] = {"o": o, "length": state.length}
    for name in ("q", "k", "v", "lam", "g", "route"):
        x = getattr(problem, name)
        tensors[name] = None if x is None else x.float().contiguous()
    arguments = DecodeArgs(
        memory=MEMORIES.index(problem.memory),
        sequences=N,
        heads=H,
        key_heads=problem.k.shape[2],
        dk=dk,
        dv=dv,
        width=0 if problem.lam is None else problem.lam.shape[-1],
        threads=torch.get_num_threads(),
        scale=problem.scale,
        states=1,
    )
    if problem.memory == "single":
        tensors["matrices"] = state.matrix
    elif problem.memory == "log_linear":
        tensors["matrices"], arguments.states = room_for_levels(state)
    else:
        return dynamic(problem, state, arguments, tensors, o), state
    call("dla_decode", arguments, tensors)
    state.length += 1
    return o.to(problem.v.dtype), state


def room_for_levels(state: LogLinearState) -> tuple[Tensor, int]:
    levels = int(state.length.max() + 1).bit_length() if state.batch else 0
    if levels > state.levels.shape[2]:
        state.levels = F.pad(state.levels, (0, 0, 0, 0, 0, levels - state.levels.shape[2]))
    return state.levels, max(state.levels.shape[2], 1)


@dataclass
class Ground:
    """What a decoding step needs beside a state's tensors, kept between steps: free places, norms, scratch."""

    free_row: Tensor
    free_matrix: Tensor
    free_rows: int
    free_matrices: int
    longest: int  # most rows that a head has
    norm: Tensor  # [N, H] of the current state
    integers: Tensor  # scratch, [3, N, H] int32
    freed_rows: Tensor  # [N, H]

    @classmethod
    def of(cls, held: Spans) -> "Ground":
        N, H, _, _ = held.shape
        rows, matrices = held.free()
        free_row, free_matrix = stack(rows, 0, 0, len(held.keys)), stack(matrices, 0, 0, len(held.matrices))
        longest = int(held.rows.sum(-1).max()) if held.rows.numel() else 0
        norm = held.current().flatten(2).double().norm(dim=-1)
        scratch = torch.empty(3, N, H, dtype=torch.int32)
        return cls(
            free_row,
            free_matrix,
            len(rows),
            len(matrices),
            longest,
            norm,
            scratch,
            torch.empty(N, H, dtype=torch.int64),
        )


def dynamic(
    problem: Problem, state: DynamicState, arguments: DecodeArgs, tensors: dict[str, Tensor | None], o: Tensor
) -> Tensor:
    held, rules = state.held, problem.rules
    assert isinstance(held, Spans)
    ground = make_room(held)
    _, _, dk, dv = problem.shape
    for name in ("matrices", "matrix", "factor", "rows", "count", "info", "places", "key_sums"):
        tensors[name] = getattr(held, name)
    tensors |= {"row_keys": held.keys, "row_values": held.values, "row_coefficient": held.coefficient}
    tensors |= {"norm": ground.norm, "free_row": ground.free_row, "free_matrix": ground.free_matrix}
    tensors |= dict(zip(("new_row", "freed", "fold"), ground.integers, strict=True))
    tensors["freed_rows"] = ground.freed_rows
    if (made := problem.given) is not None:
        tensors |= {"score": made.score.float().contiguous(), "boundary": made.boundary.contiguous()}
        tensors["merged"] = made.merged.contiguous()
        arguments.given = 1
    arguments.states, arguments.stored = held.count.shape[2], held.matrices.element_size()
    arguments.recency, arguments.block = int(problem.slot_order == "recency"), rules.block or 0
    arguments.state_score = int(rules.score == "state")
    arguments.longest_short, arguments.most_loose = longest_short(dk, dv), most_loose(dk, dv)
    arguments.pool_matrices, arguments.pool_rows = len(held.matrices), len(held.keys)
    arguments.places_room = held.places.shape[2]
    arguments.free_rows, arguments.free_matrices = ground.free_rows, ground.free_matrices
    arguments.tau, arguments.tie, arguments.first_score = rules.tau, TIE, FIRST_SCORE
    call("dla_decode", arguments, tensors)
    if arguments.missing:
        ground.free_matrices = arguments.free_matrices
        grow_matrices(held, ground, arguments.missing)
        arguments.pool_matrices, arguments.free_matrices = len(held.matrices), ground.free_matrices
        call("dla_fold", arguments, {"matrices": held.matrices, "free_matrix": ground.free_matrix})
    held.length += 1
    ground.free_rows, ground.free_matrices = arguments.free_rows, arguments.free_matrices
    ground.longest = arguments.longest
    if wasteful(held, ground):
        held.compact()
    return o.to(problem.v.dtype)


def wasteful(held: Spans, ground: Ground) -> bool:
    """Whether so much of the pools is free that smaller ones are worth a copy; a token of every head needs a row."""
    (N, H, dk, dv), row = held.shape, held.shape[2] + held.shape[3]
    free = ground.free_matrices * dk * dv + max(ground.free_rows - N * H, 0) * row
    return free * WASTE > len(held.matrices) * dk * dv + len(held.keys) * row


def make_room(held: Spans) -> Ground:
    """Free places for a token of every head."""
    ground: Ground | None = held.ground
    if ground is None:
        ground = held.ground = Ground.of(held)
    heads = held.count.shape[0] * held.count.shape[1]
    if ground.free_rows < heads:
        grow_rows(held, ground, heads)
    if ground.longest + 1 >= held.places.shape[2]:
        more = max(16, held.places.shape[2] // 8)
        held.places = F.pad(held.places, (0, more), value=-1)
    return ground


def grow_rows(held: Spans, ground: Ground, needed: int) -> None:
    more, start = max(needed - ground.free_rows, len(held.keys) // GROWTH), len(held.keys)
    for name in ("keys", "values", "coefficient"):
        x = getattr(held, name)
        setattr(held, name, torch.cat([x, x.new_zeros(more, *x.shape[1:])]))
    ground.free_row = stack(ground.free_row[: ground.free_rows], start, more, len(held.keys))
    ground.free_rows += more


def grow_matrices(held: Spans, ground: Ground, needed: int) -> None:
    more, start = max(needed, len(held.matrices) // GROWTH), len(held.matrices)
    held.matrices = torch.cat([held.matrices, held.matrices.new_zeros(more, *held.matrices.shape[1:])])
    ground.free_matrix = stack(ground.free_matrix[: ground.free_matrices], start, more, len(held.matrices))
    ground.free_matrices += more


def stack(free: Tensor, start: int, more: int, room: int) -> Tensor:
    """A stack of free places with ``more`` new ones from ``start`` on, and room for all there are."""
    made = torch.zeros(room, dtype=torch.int32)
    made[: len(free)] = free
    made[len(free) : len(free) + more] = torch.arange(start, start + more)
    return made
