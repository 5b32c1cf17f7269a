"""Validation loss, over all and by position in the context."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dla.models.loss import IGNORED
from dla.training.data.feed import Micro
from dla.training.trainer import Trainer, inputs

FIRST = 64  # tokens of the first bucket; each further one is as long as all before it


@torch.no_grad()
def evaluate(trainer: Trainer, micros: Iterable[Micro]) -> dict[str, Any]:
    """Mean loss of a token, perplexity, and the mean loss of the positions 0-63, 64-127, 128-255 and so on.

    Every rank has its own micro-batches, and as many of them as the others. Without any target there is no loss (nan).
    """
    trainer.model.eval()
    sums = torch.zeros(2, 64, dtype=torch.float64)
    for micro in micros:
        with trainer.precision():
            losses = trainer.model(**inputs(micro, trainer.world.device), loss_reduction="none", use_cache=False).loss
        sums += sums_of(micro, losses.cpu())
    trainer.model.train()
    return summary(torch.tensor(trainer.world.total(*sums.flatten().tolist()), dtype=torch.float64).view(2, -1))


def sums_of(micro: Micro, losses: Tensor) -> Tensor:
    """[2, 64] the sums of losses [B, T] over the targets of each bucket of positions, and how many targets it has."""
    counted = micro.targets != IGNORED
    found = torch.stack([losses.double()[counted], torch.ones(int(counted.sum()), dtype=torch.float64)])
    return torch.zeros(2, 64, dtype=torch.float64).index_add_(1, buckets(micro)[counted], found)


def summary(sums: Tensor) -> dict[str, Any]:
    """The figures of an evaluation, from all of its sums."""
    loss = (sums[0].sum() / sums[1].sum()).item()
    return {
        "validation_loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "by_position": {name(i): (sums[0, i] / sums[1, i]).item() for i in range(sums.shape[1]) if sums[1, i]},
        "tokens": int(sums[1].sum()),
    }


def buckets(micro: Micro) -> Tensor:
    """[B, T] the bucket of each token's position in its document or sequence."""
    positions = micro.positions
    if positions is None:
        positions = torch.arange(micro.ids.shape[1]).expand_as(micro.ids)
    return torch.log2((positions // FIRST).clamp(min=0.5)).floor().long() + 1


def name(bucket: int) -> str:
    """The first and last position of a bucket."""
    end = FIRST << bucket
    return f"{0 if bucket == 0 else end // 2}-{end - 1}"
