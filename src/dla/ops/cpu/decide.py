"""The first stage in C++ by chunks, in float32: scores and boundaries, merges by density."""

import torch
from torch import Tensor

from dla.ops.cpu import binding
from dla.ops.cpu.binding import Arguments, call, flat, places, sizes
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
    if rules.capacity is not None and rules.merge != "density":
        return f"decisions by chunks merge by density, this is {rules.merge}"
    if problem.soft:
        return "the soft gate is made from the states that every token sees, which decisions by chunks do not have"
    return binding.unable(problem)


@torch.no_grad()
def decide(problem: Problem) -> Decided:
    """Decide every step of every sequence."""
    layout, rules, before = problem.layout, problem.rules, carried(problem)
    k, k_stride = flat(problem.k)
    v, v_stride = flat(problem.v)
    score = torch.empty(layout.batch, layout.time, v.shape[2])
    boundary = torch.empty(score.shape, dtype=torch.bool)
    death = torch.empty(score.shape, dtype=torch.int32)
    tensors: dict[str, Tensor | None] = {**places(problem), **before, "k": k, "v": v}
    tensors |= {"score": score, "boundary": boundary, "death": death}
    for name, x in (("g", problem.g), ("beta", problem.beta)):
        tensors[name] = None if x is None else x.float().contiguous()
    counts = before.get("count0")
    arguments = DecideArgs(
        **sizes(problem),
        k_stride=k_stride,
        v_stride=v_stride,
        capacity=rules.capacity or 0,
        block=rules.block or 0,
        state_score=int(rules.score == "state"),
        carried=0 if counts is None else counts.shape[2],
        tau=rules.tau,
        tie=TIE,
        first_score=FIRST_SCORE,
    )
    call("dla_decide", arguments, tensors)
    lengths = layout.lengths if layout.packed else None
    return Decided(Segmentation(score, boundary, death, lengths, counts, before.get("initial_death")))


def carried(problem: Problem) -> dict[str, Tensor]:
    """What decisions need of the states carried in."""
    state = problem.state
    if state is None:
        return {}
    found = {"current": state.held.current(), "size0": state.size, "count0": state.counts, "info0": state.info}
    found |= {"position0": state.length, "initial_death": torch.empty_like(state.counts, dtype=torch.int32)}
    return {name: x.cpu().contiguous() for name, x in found.items()}
