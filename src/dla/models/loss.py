"""The training loss without the logits of all tokens in memory at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dla.layers.packing import Packing

IGNORED = -100


def next_token_targets(labels: Tensor, packing: Packing) -> Tensor:
    """What each token is to predict: the label after it in its sequence, ``IGNORED`` at the sequence's end.

    labels [B, T] as the batch came -> [B, T] or [1, N] as the layers see it.
    """
    labels = packing.pack(labels)
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:].masked_fill(packing.starts(labels.device)[:, 1:], IGNORED)
    return targets


def token_loss(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, chunk: int, items: Tensor | int | None = None
) -> Tensor:
    """Mean cross-entropy over the targets that count (or their sum over ``items``).

    hidden [B, T, d], targets [B, T]. Logits are made ``chunk`` tokens at a time, and again for the gradient.
    """
    counted = targets != IGNORED
    hidden, targets = hidden[counted], targets[counted]

    def part(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(_wide(head(x)), y, reduction="sum")

    total = _wide(hidden).sum() * 0  # a loss with a gradient (of zero) even where nothing counts
    for x, y in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        total = total + (checkpoint(part, x, y, use_reentrant=False) if torch.is_grad_enabled() else part(x, y))
    return total / (max(targets.numel(), 1) if items is None else items)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
