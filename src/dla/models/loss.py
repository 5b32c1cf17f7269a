"""The training loss without the logits of all tokens in memory at once."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dla.layers.fused import token_entropy
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
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, chunk: int, items: Tensor | float | None = None
) -> Tensor:
    """Mean cross-entropy over the targets that count (or their sum over ``items``).

    hidden [B, T, d], targets [B, T]. Logits are made ``chunk`` tokens at a time, and again for the gradient;
    a few of them in one piece.
    """
    counted = targets != IGNORED
    divisor = counted.sum().clamp(min=1) if items is None else items
    if (fused := token_entropy(head, hidden, targets, counted)) is not None:
        return fused / divisor
    total = _wide(hidden[:, :1]).sum() * 0  # a loss with a gradient (of zero) even where nothing counts
    for part in _pieces(head, hidden[counted], targets[counted], chunk, "sum"):
        total = total + part
    return total / divisor


def token_losses(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """[B, T] the cross-entropy of each token, 0 where the target does not count; otherwise as ``token_loss``."""
    counted = targets != IGNORED
    losses = torch.zeros(targets.shape, dtype=_wide(hidden[:0]).dtype, device=hidden.device)
    parts = list(_pieces(head, hidden[counted], targets[counted], chunk, "none"))
    return losses.masked_scatter(counted, torch.cat(parts)) if parts else losses


def _pieces(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, chunk: int, reduction: str
) -> Iterator[Tensor]:
    """Losses of [N, d] hidden states and [N] targets, ``chunk`` at a time."""

    def part(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(_wide(head(x)), y, reduction=reduction)

    for x, y in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        yield checkpoint(part, x, y, use_reentrant=False) if torch.is_grad_enabled() else part(x, y)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
