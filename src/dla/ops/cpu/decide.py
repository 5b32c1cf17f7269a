"""The first stage in C++ by chunks, in float32: scores and boundaries, merges by density."""

import torch
from torch import Tensor

from dla.ops.cpu import binding
from dla.ops.cpu.binding import Arguments, call, flat
from dla.ops.decide.decided import Decided
from dla.ops.problem import Problem
from dla.ops.rules import FIRST_SCORE, TIE
from dla.ops.segmentation import Segmentation


class DecideArgs(Arguments):
    """Mirrors the struct of the same name in args.h."""

    _fields_ = Arguments.fields(
        "tokens sequences heads key_heads dk dv k_stride v_stride capacity block state_score threads carried",
        "tau tie first_score",
        "offset length origin k v g beta current size0 count0 info0 position0 score boundary death initial_death",
    )


def unable(problem: Problem) -> str | None:
    """Why decisions cannot be made by chunks."""
    rules = problem.rules
    if problem.beta is not None:
        return "decisions by chunks have no delta rule (beta) yet"
    if rules.capacity is not None and rules.merge != "density":
        return f"decisions by chunks merge by density, this is {rules.merge}"
    if problem.soft:
        return "the soft gate is made from the states that every token sees, which decisions by chunks do not have"
    return binding.unable(problem)


@torch.no_grad()
def decide(problem: Problem) -> Decided:
    """Decide every step of every sequence."""
    layout, rules, (N, H, dk, dv) = problem.layout, problem.rules, problem.shape
    k, k_stride = flat(problem.k)
    v, v_stride = flat(problem.v)
    score = torch.empty(layout.batch, layout.time, H)
    boundary = torch.empty(score.shape, dtype=torch.bool)
    death = torch.empty(score.shape, dtype=torch.int32)
    places = {"offset": layout.offsets, "length": layout.lengths, "origin": layout.origins}
    tensors: dict[str, Tensor | None] = {name: torch.tensor(x, dtype=torch.int64) for name, x in places.items()}
    tensors |= {"k": k, "v": v}
    for name, x in (("g", problem.g), ("beta", problem.beta)):
        tensors[name] = None if x is None else x.float().contiguous()
    tensors |= {"score": score, "boundary": boundary, "death": death}
    counts = initial = None
    if problem.state is not None:
        counts = problem.state.counts.contiguous()
        initial = torch.empty(counts.shape, dtype=torch.int32)
        tensors |= {"current": problem.state.held.current().contiguous(), "size0": problem.state.size.contiguous()}
        tensors |= {"count0": counts, "info0": problem.state.info.contiguous(), "initial_death": initial}
        tensors["position0"] = problem.state.length.contiguous()
    arguments = DecideArgs(
        tokens=layout.batch * layout.time,
        sequences=N,
        heads=H,
        key_heads=problem.k.shape[2],
        dk=dk,
        dv=dv,
        k_stride=k_stride,
        v_stride=v_stride,
        capacity=rules.capacity or 0,
        block=rules.block or 0,
        state_score=int(rules.score == "state"),
        threads=torch.get_num_threads(),
        carried=0 if counts is None else counts.shape[2],
        tau=rules.tau,
        tie=TIE,
        first_score=FIRST_SCORE,
    )
    call("dla_decide", arguments, tensors)
    lengths = layout.lengths if layout.packed else None
    return Decided(Segmentation(score, boundary, death, lengths, counts, initial))
