"""Inputs, option combinations and comparisons that the operator tests share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dla import ops

MODES = {"plain": (), "decay": ("g",), "delta": ("beta",), "gated_delta": ("g", "beta")}
OPERATORS = ("linear", "log_linear", "dynamic")
BACKENDS = ("reference", "chunked")

Inputs = dict[str, Tensor]

_ARGUMENTS = {
    "linear": ("q", "k", "v", "g", "beta"),
    "log_linear": ("q", "k", "v", "lam", "g", "beta"),
    "dynamic": ("q", "k", "v", "lam", "g", "beta", "route"),
    "segment": ("k", "v", "g", "beta"),
}
_RULES = ("tau", "capacity", "merge", "score", "block")


# --- inputs ----------------------------------------------------------------------------------------------------------


def make_inputs(
    mode: str = "decay",
    *,
    B: int = 2,
    T: int = 40,
    H: int = 2,
    Hk: int | None = None,
    dk: int = 4,
    dv: int = 3,
    width: int = 5,
    routed: bool = False,
    noise: float = 0.25,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Noisy piecewise-constant keys and values, so that at tau = 0.6 some tokens open a state and some do not.

    With a delta step the keys have norm one and beta lies in (0, 1), as the recurrence needs.
    """
    random_ = torch.Generator().manual_seed(seed)
    Hk = H if Hk is None else Hk

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random_, dtype=torch.float64)

    def segments(heads: int, dim: int) -> Tensor:
        return normal(B, max(T, 1), heads, dim).gather(
            1, piece[:, :, None, None].expand(B, T, heads, dim)
        ) + noise * normal(B, T, heads, dim)

    piece = (torch.rand(B, T, generator=random_) < 0.25).long().cumsum(1).clamp(max=max(T - 1, 0))
    x = {"q": normal(B, T, Hk, dk), "k": segments(Hk, dk), "v": segments(H, dv)}
    x["lam"] = F.softplus(normal(B, T, H, width))
    if "g" in MODES[mode]:
        x["g"] = -F.softplus(normal(B, T, H) - 2)
    if "beta" in MODES[mode]:
        x["k"] = F.normalize(x["k"], dim=-1)
        x["beta"] = torch.sigmoid(normal(B, T, H))
    if routed:
        x["route"] = 4 * torch.rand(B, T, H, generator=random_, dtype=torch.float64)
    return cast(x, dtype)


def cast(x: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: value.to(dtype) for name, value in x.items()}


def cut(x: Inputs, start: int, end: int) -> Inputs:
    """Tokens start to end."""
    return {name: value if value.dim() == 1 else value[:, start:end] for name, value in x.items()}


def pick(x: Inputs, batch: int) -> Inputs:
    """One sequence of a batch, as a batch of one."""
    return {name: value if value.dim() == 1 else value[batch : batch + 1] for name, value in x.items()}


def arguments(operator: str, x: Inputs) -> Inputs:
    """Those of the inputs that the operator takes."""
    return {name: x[name] for name in _ARGUMENTS[operator] if name in x}


def call(operator: str, x: Inputs, **options: Any) -> tuple[Tensor, Any]:
    """(o, state) of one of the three operators."""
    function = getattr(ops, f"{operator}_attention" if operator != "dynamic" else "dynamic_linear_attention")
    return function(**arguments(operator, x), **options)


def segment(x: Inputs, **options: Any) -> Any:
    return ops.segment(**arguments("segment", x), **options)


