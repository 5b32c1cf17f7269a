"""Controls that are no memory of the library: made from its parts, in quadratic form, for short sequences."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.lab.pairs import of_every_head, read
from dla.lab.probe import replace_memories, use_probe
from dla.layers.call import Call
from dla.layers.memory import SHARPNESS, LogLinearMemory, Operands, inverse_softplus
from dla.models import DLAForCausalLM
from dla.names import check_choice
from dla.ops.state import State
from dla.ops.weights import direction


class RoutedLevels(LogLinearMemory):
    """Log-linear levels whose reads are routed like those of the dynamic memory, by the keys of each level's tokens.

    Everything is computed from all pairs of tokens; there is no state to carry.
    """

    def __init__(self, hidden_size: int, heads: int, levels: int, slot_bias: bool = False) -> None:
        super().__init__(hidden_size, heads, levels, slot_bias)
        self.sharpness = torch.nn.Parameter(torch.full((heads,), inverse_softplus(SHARPNESS)))

    def attend(self, x: Tensor, made: Operands, call: Call) -> tuple[Tensor, State | None]:
        q, k = of_every_head(made, call)
        time = q.shape[2]
        level = levels(time, x.device).clamp_max(self.slots.L.shape[1] - 1)
        width = int(level.max()) + 1
        past_of = torch.ones(time, time, device=x.device, dtype=k.dtype).tril()
        member = F.one_hot(level, width) * past_of[..., None]  # [T, T, levels] whether token s is in a level of t
        sums = torch.einsum("tsl,bhsd->bhtld", member, k)
        route = F.softplus(self.sharpness)[:, None, None]
        fit = torch.exp(route * (torch.einsum("bhtd,bhtld->bhtl", direction(q), direction(sums)) - 1))
        weight = self.slots(x).transpose(1, 2)[..., :width] * fit  # [B, H, T, levels]
        return read(q, k, made, weight.gather(-1, level.expand(*weight.shape[:2], time, time))), None


def levels(time: int, device: torch.device) -> Tensor:
    """[T, T] bit_length(t XOR s)"""
    t = torch.arange(time, device=device)
    return (t[:, None] ^ t).double().frexp().exponent.long()


def use_routed_levels(model: DLAForCausalLM, **options: Any) -> None:
    """Replace every log-linear memory of a model by routed levels; there are no options."""
    if options:
        raise ValueError(f"control: routed_levels has no options, got {', '.join(options)}")

    def routed(memory: LogLinearMemory) -> RoutedLevels:
        heads, width = memory.slots.L.shape
        made = RoutedLevels(model.config.hidden_size, heads, width, model.config.slot_bias)
        made.slots = memory.slots
        return made

    replace_memories(model, LogLinearMemory, routed)


CONTROLS: dict[str, Callable[..., None]] = {"routed_levels": use_routed_levels, "probe": use_probe}


def control(model: DLAForCausalLM, asked: str | dict[str, Any] | None) -> None:
    """Make a model a control: by its name, or a table of its name and options."""
    if asked is not None:
        options = {"name": asked} if isinstance(asked, str) else dict(asked)
        name = str(options.pop("name", None))
        check_choice("control", name, tuple(CONTROLS))
        CONTROLS[name](model, **options)
