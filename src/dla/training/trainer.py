"""One step of training: gradients of a batch, over micro-batches and ranks, and the optimizer's update."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dla.models import DLAForCausalLM
from dla.models.loss import IGNORED
from dla.training.data.feed import Micro
from dla.training.distributed import World
from dla.training.optimizer import make_optimizer, rate, temperature
from dla.training.recipe import Gate, Optimizer, Schedule


class DivergedError(RuntimeError):
    """Too many steps in a row were not finite."""


@dataclass(frozen=True)
class Outcome:
    """What a step did. loss: mean over the tokens of all ranks; signals: the ranks' numbers, added up."""

    loss: float
    grad_norm: float
    lr: float
    temperature: float | None
    tokens: int
    skipped: bool
    signals: tuple[float, ...]


class Trainer:
    """A model and its optimizer.

    ``bfloat16`` runs matrix products in that type; weights, gradients and optimizer stay as the model has them.
    """

    def __init__(
        self,
        model: DLAForCausalLM,
        *,
        optimizer: Optimizer,
        schedule: Schedule,
        gate: Gate,
        bfloat16: bool = False,
        world: World | None = None,
    ) -> None:
        self.model, self.world = model, world or World()
        self.settings, self.schedule, self.gate = optimizer, schedule, gate
        self.optimizer = make_optimizer(model, optimizer)
        self.autocast = bfloat16
        self.skipped = 0  # steps in a row
        self._parameters = list(model.parameters())

    def step(self, step: int, micros: Sequence[Micro], signals: Sequence[float] = ()) -> Outcome:
        """Step number ``step``, from 0, with this rank's share of the batch.

        The loss is the mean over all tokens of the step that have a target, whatever their micro-batch or rank. A step
        whose loss or gradient is not finite changes nothing. ``signals`` are added up over the ranks on the way.

        Raises:
            DivergedError: more than ``skips`` steps in a row were not finite.
        """
        lr, gate = self._set(step)
        counted = sum(int((micro.targets != IGNORED).sum()) for micro in micros)
        tokens, *summed = self.world.total(counted, *signals)
        mine = self._gradients(micros, max(tokens, 1) / self.world.size)
        norm = self._clip()
        loss = self.world.total(float(mine))[0] / self.world.size
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped > self.settings.skips:
            raise DivergedError(
                f"step {step + 1}: the loss is {loss} and the gradient's norm {norm}; "
                f"{self.skipped} steps in a row were not finite"
            )
        return Outcome(loss, norm, lr, gate, int(tokens), not finite, tuple(summed))

    def _set(self, step: int) -> tuple[float, float | None]:
        lr = rate(step, self.settings.lr, self.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        gate = None
        if self.model.config.dynamic:
            gate = temperature(step, self.gate, self.schedule.steps)
            if gate != self.model.config.temperature:
                self.model.set_temperature(gate)
        return lr, gate

    def _gradients(self, micros: Sequence[Micro], items: float) -> Tensor:
        """The sum of the losses over ``items``; its gradient is added up in the parameters."""
        if not self.model.training:  # which would walk over all modules
            self.model.train()
        total = torch.zeros((), device=self.world.device)
        for i, micro in enumerate(micros):
            if self.world.mesh is not None:  # ranks share their gradients once a step
                self.model.set_requires_gradient_sync(i == len(micros) - 1)
            with self.precision():
                loss = self.model(**inputs(micro, self.world.device), num_items_in_batch=items, use_cache=False).loss
            loss.backward()
            total = total + loss.detach()
        return total

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The arithmetic of the forward pass."""
        # Without its cache: a weight is used once a pass, and under FSDP the cache would keep every block's copy.
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False)

    def _clip(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.clip)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def inputs(micro: Micro, device: torch.device) -> dict[str, Any]:
    """A micro-batch as the model's arguments. Positions stay on the host, where they are read."""
    return {
        "input_ids": micro.ids.to(device, non_blocking=True),
        "shift_labels": micro.targets.to(device, non_blocking=True),
        "position_ids": micro.positions,
    }
