"""The second stage in C++: outputs and the final state, in float32."""

from typing import Any

import torch
from torch import Tensor

from dla.ops.chunked.gate import soft_gate
from dla.ops.chunked.lifetimes import Lifetimes
from dla.ops.chunked.tokens import tokens_after
from dla.ops.cpu.binding import NUMBERED, Arguments, call, flat, places, sizes
from dla.ops.cpu.gradients import NAMES, CpuAttention
from dla.ops.decide.decided import Decided
from dla.ops.problem import Problem
from dla.ops.segmentation import Segmentation
from dla.ops.state import DynamicState, LinearState, LogLinearState, State
from dla.ops.state.pools import longest_short, most_loose
from dla.ops.state.spans import Spans

Given = dict[str, Any]  # tensors and numbers, by their names in the struct


class AttendArgs(Arguments):
    """Mirrors the struct of the same name in args.h."""

    _fields_ = Arguments.fields(
        "memory tokens sequences heads key_heads dk dv q_stride k_stride v_stride width recency threads carried states "
        "longest_short most_loose pool_matrices pool_rows places_room final_room",
        "scale",
        "offset length position origin q k v lam g route beta gate death initial_death initial initial_keys matrix "
        "factor rows places row_keys row_values row_coefficient o final final_keys final_matrix final_factor "
        "final_rows final_row_keys final_row_values final_row_coefficient",
    )


def attend(problem: Problem, decided: Decided | None) -> tuple[Tensor, State | None]:
    """The outputs [B, T, H, dv] and, if wanted, the state after the last step."""
    if decided is None:
        return linear(problem) if problem.memory == "single" else log_linear(problem)
    return dynamic(problem, decided)


def linear(problem: Problem) -> tuple[Tensor, State | None]:
    initial = None if problem.state is None else problem.state.matrix
    final = torch.zeros(problem.shape) if problem.wants_state else None
    o = run(problem, initial=initial, final=final, carried=1, states=1)
    return o, None if final is None else LinearState(matrix=final, length=problem.length())


def log_linear(problem: Problem) -> tuple[Tensor, State | None]:
    (N, H, dk, dv), state, end = problem.shape, problem.state, problem.length()
    start = torch.zeros(N, dtype=torch.int64) if state is None else state.length
    levels = max((n.bit_length() for n in end.tolist()), default=0)
    initial = None if state is None else state.levels
    final = torch.zeros(N, H, levels, dk, dv) if problem.wants_state else None
    carried = 0 if initial is None else initial.shape[2]
    o = run(problem, position=start, initial=initial, final=final, carried=carried, states=levels)
    return o, None if final is None else LogLinearState(levels=final, length=end)


def dynamic(problem: Problem, decided: Decided) -> tuple[Tensor, State | None]:
    made, capacity = decided.segmentation, problem.rules.capacity
    gate = soft_gate(problem, decided) if problem.soft else None
    if capacity is None:
        o = run(problem, gate, **unbounded(problem, decided))
        return o, tokens_after(problem, made) if problem.wants_state else None
    given: Given = {"death": made.death, "states": capacity}
    if problem.state is not None:
        assert isinstance(problem.state.held, Spans)
        given |= carried(problem.state.held) | {"initial_death": made.initial_death}
    final = room_after(problem, capacity) if problem.wants_state else {}
    o = run(problem, gate, **given, **{f"final{name}": x for name, x in final.items()})
    return o, state_after(problem, made, final, capacity) if final else None


def carried(held: Spans) -> Given:
    """A state to go on from, as the kernel takes it."""
    rows = {f"row_{name}": getattr(held, name).float() for name in ("keys", "values", "coefficient")}
    sizes = {"pool_matrices": len(held.matrices), "pool_rows": len(held.keys), "places_room": held.places.shape[2]}
    tables = {name: getattr(held, name) for name in ("matrix", "factor", "rows", "places")}
    numbers = {"initial": held.matrices.float(), "initial_keys": held.key_sums, "carried": held.count.shape[2]}
    return {**numbers, **tables, **rows, **sizes}


