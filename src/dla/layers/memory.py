"""The memories a linear layer can be given: one state, Fenwick levels, or the dynamic list.

A memory reads and writes the past for q, k, v, g and beta, whoever made them, and owns what it needs to weight its
states: lam and, for routed reads, a sharpness.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dla.layers.call import Call
from dla.layers.fused import dense, linear, scaled_softplus
from dla.layers.fused.program import Program, UnfusedError
from dla.ops import Segmentation, dynamic_linear_attention, linear_attention, log_linear_attention, segment
from dla.ops.problem import compute_dtype
from dla.ops.rules import SlotOrder
from dla.ops.state import State

SHARPNESS = 4.0  # of routed reads, at the start


class SlotWeights(nn.Module):
    """lam = softplus(L * (W x) + bias): what each slot counts for, by the layer's input."""

    def __init__(self, hidden_size: int, heads: int, width: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size, heads * width, bias=False)
        self.L = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.empty(heads, width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.L)
        if self.bias is not None:
            nn.init.constant_(self.bias, inverse_softplus(1))  # lam = 1 where W x = 0

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, heads, width] in float32 or wider"""
        made = linear(self.proj, x)
        if (fused := scaled_softplus(made, self.L, self.bias)) is not None:
            return fused.unflatten(-1, self.L.shape)
        dtype = compute_dtype(x.dtype)
        lam = made.unflatten(-1, self.L.shape).to(dtype) * self.L.to(dtype)
        return F.softplus(lam if self.bias is None else lam + self.bias.to(dtype))

    def decoding(self, program: Program, x: Tensor) -> Tensor:
        lam = program.softplus(program.linear(self.proj, x), self.L, self.bias)
        return lam.unflatten(-1, self.L.shape)


class FactoredSlotWeights(nn.Module):
    """lam = softplus(W x + bias) softplus(B): slot weights of a low rank, B being the same for all tokens."""

    def __init__(self, hidden_size: int, heads: int, width: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size, heads * rank, bias=False)
        self.B = nn.Parameter(torch.empty(heads, rank, width))
        self.bias = nn.Parameter(torch.empty(heads, rank)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.B, inverse_softplus(1 / self.B.shape[1]))
        if self.bias is not None:
            nn.init.constant_(self.bias, inverse_softplus(1))  # lam = 1 where W x = 0

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, heads, width] in float32 or wider"""
        dtype = compute_dtype(x.dtype)
        parts = linear(self.proj, x).unflatten(-1, self.B.shape[:2]).to(dtype)
        parts = F.softplus(parts if self.bias is None else parts + self.bias.to(dtype))
        return torch.einsum("bthr,hrk->bthk", parts, F.softplus(self.B.to(dtype)))


def inverse_softplus(x: float) -> float:
    return math.log(math.expm1(x))


@dataclass
class Operands:
    """What a backbone makes of its input, in the operators' layout."""

    q: Tensor  # [B, T, Hk, dk]
    k: Tensor  # [B, T, Hk, dk]
    v: Tensor  # [B, T, H, dv]
    g: Tensor | None = None  # [B, T, H] log-decay
    beta: Tensor | None = None  # [B, T, H] delta step
    scale: float = 1.0


class Memory(nn.Module, ABC):
    """What all memories share: a past to go on from and a state to keep."""

    def forward(self, x: Tensor, made: Operands, call: Call) -> Tensor:
        """What it answers [B, T, H, dv] to the layer's input x [B, T, hidden] and what its backbone made of it.

        This call's tokens are taken in: the past, if there is one, holds the state after them.
        """
        o, state = self.attend(x, made, call)
        if call.past is not None:
            call.past.state = state
        return o

    @abstractmethod
    def attend(self, x: Tensor, made: Operands, call: Call) -> tuple[Tensor, State | None]:
        """The operator's call."""

    def options(self) -> tuple[object, ...]:
        """By what, beside its operands and their scale, one call of the operator differs from another."""
        raise UnfusedError(type(self).__name__)

    def decoding(self, program: Program, x: Tensor, made: Operands) -> Tensor:
        """``forward`` for one token of every sequence, as pieces of a program."""
        return program.decode(self, made)


class SingleMemory(Memory):
    """One state."""

    def attend(self, x: Tensor, made: Operands, call: Call) -> tuple[Tensor, State | None]:
        return linear_attention(**vars(made), **call.carried(call.state, x.shape[1]))

    def options(self) -> tuple[object, ...]:
        return ("single",)


