"""AdamW, its groups and its schedule, and the gate's."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from dla.training.recipe import Gate, Optimizer, Schedule

# Parameters that weight decay leaves alone, with norms.
NO_DECAY = ("L", "B", "A_log", "D", "dt_bias", "bias", "sharpness")


def make_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters with and without weight decay."""
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for name, parameter in model.named_parameters():
        spared = parameter.dim() < 2 or name.rpartition(".")[2] in NO_DECAY
        (plain if spared else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def rate(step: int, lr: float, schedule: Schedule) -> float:
    """The learning rate of a step, from 0: a linear warm-up, then a cosine to ``final`` of it."""
    if step < schedule.warmup:
        return lr * (step + 1) / schedule.warmup
    done = min(1.0, (step - schedule.warmup) / max(1, schedule.steps - schedule.warmup))
    return lr * (schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * done)) / 2)


def temperature(step: int, gate: Gate, steps: int) -> float | None:
    """The gate's temperature at a step; None is the hard gate."""
    last = gate.until * steps
    if gate.kind == "hard" or step >= last:
        return None
    return gate.start + (gate.end - gate.start) * step / last
