"""The third stage in C++: one token of every sequence, on the carried state itself, in float32 and without beta."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.cpu import binding
from dla.ops.cpu.attend import MEMORIES
from dla.ops.cpu.binding import Arguments, call
from dla.ops.problem import Problem
from dla.ops.rules import FIRST_SCORE, TIE
from dla.ops.state import LogLinearState, State
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
    if problem.memory == "dynamic":
        if problem.rules.capacity is None:
            return "the C++ decoding step needs a capacity"
        if problem.rules.merge != "density" and problem.given is None:
            return f"the C++ decoding step merges by density, this is {problem.rules.merge}"
    return binding.unable(problem)


def decode(problem: Problem) -> tuple[Tensor, State]:
    """The output [N, 1, H, dv] and the state after it, which is the given one if it may be changed."""
    state = problem.state if problem.inplace else problem.state.clone()
    o = torch.empty(problem.v.shape)
    tensors: dict[str, Tensor | None] = {"o": o, "length": state.length}
    for name in ("q", "k", "v", "lam", "g", "route"):
        if (x := getattr(problem, name)) is not None:
            tensors[name] = x.float().contiguous()
    if problem.memory == "dynamic":
        dynamic(problem, state.held, tensors)
    else:
        arguments = sizes(problem)
        tensors["matrices"], arguments.states = (
            (state.matrix, 1) if problem.memory == "single" else room_for_levels(state)
        )
        call("dla_decode", arguments, tensors)
    state.length.add_(1)
    return o.to(problem.v.dtype), state


def sizes(problem: Problem) -> DecodeArgs:
    N, H, dk, dv = problem.shape
    return DecodeArgs(
        memory=MEMORIES.index(problem.memory),
        sequences=N,
        heads=H,
        key_heads=problem.k.shape[2],
        dk=dk,
        dv=dv,
        width=0 if problem.lam is None else problem.lam.shape[-1],
        recency=int(problem.slot_order == "recency"),
        threads=torch.get_num_threads(),
        scale=problem.scale,
    )


def room_for_levels(state: LogLinearState) -> tuple[Tensor, int]:
    levels = int(state.length.max() + 1).bit_length() if state.batch else 0
    if levels > state.levels.shape[2]:
        state.levels = F.pad(state.levels, (0, 0, 0, 0, 0, levels - state.levels.shape[2]))
    return state.levels, max(state.levels.shape[2], 1)


# The dynamic memory.


@dataclass
class Ground:
    """What a decoding step needs beside a state's tensors, kept between steps: free places, norms, scratch."""

    norm: Tensor  # [N, H] of the current state
    free_row: Tensor  # stacks
    free_matrix: Tensor
    scratch: list[Tensor]  # new_row, freed and fold [N, H] int32, freed_rows [N, H] int64
    free_rows: int
    free_matrices: int
    longest: int  # most rows that a head has
    arguments: DecodeArgs | None = None  # of the last step, all but the token; None when a tensor was replaced
    options: Any = None  # that they were made with

    @classmethod
    def of(cls, held: Spans) -> "Ground":
        N, H, _, _ = held.shape
        rows, matrices = held.free()
        return cls(
            norm=held.current().flatten(2).double().norm(dim=-1),
            free_row=stack(rows, 0, 0, len(held.keys)),
            free_matrix=stack(matrices, 0, 0, len(held.matrices)),
            scratch=[torch.empty(N, H, dtype=kind) for kind in (*[torch.int32] * 3, torch.int64)],
            free_rows=len(rows),
            free_matrices=len(matrices),
            longest=int(held.rows.sum(-1).max()) if held.rows.numel() else 0,
        )


