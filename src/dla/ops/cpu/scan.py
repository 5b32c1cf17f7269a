"""The compiled scan: decisions token by token, heads on threads."""

import ctypes

import torch
from torch import Tensor

from dla.ops.cpu.library import library
from dla.ops.decide.decided import Decided, Seen
from dla.ops.problem import Problem
from dla.ops.rules import FIRST_SCORE, MERGES, SCORES, TIE
from dla.ops.segmentation import Segmentation

_INTS = ("tokens", "sequences", "heads", "key_heads", "dk", "dv", "capacity", "block")
_CHOICES = ("merge", "score", "decide", "threads", "carried")
_POINTERS = ("offset", "length", "origin", "k", "v", "g", "beta")
_CARRIED = ("current", "matrices", "size0", "count0", "info0", "position0")
_RESULTS = ("score_io", "boundary_io", "death", "initial_death", "state_k", "state_v", "norm")
ERRORS = {
    1: "an unknown merge rule",
    2: "an unknown score",
    3: "sizes that cannot be",
    4: "too few tensors",
    5: "sequences outside of its tokens",
    6: "carried states that cannot be",
    7: "more than memory holds",
}


class ScanArgs(ctypes.Structure):
    """Mirrors the struct of the same name in scan.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (*_INTS, *_CHOICES)),
        *((name, ctypes.c_double) for name in ("tau", "tie", "first_score")),
        *((name, ctypes.c_void_p) for name in (*_POINTERS, *_CARRIED, *_RESULTS)),
    ]


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
    carried = _carried(problem)
    places = {"offset": layout.offsets, "length": layout.lengths, "origin": layout.origins}
    tensors: dict[str, Tensor | None] = {name: torch.tensor(x, dtype=torch.int64) for name, x in places.items()}
    tensors |= {"k": k, "v": v, "g": g, "beta": beta, "score_io": score, "boundary_io": boundary, "death": death}
    tensors |= carried
    if seen is not None:
        tensors |= {"state_k": seen.state_k, "state_v": seen.state_v, "norm": seen.norm}
    numbers = {
        "tokens": v.shape[0],
        "sequences": layout.sequences,
        "heads": v.shape[1],
        "key_heads": k.shape[1],
        "dk": k.shape[2],
        "dv": v.shape[2],
        "capacity": rules.capacity or 0,
        "block": rules.block or 0,
        "merge": MERGES.index(rules.merge),
        "score": SCORES.index(rules.score),
        "decide": int(given is None),
        "carried": carried["count0"].shape[2] if carried else 0,
    }
    run(tensors, numbers, rules.tau, dtype)
    if given is None:
        initial = carried.get("initial_death")
        score, boundary, death = (layout.unflat(x) for x in (score, boundary, death))
        lengths = layout.lengths if layout.packed else None
        given = Segmentation(score, boundary, death, lengths, carried.get("count0"), initial)
        given = given if problem.device.type == "cpu" else given.to(problem.device)
    return Decided(given, None if seen is None else seen.to(problem.device))


def _carried(problem: Problem) -> dict[str, Tensor]:
    """What the scan needs of the states carried in."""
    state = problem.state
    if state is None:
        return {}
    found = {
        "current": state.held.current(),
        "size0": state.size,
        "count0": state.counts,
        "info0": state.info,
        "position0": state.length,
        "initial_death": torch.empty_like(state.counts, dtype=torch.int32),
    }
    if problem.rules.capacity is not None and problem.rules.merge != "density" and problem.given is None:
        found["matrices"] = state.dense()
    return {name: x.cpu().contiguous() for name, x in found.items()}


def run(tensors: dict[str, Tensor | None], numbers: dict[str, int], tau: float, dtype: torch.dtype) -> None:
    """Call the scan on CPU tensors that are contiguous and stay alive during the call."""
    lib = library()
    assert lib is not None
    pointers = {name: x.data_ptr() for name, x in tensors.items() if x is not None}
    constants = {"tau": tau, "tie": TIE, "first_score": FIRST_SCORE, "threads": torch.get_num_threads()}
    args = ScanArgs(**numbers, **constants, **pointers)
    failed = (lib.dla_scan_f64 if dtype == torch.float64 else lib.dla_scan_f32)(ctypes.byref(args))
    if failed:
        raise ValueError(f"the compiled scan was given {ERRORS.get(failed, f'something wrong (code {failed})')}")
