"""One call of a layer, beside its input: handed from the model through block, mixer and memory."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dla.layers.packing import Packing


class LayerPast(Protocol):
    """What a layer keeps between calls."""

    state: Any  # State | None
    tail: Tensor | None  # [sequences, conv_size - 1, channels] last inputs of the convolution


@dataclass(frozen=True)
class Call:
    """Where the sequences lie, what they go on from, and what is to be kept."""

    packing: Packing
    past: LayerPast | None = None  # what came before, which this call uses up and replaces
    keep: bool = True  # whether another call goes on from this one; if not, the state after it need not be made
    notes: dict[str, Any] | None = (
        None  # where this call may be repeated for its gradient: what stays as it was decided
    )

    @property
    def state(self) -> Any:
        """The state to go on from; None at the start."""
        state = None if self.past is None else self.past.state
        if state is not None and state.length.is_inference() and not torch.is_inference_mode_enabled():
            return state.clone()  # read in inference mode, where tensors cannot be changed from outside
        return state

    def carried(self, state: Any, time: int) -> dict[str, Any]:
        """The operators' arguments of a call of ``time`` tokens that goes on from a state.

        That state is used up: it is written to where its successor is wanted, or for one token anyway.
        """
        wanted = self.past is not None and self.keep
        return {
            "initial_state": state,
            "output_final_state": wanted,
            "inplace": state is not None and (wanted or time == 1),
            "cu_seqlens": self.packing.cu_seqlens,
        }