def dynamic(problem: Problem, held: Spans, tensors: dict[str, Tensor | None]) -> None:
    ground = make_room(held)
    assert problem.lam is not None
    options = (problem.rules, problem.slot_order, problem.scale, problem.k.shape[2], problem.lam.shape[-1],
               torch.get_num_threads(), problem.routed, problem.g is None)  # fmt: skip
    if ground.arguments is None or ground.options != options:
        ground.arguments, ground.options = prepare(problem, held, ground), options
    arguments = ground.arguments
    arguments.given = int(problem.given is not None)
    if (made := problem.given) is not None:
        tensors |= {"score": made.score.float().contiguous(), "boundary": made.boundary.contiguous()}
        tensors["merged"] = made.merged.contiguous()
    arguments.free_rows, arguments.free_matrices = ground.free_rows, ground.free_matrices
    call("dla_decode", arguments, tensors)
    if arguments.missing:
        ground.free_matrices = arguments.free_matrices
        grow_matrices(held, ground, arguments.missing)
        arguments.pool_matrices, arguments.free_matrices = len(held.matrices), ground.free_matrices
        call("dla_fold", arguments, {"matrices": held.matrices, "free_matrix": ground.free_matrix})
    ground.free_rows, ground.free_matrices = arguments.free_rows, arguments.free_matrices
    ground.longest = arguments.longest
    if wasteful(arguments):
        held.compact()


def prepare(problem: Problem, held: Spans, ground: Ground) -> DecodeArgs:
    """The arguments of all steps that go on with these tensors and options."""
    arguments, rules, (_, _, dk, dv) = sizes(problem), problem.rules, problem.shape
    arguments.states, arguments.stored = held.count.shape[2], held.matrices.element_size()
    arguments.block, arguments.state_score = rules.block or 0, int(rules.score == "state")
    arguments.longest_short, arguments.most_loose = longest_short(dk, dv), most_loose(dk, dv)
    arguments.pool_matrices, arguments.pool_rows = len(held.matrices), len(held.keys)
    arguments.places_room = held.places.shape[2]
    arguments.tau, arguments.tie, arguments.first_score = rules.tau, TIE, FIRST_SCORE
    tensors = {
        name: getattr(held, name) for name in ("matrices", "matrix", "factor", "rows", "count", "info", "places")
    }
    tensors |= {"row_keys": held.keys, "row_values": held.values, "row_coefficient": held.coefficient}
    tensors |= {"norm": ground.norm, "free_row": ground.free_row, "free_matrix": ground.free_matrix}
    tensors |= dict(zip(("new_row", "freed", "fold", "freed_rows"), ground.scratch, strict=True))
    arguments.point({**tensors, "key_sums": held.key_sums})
    return arguments


def wasteful(a: DecodeArgs) -> bool:
    """Whether so much of the pools is free that smaller ones are worth a copy; a token of every head needs a row."""
    matrix, row = a.dk * a.dv, a.dk + a.dv
    free = a.free_matrices * matrix + max(a.free_rows - a.sequences * a.heads, 0) * row
    return free * WASTE > a.pool_matrices * matrix + a.pool_rows * row


def make_room(held: Spans) -> Ground:
    """Free places for a token of every head."""
    ground: Ground | None = held.ground
    if ground is None:
        ground = held.ground = Ground.of(held)
    heads = ground.norm.numel()
    if ground.free_rows < heads:
        grow_rows(held, ground, heads)
    if ground.longest + 1 >= held.places.shape[2]:
        held.places = F.pad(held.places, (0, max(16, held.places.shape[2] // 8)), value=-1)
        ground.arguments = None
    return ground


def grow_rows(held: Spans, ground: Ground, needed: int) -> None:
    more, start = max(needed - ground.free_rows, len(held.keys) // GROWTH), len(held.keys)
    for name in ("keys", "values", "coefficient"):
        x = getattr(held, name)
        setattr(held, name, torch.cat([x, x.new_zeros(more, *x.shape[1:])]))
    ground.free_row = stack(ground.free_row[: ground.free_rows], start, more, len(held.keys))
    ground.free_rows += more
    ground.arguments = None


def grow_matrices(held: Spans, ground: Ground, needed: int) -> None:
    more, start = max(needed, len(held.matrices) // GROWTH), len(held.matrices)
    held.matrices = torch.cat([held.matrices, held.matrices.new_zeros(more, *held.matrices.shape[1:])])
    ground.free_matrix = stack(ground.free_matrix[: ground.free_matrices], start, more, len(held.matrices))
    ground.free_matrices += more
    ground.arguments = None


def stack(free: Tensor, start: int, more: int, room: int) -> Tensor:
    """A stack of free places with ``more`` new ones from ``start`` on, and room for all there are."""
    made = torch.zeros(room, dtype=torch.int32)
    made[: len(free)] = free
    made[len(free) : len(free) + more] = torch.arange(start, start + more)
    return made
