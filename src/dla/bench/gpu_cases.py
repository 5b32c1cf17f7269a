"""The cases in which kernels are checked, on a GPU and in Triton's interpreter, and how each calls its operator."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from dla.inspect.streams import correlated
from dla.ops import dynamic_linear_attention, linear_attention, log_linear_attention
from dla.ops.backends import Backend
from dla.ops.problem import Layout, MemoryKind, Problem
from dla.ops.rules import SCORES, SLOT_ORDERS, Rules, Score, SlotOrder
from dla.ops.segmentation import Segmentation

MEMORIES: tuple[MemoryKind, ...] = get_args(MemoryKind)
OPERATORS: dict[str, Callable[..., Any]] = {
    "single": linear_attention,
    "log_linear": log_linear_attention,
    "dynamic": dynamic_linear_attention,
}
TAU: dict[Score, float] = {"token": 0.6, "state": 0.25}  # by which some tokens of a stream open a state, others do not
TEMPERATURE = 0.2  # of the soft gate

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
    soft: bool = False  # the soft gate, of training

    def __str__(self) -> str:
        named = ["g"] * self.g + ["beta"] * self.beta + ["routed"] * self.routed + ["soft"] * self.soft
        if self.memory == "dynamic":
            named += [self.score, self.slot_order] + ["blocks"] * (self.block is not None)
        return " ".join([self.memory, *named])

    @property
    def kind(self) -> str:
        """Those that gradients are told of together."""
        named = ["delta steps"] * self.beta + ["routed"] * self.routed + ["soft gate"] * self.soft
        return ", ".join([self.memory, *named])


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
    twice: bool = False  # gradients are made once more, which no bit of them may tell
    oracle: Backend = "reference"  # of gradients, in float64


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


def trained_cases() -> Iterator[Case]:
    """What has kernels of gradients of its own; scores matter to the soft gate alone."""
    for memory, g, beta in product(MEMORIES, (True, False), (False, True)):
        if memory != "dynamic":
            yield Case(memory, g, beta)
            continue
        for routed, soft in product((False, True), (False, True)):
            order: SlotOrder = "chronological" if g else "recency"
            yield Case("dynamic", g, beta, routed, "token" if g else "state", order, soft=soft)
    yield Case("dynamic", block=5)


def few_trained_cases() -> list[Case]:
    """Every memory with decays and with delta steps, the dynamic one also routed, softly, and both."""
    found = [Case(memory, beta=beta) for memory, beta in product(MEMORIES, (False, True))]
    found += [Case(beta=beta, routed=True, slot_order="recency") for beta in (False, True)]
    found += [Case(beta=beta, soft=True) for beta in (False, True)]
    return [*found, *(Case(beta=beta, routed=True, soft=True) for beta in (False, True))]


def long_cases() -> list[Case]:
    """With delta steps states of few tokens are held in another way than long ones: what goes from one to the other."""
    return [Case(beta=True), Case(g=False, beta=True, slot_order="recency", soft=True)]


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


def call(case: Case, x: Inputs, sizes: Sizes, *, output_final_state: bool = True, **options: Any) -> tuple[Tensor, Any]:
    """The operator of a case: outputs, and the state after them, unless there is none with the soft gate."""
    if case.memory == "dynamic":
        options |= {**rules(case, sizes), "slot_order": case.slot_order}
    if case.soft:
        options["temperature"] = TEMPERATURE
    o, state = OPERATORS[case.memory](**x, output_final_state=output_final_state and not case.soft, **options)
    return o, state


def asked(case: Case, x: Inputs, sizes: Sizes, given: Segmentation | None = None) -> Problem:
    """What the first stage of a case is asked: decisions, and what the soft gate's scores see."""
    batch, time = x["v"].shape[:2]
    layout, how = Layout.of(batch, time, None), Rules(**rules(case, sizes))
    temperature = TEMPERATURE if case.soft else None
    return Problem(memory="dynamic", layout=layout, **deciding(x), rules=how, temperature=temperature, given=given)


def deciding(x: Mapping[str, Tensor]) -> dict[str, Any]:
    """Those of the inputs that decisions are made from."""
    return {name: x[name] for name in ("k", "v", "g", "beta") if name in x}


def tokens(x: Inputs, start: int, end: int) -> Inputs:
    return {name: each if name == "route" else each[:, start:end] for name, each in x.items()}


def both(case: Case, sizes: Sizes, dtype: torch.dtype, device: str, seed: int) -> tuple[Inputs, Inputs]:
    """Inputs as the backend gets them, and the same numbers in float64 on the CPU."""
    made = inputs(case, sizes, seed)
    wide = ("lam", "g", "beta", "route")  # never halves
    given = {name: x.to(device, torch.float32 if name in wide else dtype) for name, x in made.items()}
    return given, {name: x.double().cpu() for name, x in given.items()}
