"""Causality for numbers that are not finite.

Inside a chunk, what a query must not see is multiplied by zero, and zero times NaN is NaN: one bad token would reach
the outputs before it. So where a group of chunks has a bad token, what comes before it is computed a second time,
without it and all that follows.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dla.ops.chunked.engine import Inputs


def poisoned(x: "Inputs") -> bool:
    """Whether some token is not finite; with beta also, whether the square of a key is not."""
    parts = [x.v, x.k, x.g, x.beta] if x.beta is None else [x.v, x.k.square(), x.g, x.beta]
    return not bool(sum(part.sum() for part in parts if part is not None).isfinite())  # type: ignore[union-attr]


@dataclass
class Before:
    """Which tokens of a group of chunks come before the first bad one."""

    keys: Tensor  # [n, Hk, G, C] bool: before the key head's first bad key
    tokens: Tensor  # [n, H, G, C] bool: before the head's first bad token

    @classmethod
    def of(cls, x: "Inputs") -> "Before":
        bad_keys = ~(x.k if x.beta is None else x.k.square().sum(-1, keepdim=True)).isfinite().all(-1)
        bad = bad_keys.repeat_interleave(x.v.shape[1] // x.k.shape[1], 1) | ~x.v.isfinite().all(-1)
        for part in (x.g, x.beta):
            bad = bad if part is None else bad | ~part.isfinite()
        return cls(*((y.flatten(2).cumsum(2) == 0).view(y.shape) for y in (bad_keys, bad)))

    def cut(self, x: "Inputs") -> "Inputs":
        """The inputs, zero from the first bad token on."""

        def kept(part: Tensor | None) -> Tensor | None:
            return None if part is None else torch.where(self.tokens, part, 0)

        k, v = torch.where(self.keys[..., None], x.k, 0), torch.where(self.tokens[..., None], x.v, 0)
        return replace(x, k=k, v=v, g=kept(x.g), beta=kept(x.beta), gate=kept(x.gate))
