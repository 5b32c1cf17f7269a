"""One call of an operator, checked and put together once: what every stage and implementation gets.

``Layout`` says where its sequences lie, one description for [B, T] batches and for packed ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dla.ops.rules import Rules, SlotOrder

if TYPE_CHECKING:
    from dla.ops.segmentation import Segmentation

MemoryKind = Literal["single", "log_linear", "dynamic"]
NO_RULES = Rules()  # of memories that decide nothing
OPERANDS = ("q", "k", "v", "lam", "g", "beta", "route")


@dataclass(frozen=True)
class Layout:
    """Sequences as consecutive runs of the flat token axis [B * T]."""

    batch: int
    time: int
    lengths: tuple[int, ...]
    packed: bool

    @classmethod
    def of(cls, batch: int, time: int, cu_seqlens: Tensor | None) -> "Layout":
        if cu_seqlens is None:
            return cls(batch, time, (time,) * batch, False)
        ends = cu_seqlens.tolist()
        return cls(batch, time, tuple(b - a for a, b in pairwise(ends)), True)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Index of each sequence's first token on the flat token axis."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def origins(self) -> tuple[int, ...]:
        """The position of each sequence's first token in its call: 0, or where it lies in its pack."""
        return self.offsets if self.packed else (0,) * self.sequences

    def flat(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [B * T, ...]"""
        return x.reshape(self.batch * self.time, *x.shape[2:])

    def unflat(self, x: Tensor) -> Tensor:
        """[B * T, ...] -> [B, T, ...]"""
        return x.reshape(self.batch, self.time, *x.shape[1:])

    def each_token(self, x: Tensor) -> Tensor:
        """What x [N, ...] says of its sequence, for every token: [B * T, ...]"""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=x.device)
        return x.repeat_interleave(lengths, 0, output_size=self.batch * self.time)

    def running(self, x: Tensor) -> Tensor:
        """Running sums of x [B * T, ...] inside each sequence, the token itself included."""
        if not self.packed:
            return self.flat(self.unflat(x).cumsum(1))
        total = x.cumsum(0)
        first = torch.tensor(self.offsets, dtype=torch.int64, device=x.device).clamp_max(max(len(x) - 1, 0))
        return total - self.each_token(total[first] - x[first]) if len(x) else total


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """States, decays and scores live in float32, or in float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def likeness(operands: Sequence[Tensor | None], options: tuple[object, ...]) -> tuple[object, ...]:
    """All that checks, and the choice of who runs a decoding step, depend on, beside its state."""
    kinds = [
        (x.shape, x.dtype, x.device, x.is_contiguous(), x.requires_grad) if isinstance(x, Tensor) else type(x)
        for x in operands
    ]
    return torch.is_grad_enabled(), options, kinds


def alike(one: Any, other: Any) -> bool:
    """Whether two likenesses differ, if at all, in how tensors lie in memory."""

    def but_for_strides(like: Any) -> Any:
        return like[:2], [kind if isinstance(kind, type) else (*kind[:3], *kind[4:]) for kind in like[2]]

    return one is not None and other is not None and but_for_strides(one) == but_for_strides(other)


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Tensors as the caller gave them, [B, T, heads, ...]; ``q`` is None where nothing is read (``segment``)."""

    memory: MemoryKind
    layout: Layout
    k: Tensor
    v: Tensor
    q: Tensor | None = None
    lam: Tensor | None = None
    g: Tensor | None = None
    beta: Tensor | None = None
    scale: float = 1.0
    state: Any = None  # the memory's State to go on from
    wants_state: bool = False
    inplace: bool = False  # whether ``state`` itself is to be changed
    like: Any = None  # its ``likeness``, which a later call must share to be run like it; None: none may
    # the dynamic memory alone
    rules: Rules = NO_RULES
    slot_order: SlotOrder = "chronological"
    route: Tensor | None = None  # [B, T, H]
    temperature: float | None = None  # the soft gate's
    given: "Segmentation | None" = None  # decisions to follow

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(sequences, heads, dk, dv)"""
        return self.layout.sequences, self.v.shape[2], self.k.shape[3], self.v.shape[3]

    @property
    def group(self) -> int:
        """How many heads share a key head."""
        return self.v.shape[2] // self.k.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of states and of all arithmetic."""
        return compute_dtype(self.v.dtype)

    @property
    def device(self) -> torch.device:
        return self.v.device

    @property
    def routed(self) -> bool:
        return self.route is not None

    @property
    def soft(self) -> bool:
        return self.temperature is not None

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.operands())

    @property
    def decodes(self) -> bool:
        """One token a sequence on a carried state, without gradients: the decoding step."""
        one = self.layout.time == 1 and not self.layout.packed
        return one and self.state is not None and self.q is not None and not self.needs_gradient

    def operands(self) -> list[Tensor | None]:
        return [getattr(self, name) for name in OPERANDS]

    def flat(self, x: Tensor | None) -> Tensor | None:
        """[B, T, ...] -> [B * T, ...]"""
        return None if x is None else self.layout.flat(x)

    def length(self) -> Tensor:
        """[N] tokens that each sequence has seen after the call."""
        length = torch.tensor(self.layout.lengths, dtype=torch.int64, device=self.device)
        return length if self.state is None else self.state.length + length
