"""The dynamic memory's state, as a value.

How its states are held is the business of ``spans.py`` (as matrices and loose tokens, with a capacity) and of
``tokens.py`` (as tokens, without one). Both know the same operations, which the stages use as ``state.held``; between
decoding steps on a GPU it is ``slots.py``'s (as matrices alone), which become spans when somebody asks:

    current()                    the newest state [N, H, dk, dv], zero where there is none
    move(k, g, beta)             the transition of every state, in place: k [N, H, dk], g, beta [N, H]
    merge(pair)                  add state pair + 1 to state pair [N, H], in place, where that is not -1
    write(k, v, score, opens,    take a token k [N, H, dk], v [N, H, dv] into a new state or the current one, in place,
          lives)                 in the heads [N, H] whose sequence lives
    read(q, weights)             the sum over states of weights [N, H, K], oldest first, times q^T S: [N, H, dv]
    carried(place, rows)         matrices and key sums [N, H, rows, ...], state i in row place[n, h, i]
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from dla.ops.state.base import Shape, State
from dla.ops.state.old_files import is_old, read_old
from dla.ops.state.slots import Slots
from dla.ops.state.spans import Spans
from dla.ops.state.tokens import Tokens


class DynamicState(State):
    """At most ``capacity`` states a head, oldest first, each with its tokens' number, scores and, if routed, keys."""

    setting_names = ("capacity",)
    growing = Tokens.growing
    content = ("matrices", "coefficient", "keys", "values", "raw_keys", "newest")  # of either way to hold it

    def __init__(self, held: Spans | Tokens | Slots, capacity: int | None) -> None:
        self.kept, self.capacity = held, capacity

    @property
    def held(self) -> Spans | Tokens:
        """What it holds, by its tensors. (``kept`` is the same, but compiled decoding steps may have left a part of
        their work for later, which matrices and keys of tokens do not show yet, and those of a GPU hold it as slots.)
        """
        if isinstance(self.kept, Slots):
            self.kept = self.kept.spans()
        elif isinstance(self.kept, Spans):
            self.kept.settle()
        return self.kept

    @property
    def slots(self) -> Slots:
        """The same, as decoding steps on a GPU work on it; for states with a capacity."""
        if not isinstance(self.kept, Slots):
            assert isinstance(self.held, Spans)
            self.kept = Slots.of(self.held)
        return self.kept

    # --- making one

    @classmethod
    def empty(
        cls, shape: Shape, capacity: int | None, routed: bool, dtype: torch.dtype, device: Any, tokens: int = 0
    ) -> Self:
        """Of sequences that have seen nothing, with room for what ``tokens`` take at most."""
        if capacity is None:
            return cls(Tokens.empty(shape, tokens, routed, dtype, device), None)
        return cls(Spans.empty(shape, capacity, routed, dtype, device, min(tokens, capacity)), capacity)

    @classmethod
    def of_matrices(
        cls, matrices: Tensor, count: Tensor, info: Tensor, key_sums: Tensor | None, length: Tensor, capacity: int
    ) -> Self:
        """Of states that stand oldest first: matrices [N, H, K, dk, dv]; count, info, key_sums [N, H, K, ...]."""
        return cls(Spans.of_matrices(matrices, count, info, key_sums, length, capacity), capacity)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        if settings["capacity"] is None:
            return cls(Tokens.from_tensors(tensors), None)
        return cls(read_old(tensors) if is_old(tensors) else Spans.from_tensors(tensors), settings["capacity"])

    def check(self) -> None:
        if self.capacity is not None and (type(self.capacity) is not int or self.capacity < 2):
            raise ValueError(f"capacity must be an integer >= 2 or None, got {self.capacity!r}")
        self.held.check()
        if isinstance(self.held, Spans) and self.held.count.shape[2] != self.capacity:
            raise ValueError(f"capacity must be {self.held.count.shape[2]}, as count has it, got {self.capacity}")

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self.held).items() if isinstance(x, Tensor)}

    def _sized(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self.kept).items() if isinstance(x, Tensor)}

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        if isinstance(self.kept, Slots):
            return type(self)(self.kept.mapped(fn), self.capacity)
        return super()._map(fn)

    def select(self, batch_indices: Tensor | Sequence[int]) -> Self:
        if isinstance(self.kept, Tokens | Slots):
            return super().select(batch_indices)
        index = torch.as_tensor(batch_indices, dtype=torch.int64, device=self.device)
        assert isinstance(self.held, Spans)
        return type(self)(self.held.selected(index), self.capacity)

    @classmethod
    def _joined(cls, states: "Sequence[Self]") -> Self:
        if isinstance(states[0].held, Tokens):
            return super()._joined(states)
        return cls(Spans.joined([s.held for s in states if isinstance(s.held, Spans)]), states[0].capacity)

    # --- what it holds

    @property
    def dtype(self) -> torch.dtype:
        """Of all arithmetic; what is stored may be narrower."""
        return self.kept.dtype

    @property
    def length(self) -> Tensor:  # type: ignore[override]
        return self.kept.length

    @property
    def shape(self) -> Shape:
        return self.kept.shape

    @property
    def routed(self) -> bool:
        """Whether the state carries the sums of keys that routed reads need."""
        return self.kept.routed

    @property
    def size(self) -> Tensor:
        """How many states live [N, H]."""
        return self.kept.size

    def dense(self) -> Tensor:
        return self.held.dense()

    @property
    def counts(self) -> Tensor:
        """Tokens in each state [N, H, K] int64, oldest first, zero-padded."""
        return self.kept.counts()

    @property
    def info(self) -> Tensor:
        """``scores`` as they are kept, in float64."""
        return self.kept.sums()

    @property
    def scores(self) -> Tensor:
        """Sum of the scores of each state's tokens [N, H, K] float32, oldest first, zero-padded."""
        return self.info.float()

    @property
    def keys(self) -> Tensor | None:
        """Sum of the keys of each state's tokens [N, H, K, dk], oldest first, zero-padded; None unless routed."""
        return self.kept.keys_of_states()

    @property
    def state_dtype(self) -> torch.dtype:
        """What matrices and tokens are held in."""
        return self.kept.dtype if isinstance(self.kept, Tokens) else self.kept.matrices.dtype

    def stored_in(self, dtype: torch.dtype) -> "DynamicState":
        """The same state held in another dtype; itself if nothing changes."""
        if dtype == self.state_dtype:
            return self
        assert isinstance(self.held, Spans)
        self.held.store_in(dtype)
        return self

    def current_only(self, capacity: int) -> "DynamicState":
        """A state of this capacity with the current state alone: all that scores look at."""
        count = self.size.clamp_max(1)[..., None]
        current = self.held.current()[:, :, None]
        return DynamicState.of_matrices(current, count, count.double(), None, self.length.clone(), capacity)

    def resized(self, capacity: int | None) -> "DynamicState":
        """The same states under another capacity: itself if nothing changes. Merging them is not its business."""
        if capacity == self.capacity:
            return self
        if capacity is None or self.capacity is None:
            raise ValueError(f"a state of capacity={self.capacity} cannot go on with capacity={capacity}")
        live = int(self.size.max()) if self.size.numel() else 0
        if live > capacity:
            raise ValueError(f"a state with {live} live states cannot go on with capacity={capacity}; read it anew")
        matrices, count, info = (x[:, :, :capacity] for x in (self.dense(), self.counts, self.info))
        keys = None if self.keys is None else self.keys[:, :, :capacity]
        return DynamicState.of_matrices(matrices, count, info, keys, self.length, capacity)
