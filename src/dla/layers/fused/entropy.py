"""Cross-entropy over small vocabularies: logits are made once, and are their own gradient's room."""

from typing import Any

import torch
from torch import Tensor, nn

from dla.layers.fused.dense import product, small_maps
from dla.layers.fused.when import first_order
from dla.ops.cpu.binding import Arguments, call

MOST_LOGITS = 1 << 22  # numbers that are kept until the backward pass


class EntropyArgs(Arguments):
    """Mirrors the struct of the same name in layer_args.h."""

    _fields_ = Arguments.fields("rows classes threads", "", "logits target loss")


class TokenEntropy(torch.autograd.Function):
    """The sum of the cross-entropies of hidden [tokens, size] @ weight.T at targets [rows].

    index [rows]: the tokens that have a target, in order; None: all of them.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, index: Tensor | None) -> Tensor:
        rows = hidden.detach() if index is None else hidden.detach().index_select(0, index)
        logits, loss = product(rows, weight.detach().t()), torch.empty(len(rows))
        arguments = EntropyArgs(*logits.shape, torch.get_num_threads())
        call("dla_entropy", arguments, {"logits": logits, "target": targets, "loss": loss})
        ctx.save_for_backward(hidden, weight, rows, logits, index)
        return loss.sum()

    @staticmethod
    @first_order
    def backward(ctx: Any, d: Tensor) -> Any:
        hidden, weight, rows, gradient, index = ctx.saved_tensors
        d_hidden = d_weight = None
        if ctx.needs_input_grad[0]:
            d_rows = product(gradient, weight).mul_(d)
            d_hidden = d_rows if index is None else torch.zeros_like(hidden).index_copy_(0, index, d_rows)
        if ctx.needs_input_grad[1]:
            d_weight = product(gradient.t(), rows).mul_(d)
        return d_hidden, d_weight, None, None


def token_entropy(head: Any, hidden: Tensor, targets: Tensor, counted: Tensor) -> Tensor | None:
    """The sum of the losses of hidden [B, T, size] at targets [B, T] where ``counted``; None where not run here."""
    if not (isinstance(head, nn.Linear) and small_maps(hidden, head)):
        return None
    if targets.device.type != "cpu" or targets.dtype != torch.int64:
        return None
    index = counted.flatten().nonzero()[:, 0]
    every = len(index) == targets.numel()
    asked = targets.flatten() if every else targets.flatten().index_select(0, index)
    if len(asked) * len(head.weight) > MOST_LOGITS:
        return None
    if len(asked) and not (int(asked.min()) >= 0 and int(asked.max()) < len(head.weight)):
        raise IndexError(f"targets must be from 0 to {len(head.weight) - 1}, got up to {int(asked.max())}")
    return TokenEntropy.apply(hidden.flatten(0, -2), head.weight, asked.contiguous(), None if every else index)