# --- combinations of options -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One way to call the dynamic operator."""

    mode: str = "decay"
    soft: bool = False
    merge: str = "density"
    score: str = "token"
    capacity: int | None = 3
    slot_order: str = "chronological"
    routed: bool = False
    grouped: bool = False
    block: int | None = None
    narrow: bool = False
    packed: bool = False

    def __str__(self) -> str:
        """The mode and what differs from the defaults."""
        parts = [self.mode]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(field.name if value is True else f"{field.name}={value}")
        return ",".join(parts)

    def inputs(self, T: int, seed: int = 0, **shape: Any) -> Inputs:
        shape = {"B": 1 if self.packed else 2, "H": 2, "Hk": 1 if self.grouped else None, **shape}
        width = 2 if self.narrow else (self.capacity or 8)
        x = make_inputs(self.mode, T=T, seed=seed, width=width, routed=self.routed, **shape)
        if "route" in x and seed % 2:
            x["route"] = x["route"][0, 0] if T else torch.ones(x["lam"].shape[2], dtype=x["q"].dtype)
        return x

    def edges(self, T: int) -> list[int] | None:
        """Three sequences, one of them empty."""
        return [0, T // 3, T // 3, T] if self.packed else None

    def packing(self, T: int) -> dict[str, Any]:
        edges = self.edges(T)
        return {} if edges is None else {"cu_seqlens": torch.tensor(edges)}

    def rules(self, T: int) -> dict[str, Any]:
        """The options of ``segment``."""
        rules = {"tau": 0.6, "capacity": self.capacity, "merge": self.merge, "score": self.score, "block": self.block}
        if self.score == "state":
            rules["tau"] = 0.15
        return rules | self.packing(T)

    def options(self, T: int) -> dict[str, Any]:
        """The options of the operator."""
        options = self.rules(T) | {"slot_order": self.slot_order}
        return options | {"temperature": 0.1} if self.soft else options


VALUES: dict[str, tuple[Any, ...]] = {
    "mode": tuple(MODES),
    "soft": (False, True),
    "merge": ("density", "similarity", "ward"),
    "score": ("token", "state"),
    "capacity": (2, 3, 5, None),
    "slot_order": ("chronological", "recency"),
    "routed": (False, True),
    "grouped": (False, True),
    "block": (None, 3),
    "narrow": (False, True),
    "packed": (False, True),
}


def product_cases() -> list[Case]:
    """All combinations of what decides and what is written; the way of reading is drawn for each."""
    draw, cases = random.Random(0), []
    first = ("mode", "soft", "merge", "score", "capacity")
    for values in itertools.product(*(VALUES[name] for name in first)):
        rest = {name: draw.choice(options) for name, options in VALUES.items() if name not in first}
        rest["block"] = draw.choice((None, None, None, 3))
        cases.append(Case(**dict(zip(first, values, strict=True)), **rest))
    return cases


def all_cases() -> Iterator[Case]:
    """The whole product."""
    for values in itertools.product(*VALUES.values()):
        yield Case(**dict(zip(VALUES, values, strict=True)))


def sample_cases(count: int, seed: int = 0, **fixed: Any) -> list[Case]:
    """Seeded draws from the whole product, some fields fixed; every mode as often as any other."""
    draw, cases = random.Random(seed), []
    for i in range(count):
        values = {name: draw.choice(options) for name, options in VALUES.items()}
        values |= {"mode": tuple(MODES)[i % len(MODES)], "block": draw.choice((None, None, None, 3))}
        cases.append(replace(Case(**values), **fixed))
    return cases


# --- comparisons -----------------------------------------------------------------------------------------------------


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Equal up to ``tolerance`` times the largest entry expected (at least 1), shapes too."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.isfinite().all(), "not finite"
    if expected.numel():
        difference = (actual.double() - expected.double()).abs().max().item()
        bound = tolerance * max(1.0, expected.abs().max().item())
        assert difference <= bound, f"differs by {difference:.3e}, allowed {bound:.3e}"


def assert_same_decisions(actual: Any, expected: Any, tolerance: float = 1e-7) -> None:
    """Two segmentations with equal boundaries and merges, and scores within ``tolerance``.

    (A score near zero is a square root of a difference from one: it has half the digits.)
    """
    assert actual.boundary.dtype == torch.bool
    assert not actual.merged.dtype.is_floating_point
    for name in ("boundary", "merged"):
        a, b = getattr(actual, name).long(), getattr(expected, name).long()
        assert a.equal(b), f"{name} differs at [batch, time, head, actual, expected] {_where(a, b)}"
    assert_close(actual.score, expected.score, tolerance)


def _where(a: Tensor, b: Tensor) -> list[list[int]]:
    """The indices of the first few differences, and both values."""
    return [[*i, a[tuple(i)].item(), b[tuple(i)].item()] for i in (a != b).nonzero().tolist()[:5]]


def assert_same_state(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Two states of one kind that hold the same."""
    assert type(actual) is type(expected)
    assert_close(actual.dense(), expected.dense(), tolerance)
    if hasattr(actual, "counts"):
        assert actual.counts.equal(expected.counts)
        assert_close(actual.scores, expected.scores, max(tolerance, 1e-5))


def state_bytes(state: Any) -> dict[str, Tensor]:
    """Copies of everything a state shows, to tell whether it was changed."""
    shown = {"dense": state.dense()}
    if hasattr(state, "counts"):
        shown |= {"counts": state.counts, "scores": state.scores}
    return {name: value.clone() for name, value in shown.items()}
