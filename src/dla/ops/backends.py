"""Who runs what, and why not somebody faster: stages x implementations.

``backend=`` names who attends and decodes, and raises with the reason where they cannot. Decisions are made by the
fastest that can; only the reference and Triton decide for themselves. ``segment``, which does nothing else, asks the
named one first. A Triton kernel that does not compile is told of once, and who comes next runs.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dla.names import check_choice
from dla.ops import decode as torch_decode
from dla.ops.chunked import attend as chunked
from dla.ops.cpu import attend as cpu_attend
from dla.ops.cpu import binding, library
from dla.ops.cpu import decide as cpu_decide
from dla.ops.cpu import decode as cpu_decode
from dla.ops.cpu import scan as compiled_scan
from dla.ops.decide import scan as torch_scan
from dla.ops.decide.decided import Decided
from dla.ops.gpu import attend as gpu_attend
from dla.ops.gpu import decide as gpu_decide
from dla.ops.gpu import decode as gpu_decode
from dla.ops.gpu import runtime as gpu
from dla.ops.problem import Problem, likeness
from dla.ops.reference import batch as reference
from dla.ops.state import State

Backend = Literal["auto", "reference", "chunked", "cpu", "triton"]
Stage = Literal["decide", "attend", "decode"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Implementation:
    backend: str
    run: Callable[..., Any]
    missing: Callable[[], str | None] = lambda: None  # why it cannot run on this machine
    unable: Callable[[Problem], str | None] = lambda problem: None  # why it cannot run this problem
    kind: str = ""  # where a backend has several
    interprets: bool = False  # tensors on the CPU, for those who name it: nobody waits for that without wanting to

    @property
    def label(self) -> str:
        return f"{self.backend} {self.kind}".strip()

    def why_not(self, problem: Problem) -> str | None:
        return self.missing() or self.unable(problem)


def _triton(stage: Any) -> Implementation:
    """The row of a stage's module in ops/gpu."""
    run = getattr(stage, stage.__name__.rpartition(".")[2])
    return Implementation("triton", run, gpu.missing, stage.unable, interprets=True)


# fastest first
TABLE: dict[Stage, tuple[Implementation, ...]] = {
    "decide": (
        _triton(gpu_decide),
        Implementation("cpu", cpu_decide.decide, library.missing, cpu_decide.unable, "by chunks"),
        Implementation("cpu", compiled_scan.decide, library.missing, kind="token by token"),
        Implementation("chunked", torch_scan.decide),
        Implementation("reference", reference.decide),
    ),
    "attend": (
        _triton(gpu_attend),
        Implementation("cpu", cpu_attend.attend, library.missing, binding.unable),
        Implementation("chunked", chunked.attend),
        Implementation("reference", reference.attend),
    ),
    "decode": (
        _triton(gpu_decode),
        Implementation("cpu", cpu_decode.decode, library.missing, cpu_decode.unable),
        Implementation("chunked", torch_decode.decode),
        Implementation("reference", reference.decode),
    ),
}


@dataclass(frozen=True)
class Ran:
    """One stage of a call: who ran it, and why not those that would have been faster."""

    stage: Stage
    backend: str
    kind: str = ""  # where a backend has several
    passed_over: dict[str, str] = field(default_factory=dict)


_failed: dict[tuple[object, ...], str] = {}  # by stage, implementation and kind of problem: what does not compile
_ran: ContextVar[list[Ran] | None] = ContextVar("dla_ran", default=None)


@contextmanager
def record() -> Iterator[list[Ran]]:
    """Collects which implementation every stage of every call used: ``with dla.record() as ran: ...``."""
    ran: list[Ran] = []
    token = _ran.set(ran)
    try:
        yield ran
    finally:
        _ran.reset(token)


def recording() -> bool:
    """Whether somebody collects what runs."""
    return _ran.get() is not None


def backends() -> list[dict[str, str]]:
    """Every stage and implementation, fastest first, and whether it can run on this machine."""
    return [
        {"stage": stage, "backend": row.label, "here": row.missing() or "yes"}
        for stage, rows in TABLE.items()
        for row in rows
    ]


def run(problem: Problem, backend: Backend) -> tuple[Tensor, State | None]:
    """Decide and attend, or decode: outputs and the state after them, if there is one."""
    check_choice("backend", backend, BACKENDS)
    with _no_autocast(problem.device.type):
        if problem.decodes:
            decoded: tuple[Tensor, State] = _run("decode", problem, backend)
            return decoded
        decided = None
        if problem.memory == "dynamic":
            if backend != "auto":
                _choose("attend", problem, backend)  # who cannot is told so before anything is decided
            decided = decide(problem, backend if backend in ("reference", "triton") else "auto")
        attended: tuple[Tensor, State | None] = _run("attend", problem, backend, decided)
        return attended


def decode_again(state: Any, operands: Sequence[Tensor | None], options: tuple[object, ...]) -> Tensor | None:
    """The output of a decoding step, by who ran the last one on its state; None if it is not like that one."""
    last = state.decoder
    if recording() or last.like != likeness(operands, options) or not last.fits(state):
        return None
    output: Tensor = last.step(state, operands)
    return output


def decide(problem: Problem, backend: Backend) -> Decided:
    """The first stage alone."""
    check_choice("backend", backend, BACKENDS)
    if problem.given is not None and not problem.soft:
        return Decided(problem.given)
    with _no_autocast(problem.device.type):
        decided: Decided = _run("decide", problem, backend)
        return decided


def _no_autocast(device: str) -> AbstractContextManager[Any]:
    """Operators choose their own precision; where autocast is off, there is nothing to switch off."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else NOTHING


def _run(stage: Stage, problem: Problem, backend: Backend, *decided: Decided | None) -> Any:
    """By the first that can; who comes next, if a kernel does not compile."""
    while True:
        row, passed_over = _choose(stage, problem, backend)
        try:
            made = row.run(problem, *decided)
        except gpu.CannotCompileError as error:
            reason = f"its kernel {error}"
            _failed[stage, row.label, gpu.kind(problem)] = reason
            warnings.warn(f"{row.label} cannot {stage} here, another backend does: {reason}", RuntimeWarning, 2)
            continue
        if (ran := _ran.get()) is not None:
            ran.append(Ran(stage, row.backend, row.kind, passed_over))
        return made


def _choose(stage: Stage, problem: Problem, backend: Backend) -> tuple[Implementation, dict[str, str]]:
    """The first that can run, of the named backend alone unless decisions are to be made; and why no other."""
    rows = TABLE[stage]
    if backend != "auto":
        named = [row for row in rows if row.backend == backend]
        rows = (*named, *(row for row in rows if row.backend != backend)) if stage == "decide" else tuple(named)
    passed_over: dict[str, str] = {}
    for row in rows:
        if row.interprets and row.backend != backend and problem.device.type == "cpu":
            reason: str | None = "the tensors are on the CPU"
        else:
            reason = _why_not(stage, row, problem)
        if reason is None:
            return row, passed_over
        passed_over[row.label] = reason
    able = dict.fromkeys(row.backend for row in TABLE[stage] if _why_not(stage, row, problem) is None)
    reasons = "; ".join(passed_over.values())
    raise ValueError(f"backend={backend!r} cannot {stage} this: {reasons}. Backends that can: {', '.join(able)}")


def _why_not(stage: Stage, row: Implementation, problem: Problem) -> str | None:
    reason = row.why_not(problem)
    if reason is None and _failed:
        reason = _failed.get((stage, row.label, gpu.kind(problem)))
    return reason