def room_after(problem: Problem, capacity: int) -> Given:
    """Arrays for the state after the call, of which little will be used: no memory is taken until it is written to."""
    (N, H, dk, dv), K, state = problem.shape, capacity, problem.state
    before = 0 if state is None else state.held.places.shape[2]
    L = before + min((K + 1) * longest_short(dk, dv), max(problem.layout.lengths, default=0))
    return {
        "": torch.empty(N, H, K, dk, dv),
        "_keys": torch.zeros(N, H, K, dk) if problem.routed else None,
        "_matrix": torch.zeros(N, H, K, dtype=torch.int32),
        "_factor": torch.zeros(N, H, K),
        "_rows": torch.zeros(N, H, K, dtype=torch.int64),
        "_row_keys": torch.empty(N, H, L, dk),
        "_row_values": torch.empty(N, H, L, dv),
        "_row_coefficient": torch.empty(N, H, L),
    }


def state_after(problem: Problem, made: Segmentation, final: Given, capacity: int) -> DynamicState:
    """What is in use of ``room_after``, where every matrix and row there could be has a place."""
    counts, scores = made.tally(None if problem.state is None else problem.state.info, capacity)
    pools = {"matrices": "", "keys": "_row_keys", "values": "_row_values", "coefficient": "_row_coefficient"}
    held: Given = {name: final[key].flatten(0, 2) for name, key in pools.items()}
    held |= {"factor": final["_factor"], "rows": final["_rows"], "key_sums": final["_keys"]}
    held["places"] = _numbers(final["_row_coefficient"])
    held["matrix"] = torch.where(final["_matrix"] > 0, _numbers(final["_matrix"]), -1)
    return DynamicState(Spans(**held, count=counts, info=scores, length=problem.length()).compacted(), capacity)


def _numbers(x: Tensor) -> Tensor:
    """Of the places of x, in order."""
    return torch.arange(x.numel()).view(x.shape)


def unbounded(problem: Problem, decided: Decided) -> Given:
    """What a memory without a capacity gives the kernel: states that lam cannot tell apart are one."""
    layout, made, state = problem.layout, decided.segmentation, problem.state
    assert problem.lam is not None
    lifetimes = Lifetimes.of(made, layout)
    if not problem.routed:
        lifetimes = lifetimes.sharing(problem.lam.shape[-1], problem.slot_order == "recency")
    deaths = lifetimes.deaths().int()
    given: Given = {"death": deaths, "origin": torch.zeros(layout.sequences).long()}
    most = int(made.live_states().max()) if made.boundary.numel() else 1
    states = 0
    if state is not None:
        ends, matrices, keys = lifetimes.carried_in(state)
        states, live = ends.shape[2], (ends >= 0).long()
        given |= carried(Spans.of_matrices(matrices, live, live.double(), keys, state.length, states))
        given["initial_death"] = ends
    return {**given, "states": max(most, states, 1)}


def run(problem: Problem, gate: Tensor | None = None, **given: Any) -> Tensor:
    """Call the kernel; the outputs. ``gate`` [B * T, H] is the soft gate's."""
    layout, (_, H, dk, dv) = problem.layout, problem.shape
    tensors: dict[str, Tensor | None] = {**places(problem)}
    numbers = sizes(problem) | {"memory": NUMBERED.index(problem.memory)}
    numbers["recency"] = int(problem.slot_order == "recency")
    for name in ("q", "k", "v"):
        tensors[name], numbers[f"{name}_stride"] = flat(getattr(problem, name))
    inputs = {name: getattr(problem, name) for name in ("q", "k", "v", "lam", "g", "route", "beta")} | {"gate": gate}
    for name in ("lam", "g", "route", "beta", "gate"):
        x = inputs[name]
        tensors[name] = None if x is None else x.float().contiguous()
    numbers["width"] = 0 if problem.lam is None else problem.lam.shape[-1]
    if problem.memory == "dynamic":
        numbers |= {"longest_short": longest_short(dk, dv), "most_loose": most_loose(dk, dv)}
        room = given.get("final_row_coefficient")
        numbers["final_room"] = 0 if room is None else room.shape[2]
    for name, x in given.items():
        if isinstance(x, int):
            numbers[name] = x
        else:
            tensors[name] = None if x is None else x.contiguous()
    tensors["o"] = o = torch.empty(layout.batch, layout.time, H, dv)
    arguments = AttendArgs(scale=problem.scale, **numbers)
    call("dla_attend", arguments, tensors)
    o = o.to(problem.v.dtype)
    if problem.needs_gradient:
        kept = {name: None if x is None else x.detach() for name, x in tensors.items() if name != "o"}
        o = CpuAttention.apply(o, arguments, kept, *(inputs[name] for name in NAMES))
    return o
