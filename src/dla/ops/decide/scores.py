"""The score of a token, I = sqrt(2 - 2 cos), as torch functions over any batch of heads."""

from collections.abc import Callable

import torch
from torch import Tensor

from dla.ops.rules import FIRST_SCORE, FLAT, Score


def _of_the_token(cos: Tensor, norm_S: Tensor, norm_token: Tensor) -> Tensor:
    """Between the token and S."""
    return cos


def _of_the_state(cos: Tensor, norm_S: Tensor, norm_token: Tensor) -> Tensor:
    """Between S with the token and S without it, both measured by the larger."""
    largest = torch.maximum(norm_token, norm_S).detach()
    largest = torch.where(largest == 0, 1, largest)
    a, b = norm_S / largest, norm_token / largest
    square = a.square() + 2 * a * b * cos + b.square()
    gone = square <= 0
    return torch.where(gone, 0, (a + b * cos) / torch.where(gone, 1, square).sqrt())


# cos(token, S), |S| and |token| -> the cosine that the score is made of
COSINES: dict[Score, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"token": _of_the_token, "state": _of_the_state}


def information(
    product: Tensor, norm_k: Tensor, norm_v: Tensor, beta: Tensor | None, norm_S: Tensor, kind: Score
) -> Tensor:
    """I_t, differentiable; all of one shape.

    ``product`` is k^T S v of the unit vectors k and v, norms are those of the vectors and of S.
    """
    token = norm_k * norm_v
    cos = product / torch.where(norm_S == 0, 1, norm_S)
    if beta is not None:
        token, cos = beta.abs() * token, beta.sign() * cos
    cos = COSINES[kind](cos, norm_S, token)
    cos = torch.where(1 - cos < FLAT, cos.detach(), cos)
    score = (2 - 2 * cos.clamp(-1, 1)).sqrt()
    return torch.where(token == 0, 0, torch.where(norm_S == 0, FIRST_SCORE, score))


def safe_norm(x: Tensor, dims: int = 1) -> Tensor:
    """The norm over the last ``dims`` dimensions, without overflow or underflow of the squares; differentiable."""
    x = x.flatten(-dims) if dims > 1 else x
    largest = x.detach().abs().amax(-1)
    largest = torch.where((largest > 0) & (largest < torch.inf), largest, 1)
    return largest * (x / largest[..., None]).norm(dim=-1)


def unit(x: Tensor, norm: Tensor) -> Tensor:
    """x over its norm, zero where that is zero."""
    return x / torch.where(norm == 0, 1, norm)[..., None]
