"""Scores and merge costs by name, as the definition has them: on whole matrices."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dla.ops.rules import FIRST_SCORE, FLAT, TIE, Merge, Score

if TYPE_CHECKING:
    from dla.ops.reference.core import Slot


def angle(a: Tensor, b: Tensor) -> Tensor:
    """sqrt(2 - 2 cos) of two matrices; wholly new if one of them is zero, flat where they are nearly parallel."""
    norm_a, norm_b = norm(a), norm(b)
    if norm_a == 0 or norm_b == 0:
        return a.new_tensor(FIRST_SCORE)
    cos = ((a / norm_a) * (b / norm_b)).sum()
    if 1 - cos < FLAT:
        cos = cos.detach()
    return (2 - 2 * cos.clamp(-1, 1)).sqrt()


def token_information(token: Tensor, S: Tensor) -> Tensor:
    """Of the token against S."""
    return token.new_zeros(()) if norm(token) == 0 else angle(token, S)


def state_information(token: Tensor, S: Tensor) -> Tensor:
    """Of S with the token against S without it."""
    if norm(token) == 0:
        return token.new_zeros(())
    return token.new_tensor(FIRST_SCORE) if norm(S) == 0 else angle(S + token, S)


def density(a: "Slot", b: "Slot") -> float:
    return (a.info + b.info) / (a.count + b.count)


def similarity(a: "Slot", b: "Slot") -> float:
    norm_a, norm_b = norm(a.S), norm(b.S)
    return 0.0 if norm_a == 0 or norm_b == 0 else -((a.S / norm_a) * (b.S / norm_b)).sum().item()


def ward(a: "Slot", b: "Slot") -> float:
    gap = norm(a.S / a.count - b.S / b.count).square().item()
    return gap * a.count * b.count / (a.count + b.count)


INFORMATION: dict[Score, Callable[[Tensor, Tensor], Tensor]] = {"token": token_information, "state": state_information}
COSTS: dict[Merge, Callable[["Slot", "Slot"], float]] = {"density": density, "similarity": similarity, "ward": ward}


def cheapest_pair(costs: list[float]) -> int:
    """The oldest pair among those that tie for the smallest finite cost."""
    finite = [c for c in costs if math.isfinite(c)]
    if not finite:
        return 0
    limit = min(finite) + TIE * max(map(abs, finite))
    return next(i for i, c in enumerate(costs) if math.isfinite(c) and c <= limit)


def norm(x: Tensor) -> Tensor:
    """The Frobenius norm, without overflow or underflow of the squares."""
    largest = x.detach().abs().max()
    return largest * (x / largest).norm() if 0 < largest < torch.inf else x.norm()
