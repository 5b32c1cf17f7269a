"""The compiled scan: decisions token by token, heads on threads."""

import ctypes

import torch
from torch import Tensor

from dla.ops.cpu.binding import Arguments, places, sizes
from dla.ops.cpu.decide import carried
from dla.ops.cpu.library import library
from dla.ops.decide.decided import Decided, Seen
from dla.ops.problem import Problem
from dla.ops.rules import FIRST_SCORE, MERGES, SCORES, TIE
from dla.ops.segmentation import Segmentation

ERRORS = {
    1: "an unknown merge rule",
    2: "an unknown score",
    3: "sizes that cannot be",
    4: "too few tensors",
    5: "sequences outside of its tokens",
    6: "carried states that cannot be",
    7: "more than memory holds",
}


class ScanArgs(Arguments):
    """Mirrors the struct of the same name in scan.cpp."""

    _fields_ = Arguments.fields(
        "tokens sequences heads key_heads dk dv capacity block merge score decide threads carried",
        "tau tie first_score",
        "offset length origin k v g beta current matrices size0 count0 info0 position0 score_io boundary_io death "
        "initial_death state_k state_v norm",
    )


@torch.no_grad()
def decide(problem: Problem) -> Decided:
    """Decide every step of every sequence, or follow the given decisions to see what the soft gate needs.

    The scan is sequential work: tensors of a GPU come to the host for it.
    """
    layout, rules, given, dtype = problem.layout, problem.rules, problem.given, problem.dtype

    def host(x: Tensor) -> Tensor:
        return layout.flat(x).to("cpu", dtype).contiguous()

    k, v = host(problem.k), host(problem.v)
    g, beta = None if problem.g is None else host(problem.g), None if problem.beta is None else host(problem.beta)
    if given is None:
        score = v.new_zeros(v.shape[:2])
        boundary = torch.zeros(score.shape, dtype=torch.bool)
    else:
        score, boundary = host(given.score), layout.flat(given.boundary).cpu().contiguous()
    death = torch.full(score.shape, -1, dtype=torch.int32)
    seen = Seen.empty(k, v) if problem.soft else None
    before = carried(problem)
    if problem.state is not None and rules.capacity is not None and rules.merge != "density" and given is None:
        before["matrices"] = problem.state.dense().cpu().contiguous()
    tensors: dict[str, Tensor | None] = {**places(problem), **before, "k": k, "v": v, "g": g, "beta": beta}
    tensors |= {"score_io": score, "boundary_io": boundary, "death": death}
    if seen is not None:
        tensors |= {"state_k": seen.state_k, "state_v": seen.state_v, "norm": seen.norm}
    counts = before.get("count0")
    numbers = sizes(problem) | {
        "capacity": rules.capacity or 0,
        "block": rules.block or 0,
        "merge": MERGES.index(rules.merge),
        "score": SCORES.index(rules.score),
        "decide": int(given is None),
        "carried": 0 if counts is None else counts.shape[2],
    }
    run(tensors, numbers, rules.tau, dtype)
    if given is None:
        score, boundary, death = (layout.unflat(x) for x in (score, boundary, death))
        lengths = layout.lengths if layout.packed else None
        given = Segmentation(score, boundary, death, lengths, counts, before.get("initial_death"))
        given = given if problem.device.type == "cpu" else given.to(problem.device)
    return Decided(given, None if seen is None else seen.to(problem.device))


def run(tensors: dict[str, Tensor | None], numbers: dict[str, int], tau: float, dtype: torch.dtype) -> None:
    """Call the scan on CPU tensors that are contiguous and stay alive during the call."""
    lib = library()
    assert lib is not None
    args = ScanArgs(**numbers, tau=tau, tie=TIE, first_score=FIRST_SCORE)
    args.point(tensors)
    failed = (lib.dla_scan_f64 if dtype == torch.float64 else lib.dla_scan_f32)(ctypes.byref(args))
    if failed:
        raise ValueError(f"the compiled scan was given {ERRORS.get(failed, f'something wrong (code {failed})')}")
