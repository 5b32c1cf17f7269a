"""States held densely, as GPUs decode on them: a matrix a state, in slots that an order lists from the oldest on.

A merge adds one matrix to another and writes the order anew; no other matrix moves. Three states of a head with room
for four, of 50, 7 and 1 tokens:

    order   2 0 3 1      slot 2 holds the oldest state, slot 3 the current one, slot 1 is free
    count   7 0 50 1     by slot, as everything else

Sizes are those of the capacity from the first step on, so that a step neither asks the device for a number nor makes
room. All other stages know states as spans (pools.py), which these become as soon as somebody asks.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from dla.ops.state.base import Shape, take_rows
from dla.ops.state.spans import Spans


@dataclass
class Slots:
    """A state is ``factor * matrix``. What a free slot holds means nothing, but for its count, which is 0."""

    matrices: Tensor  # [N, H, K, dk, dv]
    factor: Tensor  # [N, H, K] what decay has left of the matrix
    order: Tensor  # [N, H, K] int32, the slots of the states, oldest first, then the free ones
    count: Tensor  # [N, H, K] int64, tokens
    info: Tensor  # [N, H, K] float64, the sum of their scores
    key_sums: Tensor | None  # [N, H, K, dk], the sum of their keys; None if reads are not routed
    length: Tensor  # [N] int64

    @classmethod
    def empty(cls, shape: Shape, K: int, routed: bool, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Of sequences that have seen nothing."""
        N, H, dk, dv = shape
        matrices = torch.zeros(N, H, K, dk, dv, dtype=dtype, device=device)
        return cls._around(matrices, Spans.empty(shape, K, routed, dtype, device))

    @classmethod
    def of(cls, spans: Spans) -> Self:
        """The same states; what spans and slots hold alike is shared."""
        return cls._around(spans.dense(), spans)

    @classmethod
    def _around(cls, matrices: Tensor, spans: Spans) -> Self:
        K = spans.count.shape[2]
        order = torch.arange(K, dtype=torch.int32, device=matrices.device).expand(spans.count.shape).contiguous()
        keys = None if spans.key_sums is None else spans.key_sums.contiguous()
        factor = matrices.new_ones(spans.count.shape)
        return cls(matrices, factor, order, spans.count.contiguous(), spans.info.contiguous(), keys, spans.length)

    def spans(self) -> Spans:
        """The same states; ``of`` turned around."""
        order, K = self.order.long(), self.count.shape[2]
        matrices = take_rows(self.matrices * self.factor[..., None, None], order)
        return Spans.of_matrices(matrices, self.counts(), self.sums(), self.keys_of_states(), self.length, K)

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """With every tensor changed; all have the sequences as first dimension."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**{name: None if x is None else fn(x) for name, x in held.items()})  # type: ignore[arg-type]

    @property
    def shape(self) -> Shape:
        return *self.count.shape[:2], *self.matrices.shape[3:]

    @property
    def routed(self) -> bool:
        return self.key_sums is not None

    @property
    def dtype(self) -> torch.dtype:
        return self.factor.dtype

    @property
    def size(self) -> Tensor:
        return (self.count > 0).sum(-1)

    def counts(self) -> Tensor:
        return self.count.gather(2, self.order.long())

    def sums(self) -> Tensor:
        return self.info.gather(2, self.order.long()).masked_fill(self.counts() == 0, 0)

    def keys_of_states(self) -> Tensor | None:
        if self.key_sums is None:
            return None
        return take_rows(self.key_sums, self.order.long()).masked_fill((self.counts() == 0)[..., None], 0)
