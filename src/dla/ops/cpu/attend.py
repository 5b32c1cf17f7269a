"""The second stage in C++: outputs and the final state, in float32, for transitions without beta."""

import torch
from torch import Tensor

from dla.ops.chunked.lifetimes import Lifetimes
from dla.ops.chunked.tokens import tokens_after
from dla.ops.cpu.binding import Arguments, call, flat
from dla.ops.decide.decided import Decided
from dla.ops.problem import Problem
from dla.ops.state import DynamicState, LinearState, LogLinearState, State
from dla.ops.state.base import newest_first, take_rows

MEMORIES = ("single", "log_linear", "dynamic")


class AttendArgs(Arguments):
    """Mirrors the struct of the same name in args.h."""

    _fields_ = Arguments.fields(
        "memory tokens sequences heads key_heads dk dv q_stride k_stride v_stride width recency threads carried states",
        "scale",
        "offset length position origin q k v lam g route death initial_death initial initial_keys o final final_keys",
    )


def unable(problem: Problem) -> str | None:
    """Why these kernels cannot run a problem."""
    if problem.device.type != "cpu":
        return f"its tensors are on {problem.device.type}"
    if problem.v.dtype == torch.float64:
        return "the C++ kernels compute in float32, this is float64"
    if problem.beta is not None:
        return "the C++ kernels have no delta rule (beta) yet"
    if problem.soft:
        return "the C++ kernels have no soft gate yet"
    if problem.needs_gradient:
        return "the C++ kernels have no backward pass yet"
    return None


@torch.no_grad()
def attend(problem: Problem, decided: Decided | None) -> tuple[Tensor, State | None]:
    """The outputs [B, T, H, dv] and, if wanted, the state after the last step."""
    if problem.memory == "single":
        return linear(problem)
    if problem.memory == "log_linear":
        return log_linear(problem)
    assert decided is not None
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
    if capacity is None:
        o = run(problem, **unbounded(problem, decided))
        return o, tokens_after(problem, made) if problem.wants_state else None
    tensors: dict[str, Tensor | None] = {"death": made.death, "origin": torch.tensor(problem.layout.origins)}
    if problem.state is not None:
        dense, keys = problem.state.dense(), problem.state.keys
        tensors |= {"initial": dense, "initial_keys": keys, "initial_death": made.initial_death}
    N, H, dk, dv = problem.shape
    if problem.wants_state:
        tensors["final"] = torch.zeros(N, H, capacity, dk, dv)
        tensors["final_keys"] = torch.zeros(N, H, capacity, dk) if problem.routed else None
    carried = 0 if problem.state is None else capacity
    o = run(problem, carried=carried, states=capacity, **tensors)
    final, sums = tensors.get("final"), tensors.get("final_keys")
    if final is None:
        return o, None
    info = None if problem.state is None else problem.state.info
    counts, scores = made.tally(info, capacity)
    return o, DynamicState.of_matrices(final, counts, scores, sums, problem.length(), capacity)


def unbounded(problem: Problem, decided: Decided) -> dict[str, Tensor | int | None]:
    """What a memory without a capacity gives the kernel: states that lam cannot tell apart are one."""
    layout, made, state = problem.layout, decided.segmentation, problem.state
    assert problem.lam is not None
    lifetimes = Lifetimes.of(made, layout)
    if not problem.routed:
        lifetimes = lifetimes.sharing(problem.lam.shape[-1], problem.slot_order == "recency")
    deaths = lifetimes.deaths().int()
    tensors: dict[str, Tensor | int | None] = {"death": deaths, "origin": torch.zeros(layout.sequences).long()}
    most = int(made.live_states().max()) if made.boundary.numel() else 1
    carried = 0
    if state is not None:
        before = lifetimes._where(lifetimes.start < 0)
        size = torch.zeros(layout.sequences, problem.shape[1], dtype=torch.int64)
        size.index_put_((before.sequence, before.head), size.new_ones(()), accumulate=True)
        carried = max(int(size.max()), 1) if size.numel() else 1
        matrices, keys = state.held.carried(lifetimes.carried_places(state.counts.shape[2]), carried)
        oldest = newest_first(size, carried)
        ends = torch.full((*size.shape, carried), -1, dtype=torch.int32)
        rank = torch.arange(len(before.start)) - lifetimes._where(lifetimes.start < 0)._groups()[0]
        ends[before.sequence, before.head, rank] = before.death.int()
        tensors |= {"initial": take_rows(matrices, oldest), "initial_death": ends}
        tensors["initial_keys"] = None if keys is None else take_rows(keys, oldest)
    return {**tensors, "carried": carried, "states": max(most, carried, 1)}


def run(problem: Problem, **given: Tensor | int | None) -> Tensor:
    """Call the kernel; the outputs."""
    layout, (N, H, dk, dv) = problem.layout, problem.shape
    places = {"offset": layout.offsets, "length": layout.lengths}
    tensors: dict[str, Tensor | None] = {name: torch.tensor(x, dtype=torch.int64) for name, x in places.items()}
    numbers = {"tokens": layout.batch * layout.time, "sequences": N, "heads": H, "key_heads": problem.k.shape[2]}
    numbers |= {"dk": dk, "dv": dv, "memory": MEMORIES.index(problem.memory)}
    numbers |= {"recency": int(problem.slot_order == "recency"), "threads": torch.get_num_threads()}
    for name in ("q", "k", "v"):
        tensors[name], numbers[f"{name}_stride"] = flat(getattr(problem, name))
    for name in ("lam", "g", "route"):
        x = getattr(problem, name)
        tensors[name] = None if x is None else x.float().contiguous()
    numbers["width"] = 0 if problem.lam is None else problem.lam.shape[-1]
    for name, x in given.items():
        if isinstance(x, int):
            numbers[name] = x
        else:
            tensors[name] = None if x is None else x.contiguous()
    tensors["o"] = o = torch.empty(layout.batch, layout.time, H, dv)
    call("dla_attend", AttendArgs(scale=problem.scale, **numbers), tensors)
    return o.to(problem.v.dtype)
