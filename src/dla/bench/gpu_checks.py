"""Whether a backend computes what the reference defines: one list of cases for a GPU and for Triton's interpreter.

The reference runs in float64 on the CPU. Decisions are compared by themselves; outputs of a prefill under the
reference's decisions, for rounding may turn one that is near its threshold; and a decoding step makes its own.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from dla.inspect.streams import correlated
from dla.ops import dynamic_linear_attention, linear_attention, log_linear_attention, segment
from dla.ops.backends import Stage, record
from dla.ops.problem import MemoryKind
from dla.ops.rules import SCORES, SLOT_ORDERS, Score, SlotOrder

MEMORIES: tuple[MemoryKind, ...] = get_args(MemoryKind)
OPERATORS: dict[str, Callable[..., Any]] = {
    "single": linear_attention,
    "log_linear": log_linear_attention,
    "dynamic": dynamic_linear_attention,
}
FLIPS = 1e-3  # share of decisions that rounding may turn, near a threshold or a tie
TAU: dict[Score, float] = {"token": 0.6, "state": 0.25}  # by which some tokens of a stream open a state, others do not
WORST = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # errors, as parts of the largest output

Inputs = dict[str, Tensor]  # of an operator, by name


@dataclass(frozen=True)
class Case:
    """One way to call an operator."""

    memory: MemoryKind = "dynamic"
    g: bool = True
    beta: bool = False
    routed: bool = False
    score: Score = "token"
    slot_order: SlotOrder = "chronological"
    block: int | None = None

    def __str__(self) -> str:
        named = ["g"] * self.g + ["beta"] * self.beta + ["routed"] * self.routed
        if self.memory == "dynamic":
            named += [self.score, self.slot_order] + ["blocks"] * (self.block is not None)
        return " ".join([self.memory, *named])


@dataclass(frozen=True)
class Sizes:
    """Of a check: tiny ones for the interpreter, those of a layer for a GPU. width: of lam."""

    batch: int = 3
    length: int = 56
    heads: int = 1
    key_heads: int = 1
    dk: int = 16
    dv: int = 16
    width: int = 3
    capacity: int = 4
    prompt: int = 12  # tokens before the first one that is decoded


ON_A_GPU = Sizes(batch=2, length=200, heads=4, key_heads=2, dk=48, dv=80, width=6, capacity=8, prompt=150)
INTERPRETED = Sizes(batch=1, length=24)


@dataclass(frozen=True)
class Checked:
    """Of one check. ``error``: the largest difference, as a part of the largest output, or of decisions that differ."""

    stage: Stage
    case: Case
    error: float | None = None
    bound: float = 0.0
    refused: str = ""  # why the backend does not run it

    @property
    def holds(self) -> bool:
        return bool(self.refused) or (self.error is not None and self.error <= self.bound)

    def figures(self) -> dict[str, Any]:
        """For JSON, which has no infinite numbers."""
        error = None if self.error is None else min(self.error, sys.float_info.max)
        return {**asdict(self), "error": error}

    @classmethod
    def of(cls, figures: dict[str, Any]) -> "Checked":
        """The one that ``figures`` are of."""
        return cls(**{**figures, "case": Case(**figures["case"])})

    def row(self) -> dict[str, Any]:
        """Of a table."""
        return {"stage": self.stage, "case": str(self.case), "error": self.error, "allowed": self.bound}


def cases() -> Iterator[Case]:
    """The whole product of what changes a decoding step."""
    for memory, g, beta in product(MEMORIES, (False, True), (False, True)):
        if memory != "dynamic":
            yield Case(memory, g, beta)
            continue
        for routed, score, order in product((False, True), SCORES, SLOT_ORDERS):
            yield Case("dynamic", g, beta, routed, score, order)
    yield Case("dynamic", block=5)


def few_cases() -> list[Case]:
    """Cases in which any two choices occur together, more or less: a fifth of the product."""
    return [
        Case("single", g=False),
        Case("single", beta=True),
        Case("log_linear", g=True),
        Case("log_linear", g=False, beta=True),
        Case("dynamic", g=True),
        Case("dynamic", g=False, score="state", slot_order="recency"),
        Case("dynamic", g=True, beta=True, routed=True, slot_order="recency"),
        Case("dynamic", g=False, beta=True, routed=True, score="state"),
    ]


def inputs(case: Case, sizes: Sizes, seed: int = 0) -> Inputs:
    """The operands of a case, in float64."""
    of = {name: getattr(sizes, name) for name in ("batch", "length", "heads", "key_heads", "dk", "dv")}
    s = correlated(seed, **of, lam_width=sizes.width, beta=case.beta, dtype=torch.float64)
    x = {"q": s.q, "k": s.k, "v": s.v, "lam": s.lam, "g": s.g if case.g else None, "beta": s.beta}
    if case.memory == "single":
        del x["lam"]
    if case.routed:
        x["route"] = torch.linspace(1, 4, sizes.heads, dtype=torch.float64)
    return {name: each for name, each in x.items() if each is not None}


def rules(case: Case, sizes: Sizes) -> dict[str, Any]:
    """What decides."""
    return {"tau": TAU[case.score], "capacity": sizes.capacity, "score": case.score, "block": case.block}


def call(case: Case, x: Inputs, sizes: Sizes, **options: Any) -> tuple[Tensor, Any]:
    """The operator of a case: outputs, and the state after them."""
    if case.memory == "dynamic":
        options |= {**rules(case, sizes), "slot_order": case.slot_order}
    o, state = OPERATORS[case.memory](**x, output_final_state=True, **options)
    return o, state


def tokens(x: Inputs, start: int, end: int) -> Inputs:
    return {name: each if name == "route" else each[:, start:end] for name, each in x.items()}


def both(case: Case, sizes: Sizes, dtype: torch.dtype, device: str, seed: int) -> tuple[Inputs, Inputs]:
    """Inputs as the backend gets them, and the same numbers in float64 on the CPU."""
    made = inputs(case, sizes, seed)
    wide = ("lam", "g", "beta", "route")  # never halves
    given = {name: x.to(device, torch.float32 if name in wide else dtype) for name, x in made.items()}
    return given, {name: x.double().cpu() for name, x in given.items()}


def decoded(
    case: Case, sizes: Sizes, backend: Any, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Checked:
    """Every token after the prompt, one by one on the state that the prompt left, beside one call of the reference."""
    given, exact = both(case, sizes, dtype, device, seed)
    expected, _ = call(case, exact, sizes, backend="reference")
    _, state = call(case, tokens(given, 0, sizes.prompt), sizes)
    found = []
    try:
        for t in range(sizes.prompt, sizes.length):
            now = tokens(given, t, t + 1)
            found.append(call(case, now, sizes, initial_state=state, inplace=True, backend=backend)[0])
    except ValueError as error:
        return refused("decode", case, backend, error)
    return Checked("decode", case, difference(torch.cat(found, 1), expected[:, sizes.prompt :]), WORST[dtype])


def attended(
    case: Case, sizes: Sizes, backend: Any, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Checked:
    """A prefill, under the reference's decisions."""
    given, exact = both(case, sizes, dtype, device, seed)
    here: dict[str, Any] = {}
    there: dict[str, Any] = {}
    if case.memory == "dynamic":
        made = segment(**deciding(exact), **rules(case, sizes), backend="reference")
        here, there = {"segmentation": made}, {"segmentation": made.to(device)}
    expected, _ = call(case, exact, sizes, backend="reference", **here)
    try:
        found, _ = call(case, given, sizes, backend=backend, **there)
    except ValueError as error:
        return refused("attend", case, backend, error)
    return Checked("attend", case, difference(found, expected), WORST[dtype])


