"""The third stage in Triton: one token of every sequence, on the carried state itself, in float32.

A step launches one kernel, or two with the dynamic memory, and asks the device for nothing: it may be captured in a
CUDA graph after a first step, which lays out the state. A captured step is good for as long as the state stays where
it is: ``state.decoder.fits(state)``; with Fenwick levels for ``state.decoder.left`` more tokens, for then there is one
more level.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.gpu import runtime
from dla.ops.gpu.configs import config
from dla.ops.gpu.launch import launch, only_compiling
from dla.ops.problem import OPERANDS, Problem
from dla.ops.state import DynamicState, LogLinearState, State

MOST_STATES = 64  # of a head: they are looked at side by side
WIDE = 128  # keys; twice as wide ones get twice the warps


def unable(problem: Problem) -> str | None:
    """Why these kernels cannot run a problem."""
    if problem.memory == "dynamic":
        rules, state = problem.rules, problem.state
        if rules.capacity is None or rules.capacity > MOST_STATES:
            return f"the Triton decoding step takes a capacity of at most {MOST_STATES}, this is {rules.capacity}"
        if rules.merge != "density" and problem.given is None:
            return f"the Triton decoding step merges by density, this is {rules.merge}"
        if isinstance(state, DynamicState) and state.state_dtype != torch.float32:
            held = str(state.state_dtype).removeprefix("torch.")
            return f"the Triton decoding step adds tokens to states one by one, in float32; these are held in {held}"
    return runtime.unable(problem)


def decode(problem: Problem) -> tuple[Tensor, State]:
    """The output [N, 1, H, dv] and the state after it, which is the given one if it may be changed."""
    state = problem.state if problem.inplace else problem.state.clone()
    decoder = DECODERS[problem.memory](problem, state)
    if not runtime.interpreting():
        with only_compiling():  # what does not compile must not leave half a step behind
            decoder.take_in(state, *decoder.token(problem.operands()))
    state.decoder = decoder
    return decoder.step(state, problem.operands()), state


class KernelStep:
    """One state's steps of one kind: all that a launch needs beside the token.

    It is no part of the state's value: a copy makes its own.
    """

    program = False  # there is no layer's program with kernels of a GPU (layers/fused/program.py)
    left: float = math.inf  # steps that it is good for

    def __init__(self, problem: Problem, **tensors: Tensor | None) -> None:
        self.like, self.tensors = problem.like, tensors
        self.sequences, self.heads, dk, dv = problem.shape
        self.sizes = {"scale": problem.scale, "H": self.heads, "GROUP": problem.group, "dk": dk, "dv": dv}
        self.dv, self.BK = dv, power_of_two(dk)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def fits(self, state: Any) -> bool:
        """Whether the state still is where it was."""
        raise NotImplementedError

    def token(self, operands: Sequence[Any]) -> tuple[dict[str, Tensor | None], Tensor]:
        """A token's operands by name, as the first one's were, and room for its output [N, 1, H, dv]."""
        *given, route = operands
        if route is not None:
            route = route.expand(operands[2].shape[:3])
        made = [None if x is None else x.contiguous() for x in (*given, route)]
        return dict(zip(OPERANDS, made, strict=True)), torch.empty_like(operands[2]).contiguous()

    def step(self, state: Any, operands: Sequence[Any]) -> Tensor:
        """The output of a token."""
        token, o = self.token(operands)
        self.take_in(state, token, o)
        state.length.add_(1)
        self.left -= 1
        return o

    def take_in(self, state: Any, token: dict[str, Tensor | None], o: Tensor) -> None:
        """Launch the kernels, which write the output."""
        raise NotImplementedError

    def run(self, kernel: Any, arguments: dict[str, Any], *, by_columns: bool = True) -> None:
        """A program for every head and, unless one has them all, for some of its columns."""
        chosen = config(kernel.__name__)
        BV = min(chosen["BV"], power_of_two(self.dv))
        tiles = -(-self.dv // BV) if by_columns else 1
        chosen |= {"warps": chosen["warps"] * (max(1, self.BK // WIDE) if by_columns else 1)}
        launch(kernel, (self.sequences * self.heads, tiles), arguments | {"BK": self.BK, "BV": BV}, chosen)


class StepOfOne(KernelStep):
    """One matrix a head."""

    def __init__(self, problem: Problem, state: Any) -> None:
        state.matrix = state.matrix.contiguous()
        super().__init__(problem, matrix=state.matrix)

    def fits(self, state: Any) -> bool:
        return state.matrix is self.tensors["matrix"]

    def take_in(self, state: Any, token: dict[str, Tensor | None], o: Tensor) -> None:
        from dla.ops.gpu.decode_matrices import step_one

        given = {name: token[name] for name in ("q", "k", "v", "g", "beta")}
        self.run(step_one, {**given, **self.tensors, "o": o, **self.sizes})


class StepOfLevels(KernelStep):
    """Fenwick levels, of which there are more and more."""

    def __init__(self, problem: Problem, state: LogLinearState) -> None:
        state.levels = state.levels.contiguous()
        super().__init__(problem)
        self.left = 0
        if not state.length.is_meta:
            self.make_room(state)

    def fits(self, state: Any) -> bool:
        return self.left > 0 and state.levels is self.tensors["levels"]

    def make_room(self, state: LogLinearState) -> None:
        """The one look at the device: how long the longest sequence is, when a state's first step is taken."""
        longest = int(state.length.max()) + 1 if state.batch else 0
        more = longest.bit_length() - state.levels.shape[2]
        if more > 0:
            state.levels = F.pad(state.levels, (0, 0, 0, 0, 0, more))
        self.left = (1 << state.levels.shape[2]) - longest  # steps until there is one more

    def take_in(self, state: LogLinearState, token: dict[str, Tensor | None], o: Tensor) -> None:
        from dla.ops.gpu.decode_matrices import step_levels

        lam, levels = token["lam"], state.levels
        assert lam is not None
        self.tensors["levels"] = levels
        given = {name: token[name] for name in ("q", "k", "v", "lam", "g", "beta")}
        sizes = {**self.sizes, "width": lam.shape[-1], "L": levels.shape[2]}
        self.run(step_levels, {**given, "levels": levels, "length": state.length, "o": o, **sizes})


