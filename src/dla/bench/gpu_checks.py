"""Whether a backend computes what the reference defines, stage by stage; gradients are checked in ``gpu_gradients.py``.

The reference runs in float64 on the CPU. Decisions are compared by themselves; outputs of a prefill under the
reference's decisions, for rounding may turn one that is near its threshold; and a decoding step makes its own.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor

from dla.bench.gpu_cases import Case, Sizes, asked, both, call, deciding, rules, tokens
from dla.ops import backends, segment
from dla.ops.backends import Ran, record
from dla.ops.segmentation import Segmentation

FLIPS = 1e-3  # share of decisions that rounding may turn, near a threshold or a tie
WORST = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # errors, as parts of the largest output

# "seen": what the soft gate's scores see, which decisions are made from
What = Literal["decide", "seen", "attend", "decode", "gradients"]


@dataclass(frozen=True)
class Checked:
    """Of one check. ``error``: the largest difference, as a part of the largest output, or of decisions that differ."""

    stage: What
    case: Case
    error: float | None = None
    bound: float = 0.0
    refused: str = ""  # why the backend does not run it
    failed: str = ""  # what else is wrong
    dtype: str = "float32"
    tensors: Mapping[str, float] = field(default_factory=dict)  # the error of each, where several are compared

    @property
    def holds(self) -> bool:
        if self.failed or self.refused:
            return not self.failed
        return self.error is not None and self.error <= self.bound

    def figures(self) -> dict[str, Any]:
        """For JSON, which has no infinite numbers."""
        error = None if self.error is None else finite(self.error)
        return {**asdict(self), "error": error, "tensors": {name: finite(x) for name, x in self.tensors.items()}}

    @classmethod
    def of(cls, figures: dict[str, Any]) -> Self:
        """The one that ``figures`` are of."""
        return cls(**{**figures, "case": Case(**figures["case"])})

    @classmethod
    def of_tensors(cls, stage: What, case: Case, dtype: torch.dtype, errors: dict[str, float], bound: float) -> Self:
        """Of several tensors: as wrong as the worst of them."""
        return cls(stage, case, max(errors.values()), bound, dtype=named(dtype), tensors=errors)

    @property
    def worst(self) -> str:
        """The tensor that is furthest off, if there are several."""
        return max(self.tensors, key=lambda name: self.tensors[name], default="")

    def row(self) -> dict[str, str | None]:
        """Of a table."""
        row = {"stage": self.stage, "case": str(self.case), "dtype": self.dtype, "worst in": self.worst or None}
        return {**row, "error": number(self.error), "allowed": number(self.bound), "failed": self.failed or None}


def finite(error: float) -> float:
    """The largest number for one that is infinite."""
    return min(error, sys.float_info.max)


def number(error: float | None) -> str | None:
    """As people read it."""
    return None if error is None else f"{error:.1e}" if error <= 1e6 else "inf"


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        return Checked("decode", case, refused=refusal("decode", backend, error), dtype=named(dtype))
    off = difference(torch.cat(found, 1), expected[:, sizes.prompt :])
    return Checked("decode", case, off, WORST[dtype], dtype=named(dtype))


def attended(
    case: Case, sizes: Sizes, backend: Any, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Checked:
    """A prefill, under the reference's decisions."""
    given, exact = both(case, sizes, dtype, device, seed)
    here, there = decisions(case, exact, sizes, device)
    expected, _ = call(case, exact, sizes, backend="reference", **here)
    try:
        found, _ = call(case, given, sizes, backend=backend, **there)
    except ValueError as error:
        return Checked("attend", case, refused=refusal("attend", backend, error), dtype=named(dtype))
    return Checked("attend", case, difference(found, expected), WORST[dtype], dtype=named(dtype))


def decided(
    case: Case, sizes: Sizes, backend: Any, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Checked:
    """The share of tokens that open a state, or see its start end, in one of the two alone."""
    given, exact = both(case, sizes, dtype, device, seed)
    expected = segment(**deciding(exact), **rules(case, sizes), backend="reference")
    with record() as ran:
        if case.soft:  # what decisions are made from is made with them
            found = backends.decide(asked(case, given, sizes), backend).segmentation.to("cpu")
        else:
            found = segment(**deciding(given), **rules(case, sizes), backend=backend).to("cpu")
    if ran[0].backend != backend:
        return Checked("decide", case, refused=instead(ran[0], backend), dtype=named(dtype))
    differ = (found.boundary != expected.boundary) | (found.death != expected.death)
    return Checked("decide", case, float(differ.float().mean()), FLIPS, dtype=named(dtype))


def decisions(case: Case, exact: Any, sizes: Sizes, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reference's, as options of the reference and of a backend on a device."""
    if case.memory != "dynamic":
        return {}, {}
    made: Segmentation = segment(**deciding(exact), **rules(case, sizes), backend="reference")
    return {"segmentation": made}, {"segmentation": made.to(device)}


def refusal(stage: str, backend: str, error: ValueError) -> str:
    """What a backend says to a case that it does not run; any other error is one."""
    if not str(error).startswith(f"backend={backend!r} cannot {stage}"):
        raise error
    return str(error)


def instead(ran: Ran, backend: str) -> str:
    """Why it was not this backend that decided."""
    return ran.passed_over.get(backend, f"{ran.backend} ran instead")


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest, as a part of the largest number expected; infinite where something is not finite."""
    found = found.double().cpu()
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