def refused(stage: Stage, case: Case, backend: str, error: ValueError) -> Checked:
    """What a backend says to a case that it does not run; any other error is one."""
    if not str(error).startswith(f"backend={backend!r} cannot {stage}"):
        raise error
    return Checked(stage, case, refused=str(error))


def decided(
    case: Case, sizes: Sizes, backend: Any, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Checked:
    """The share of tokens that open a state, or see its start end, in one of the two alone."""
    given, exact = both(case, sizes, dtype, device, seed)
    expected = segment(**deciding(exact), **rules(case, sizes), backend="reference")
    with record() as ran:
        found = segment(**deciding(given), **rules(case, sizes), backend=backend).to("cpu")
    if ran[0].backend != backend:
        return Checked("decide", case, refused=ran[0].passed_over.get(backend, f"{ran[0].backend} ran instead"))
    differ = (found.boundary != expected.boundary) | (found.death != expected.death)
    return Checked("decide", case, float(differ.float().mean()), FLIPS)


def deciding(x: Inputs) -> dict[str, Any]:
    """Those of the inputs that decisions are made from."""
    return {name: x[name] for name in ("k", "v", "g", "beta") if name in x}


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest, as a part of the largest number expected; infinite where something is not finite."""
    found = found.double().cpu()
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


CHECKS: dict[Stage, Callable[..., Checked]] = {"decide": decided, "attend": attended, "decode": decoded}


def outcomes(
    sizes: Sizes, device: str, dtype: torch.dtype = torch.float32, of: Sequence[Case] | None = None
) -> Iterator[Checked]:
    """Every stage of every case, in Triton."""
    for case, stage in product(list(cases()) if of is None else of, CHECKS):
        if stage != "decide" or case.memory == "dynamic":
            yield CHECKS[stage](case, sizes, "triton", device, dtype)


def main() -> None:
    """A few cases on the CPU, as JSON: for a process that interprets kernels."""
    print(json.dumps([x.figures() for x in outcomes(INTERPRETED, "cpu", of=few_cases())]))


if __name__ == "__main__":
    main()