class StepOfSlots(KernelStep):
    """The states of the dynamic memory."""

    def __init__(self, problem: Problem, state: DynamicState) -> None:
        self.slots, rules, made = state.slots, problem.rules, problem.given
        heads, K = self.slots.count.shape[:2].numel(), self.slots.count.shape[2]
        empty = self.slots.factor.new_empty
        plan, shares, weights = empty(heads, 5, dtype=torch.int32), empty(heads, 3), empty(heads, K)
        super().__init__(problem, plan=plan, shares=shares, weights=weights)
        self.sizes["K"] = K
        self.decisions: dict[str, Tensor | None] = dict.fromkeys(("score", "boundary", "merged"))
        if made is not None:
            self.decisions = {
                "score": made.score.float().contiguous(),
                "boundary": made.boundary.int().contiguous(),
                "merged": made.merged.int().contiguous(),
            }
        self.rules = {"tau": float(rules.tau), "block": rules.block or 0, "STATE_SCORE": rules.score == "state"}
        self.rules |= {"RECENCY": problem.slot_order == "recency", "PLACES": power_of_two(K)}

    def fits(self, state: Any) -> bool:
        return state.kept is self.slots

    def take_in(self, state: DynamicState, token: dict[str, Tensor | None], o: Tensor) -> None:
        from dla.ops.gpu.decode_states import step_decisions, step_states

        lam, held, sizes = token["lam"], vars(self.slots), dict(self.sizes)
        assert lam is not None
        scale = sizes.pop("scale")
        choices = {**self.rules, "width": lam.shape[-1]}
        self.run(step_decisions, {**token, **self.decisions, **held, **self.tensors, **sizes, **choices},
                 by_columns=False)  # fmt: skip
        given = {name: token[name] for name in ("q", "k", "v", "beta")}
        held = {name: held[name] for name in ("matrices", "order")}
        self.run(step_states, {**given, **held, **self.tensors, "o": o, "scale": scale, **sizes})


def power_of_two(size: int) -> int:
    """The next one: sizes of tiles are such."""
    return 1 << (size - 1).bit_length()


DECODERS: dict[str, Any] = {"single": StepOfOne, "log_linear": StepOfLevels, "dynamic": StepOfSlots}