class LogLinearMemory(Memory):
    """Fenwick levels."""

    def __init__(self, hidden_size: int, heads: int, levels: int, slot_bias: bool = False) -> None:
        super().__init__()
        self.slots = SlotWeights(hidden_size, heads, levels, slot_bias)

    def attend(self, x: Tensor, made: Operands, call: Call) -> tuple[Tensor, State | None]:
        return log_linear_attention(**vars(made), lam=self.slots(x), **call.carried(call.state, x.shape[1]))

    def options(self) -> tuple[object, ...]:
        return ("log_linear",)

    def decoding(self, program: Program, x: Tensor, made: Operands) -> Tensor:
        return program.decode(self, made, self.slots.decoding(program, x))


class DynamicMemory(Memory):
    """At most ``capacity`` states, opened and merged by information."""

    rule_names: ClassVar[tuple[str, ...]] = ("tau", "capacity", "merge", "score", "block")

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        width: int,
        slot_bias: bool = False,
        slot_rank: int | None = None,
        routed: bool = False,
        sharpness: str = "head",
        sharpness_start: float = SHARPNESS,
        temperature: float | None = None,
        slot_order: SlotOrder = "chronological",
        state_dtype: str | None = None,
        **rules: Any,
    ) -> None:
        super().__init__()
        self.slots: SlotWeights | FactoredSlotWeights
        if slot_rank is None:
            self.slots = SlotWeights(hidden_size, heads, width, slot_bias)
        else:
            self.slots = FactoredSlotWeights(hidden_size, heads, width, slot_rank, slot_bias)
        self.sharpness = nn.Parameter(torch.empty(heads)) if routed else None
        by_token = routed and sharpness == "token"
        self.sharpness_map = nn.Parameter(torch.empty(heads, hidden_size)) if by_token else None
        self.sharpness_start = sharpness_start
        self.temperature = temperature
        self.slot_order = slot_order
        self.state_dtype: torch.dtype | None = None if state_dtype is None else getattr(torch, state_dtype)
        self.rules = {name: rules[name] for name in self.rule_names}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.sharpness is not None:
            nn.init.constant_(self.sharpness, inverse_softplus(self.sharpness_start))
        if self.sharpness_map is not None:
            nn.init.zeros_(self.sharpness_map)

    @property
    def soft(self) -> bool:
        """Whether the soft gate is on: while training, with a temperature."""
        return self.training and self.temperature is not None

    def route(self, x: Tensor) -> Tensor | None:
        """The sharpness of routed reads, [heads] or [B, T, heads], by the layer's input x [B, T, hidden]."""
        if self.sharpness is None:
            return None
        sharpness = self.sharpness.to(compute_dtype(x.dtype))
        if self.sharpness_map is not None:
            sharpness = sharpness + dense(x, self.sharpness_map).to(sharpness.dtype)
        return F.softplus(sharpness)

    def attend(self, x: Tensor, made: Operands, call: Call) -> tuple[Tensor, State | None]:
        past = call.state
        if past is not None:
            past = past.resized(self.rules["capacity"])
        return dynamic_linear_attention(
            **vars(made),
            lam=self.slots(x),
            **self.rules,
            slot_order=self.slot_order,
            route=self.route(x),
            temperature=self.temperature if self.soft else None,
            segmentation=self._noted(made, call),
            state_dtype=self.state_dtype,
            **call.carried(past, x.shape[1]),
        )

    def options(self) -> tuple[object, ...]:
        rules, (tau, capacity, merge, score, block) = self.rules, self.rule_names
        first = rules[tau], rules[capacity], rules[merge], rules[score]
        return "dynamic", *first, self.slot_order, rules[block], None, self.state_dtype

    def decoding(self, program: Program, x: Tensor, made: Operands) -> Tensor:
        if not isinstance(self.slots, SlotWeights):
            raise UnfusedError("slot weights of a low rank")
        route = None
        if self.sharpness is not None:
            if self.sharpness_map is None:
                route = program.softplus(self.sharpness)
            else:
                route = program.softplus(program.product(x, self.sharpness_map), None, self.sharpness)
        return program.decode(self, made, self.slots.decoding(program, x), route)

    def decide(self, made: Operands, cu_seqlens: Tensor | None = None) -> Segmentation:
        """The decisions for sequences from their start."""
        return segment(made.k, made.v, made.g, made.beta, **self.rules, cu_seqlens=cu_seqlens)

    def _noted(self, made: Operands, call: Call) -> Segmentation | None:
        """The decisions of the first pass, for a call that may be repeated."""
        if call.notes is None:
            return None
        if "segmentation" not in call.notes:
            call.notes["segmentation"] = self.decide(made, call.packing.cu_seqlens)
        return call.notes["segmentation"]

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.rules.items() if value is not None)
