"""The third stage in C++: one token of every sequence, on the carried state itself, in float32.

A state keeps the ``Decoder`` of its last step: a step like it finds the kernel's arguments as they were, and sets the
token alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.cpu import binding
from dla.ops.cpu.binding import NUMBERED, run
from dla.ops.cpu.ground import DecodeArgs, Ground
from dla.ops.problem import OPERANDS, Problem
from dla.ops.rules import FIRST_SCORE, TIE
from dla.ops.state import LogLinearState, State
from dla.ops.state.spans import Spans

VALUES = OPERANDS.index("v")


def unable(problem: Problem) -> str | None:
    """Why this kernel cannot run a problem."""
    if problem.memory == "dynamic":
        if problem.rules.capacity is None:
            return "the C++ decoding step needs a capacity"
        if problem.rules.merge != "density" and problem.given is None:
            return f"the C++ decoding step merges by density, this is {problem.rules.merge}"
    return binding.unable(problem)


def decode(problem: Problem) -> tuple[Tensor, State]:
    """The output [N, 1, H, dv] and the state after it, which is the given one if it may be changed."""
    state = problem.state if problem.inplace else problem.state.clone()
    state.decoder = decoder = DECODERS[problem.memory](problem, state)
    return decoder.step(state, problem.operands()), state


class Decoder:
    """One state's steps of one kind: what the kernel is called with, and all that lies where its pointers point.

    It is no part of the state's value: a copy makes its own.
    """

    def __init__(self, problem: Problem, arguments: DecodeArgs, **tensors: Tensor) -> None:
        self.like, self.arguments, self.tensors = problem.like, arguments, tensors
        self.program: Any = None  # of the layer whose steps these are (layers/fused/program.py); False: there is none
        given = [x for x in problem.operands() if x is not None]
        self.plain = all(x.dtype == torch.float32 and x.is_contiguous() for x in given)
        N, H, arguments.dk, arguments.dv = problem.shape
        arguments.memory, arguments.sequences, arguments.heads = NUMBERED.index(problem.memory), N, H
        arguments.key_heads, arguments.scale = problem.k.shape[2], problem.scale
        arguments.width = 0 if problem.lam is None else problem.lam.shape[-1]
        arguments.recency = int(problem.slot_order == "recency")
        arguments.point({**dict.fromkeys(OPERANDS), **tensors})

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def fits(self, state: Any) -> bool:
        """Whether the state still is where it was."""
        raise NotImplementedError

    def step(self, state: Any, operands: Sequence[Any]) -> Tensor:
        """The output of a token [N, 1, H, dv]; q, k, v, lam, g, beta and route are like those of the first one."""
        arguments, given = self.arguments, operands if self.plain else straightened(operands)
        o = torch.empty_like(given[VALUES])
        for name, x in zip(OPERANDS, given, strict=True):
            if x is not None:
                setattr(arguments, name, x.data_ptr())
        arguments.o, arguments.threads = o.data_ptr(), torch.get_num_threads()
        self.begin(state)
        run("dla_decode", arguments)
        self.end(state)
        return o if self.plain else o.to(operands[VALUES].dtype)

    def begin(self, state: Any) -> None:
        """What the kernel cannot do for itself before it takes a token in: more room."""

    def end(self, state: Any) -> None:
        """What it left to be done."""


class OfOne(Decoder):
    """One matrix a head."""

    def __init__(self, problem: Problem, state: Any) -> None:
        super().__init__(problem, DecodeArgs(states=1), matrices=state.matrix, length=state.length)

    def fits(self, state: Any) -> bool:
        return state.matrix is self.tensors["matrices"] and state.length is self.tensors["length"]


class OfLevels(Decoder):
    """Fenwick levels, of which there are more and more."""

    def __init__(self, problem: Problem, state: LogLinearState) -> None:
        self.left = 0  # steps until there is one more
        super().__init__(problem, DecodeArgs(), length=state.length)

    def fits(self, state: Any) -> bool:
        return state.levels is self.tensors["matrices"] and state.length is self.tensors["length"]

    def begin(self, state: LogLinearState) -> None:
        if self.left == 0:
            self.make_room(state)
        self.left -= 1

    def make_room(self, state: LogLinearState) -> None:
        longest = int(state.length.max()) + 1 if state.batch else 0
        more = longest.bit_length() - state.levels.shape[2]
        if more > 0:
            state.levels = F.pad(state.levels, (0, 0, 0, 0, 0, more))
        levels = state.levels.shape[2]
        self.tensors["matrices"], self.left = state.levels, (1 << levels) - longest
        self.arguments.matrices, self.arguments.states = state.levels.data_ptr(), levels


class OfSpans(Decoder):
    """The states of the dynamic memory."""

    def __init__(self, problem: Problem, state: Any) -> None:
        self.held: Spans = state.held if problem.beta is None else state.kept  # what is pending may stay so
        if self.held.ground is None:
            self.held.ground = Ground(self.held)
        self.ground: Ground = self.held.ground
        self.ground.pend(problem.beta is not None)
        arguments, rules, made, given = self.ground.arguments, problem.rules, problem.given, {}
        if made is not None:
            given = {"score": made.score.float().contiguous(), "boundary": made.boundary.contiguous()}
            given["merged"] = made.merged.contiguous()
        super().__init__(problem, arguments, **given)
        arguments.given, arguments.tau = int(made is not None), rules.tau
        arguments.tie, arguments.first_score = TIE, FIRST_SCORE
        arguments.block, arguments.state_score = rules.block or 0, int(rules.score == "state")

    def fits(self, state: Any) -> bool:
        return state.kept is self.held and self.held.ground is self.ground

    def begin(self, state: Any) -> None:
        if self.arguments.wants:
            self.ground.make_room(self.held)

    def end(self, state: Any) -> None:
        if self.arguments.missing:
            self.ground.fold(self.held)


def straightened(operands: Sequence[Any]) -> list[Any]:
    """The operands as the kernel reads them: float32, one number behind the other, a sharpness for every sequence."""
    *others, route = operands
    route = None if route is None else route.expand(operands[VALUES].shape[:3])
    return [None if x is None else x.float().contiguous() for x in (*others, route)]


DECODERS: dict[str, Any] = {"single": OfOne, "log_linear": OfLevels, "dynamic": OfSpans}
