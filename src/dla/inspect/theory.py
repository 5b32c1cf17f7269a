"""Theorem 1: how far block representatives can be from the tokens they stand for.

Replace every contribution u_t of a contiguous block C_i by one representative ū_i. A linear read y(q) = Σ_t q·u_t then
deviates from ỹ(q) = Σ_i |C_i| q·ū_i by at most

    |y(q) − ỹ(q)| ≤ ‖q‖ Σ_i sqrt(|C_i|) sqrt(Σ_{t∈C_i} ‖u_t − ū_i‖²).

With ū_i the block's mean the left side is exactly 0: the bound measures the heterogeneity inside blocks, it is not an
error of the operator.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def deviation_bound(
    u: Tensor, blocks: Sequence[int] | Tensor, q: Tensor, representatives: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The two sides of Theorem 1, in float64 and without gradient.

    Args:
        u: [T, d], the contributions, oldest first.
        blocks: lengths of the contiguous blocks, oldest first; each at least 1, together T.
        q: [d], the query.
        representatives: [len(blocks), d]; None takes the means of the blocks.

    Returns:
        (bound, deviation), two scalars: the right side, and |y(q) − ỹ(q)| itself.
    """
    lengths = _check(u, blocks, q, representatives)
    q = q.detach().double()
    residual, heterogeneity = _residuals(u, lengths, representatives)
    bound = q.norm() * (lengths.double() * heterogeneity).sqrt().sum()
    # y − ỹ = Σ_t q·(u_t − ū): summing residuals keeps the digits that a difference of two large sums would lose.
    return bound, (residual @ q).sum().abs()


def block_heterogeneity(u: Tensor, blocks: Sequence[int] | Tensor) -> Tensor:
    """Σ_{t∈C_i} ‖u_t − mean_i‖² of each block. u [T, d] -> [blocks], float64."""
    return _residuals(u, _check_blocks(blocks, _check_contributions(u), u.device))[1]


def _residuals(u: Tensor, lengths: Tensor, representatives: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the representatives (None: the means) leave of each contribution [T, d], and its squares in a block."""
    u = u.detach().double()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=u.device), lengths)  # [T]
    if representatives is None:
        first = u[lengths.cumsum(0) - lengths]  # [blocks, d]
        # Relative to the block's first token, so that a constant block has exactly its constant as mean.
        representatives = first + torch.zeros_like(first).index_add_(0, owner, u - first[owner]) / lengths[:, None]
    residual = u - representatives.detach().double().to(u.device)[owner]
    return residual, u.new_zeros(len(lengths)).index_add_(0, owner, residual.square().sum(-1))


def fenwick_blocks(length: int) -> list[int]:
    """Block lengths, oldest first, of the Fenwick (Log-Linear) partition of `length` tokens, seen from the last one.

    Token s is on level bit_length(t XOR s) seen from t = length − 1: one block of 2^i tokens for every set bit i of t,
    largest and oldest first, then the last token alone.
    """
    _check_positive("length", length)
    last = length - 1
    return [1 << bit for bit in reversed(range(last.bit_length())) if last >> bit & 1] + [1]


def fixed_blocks(length: int, n_blocks: int) -> list[int]:
    """Lengths of n_blocks contiguous blocks of `length` tokens, as equal as can be (they differ by at most one)."""
    _check_positive("length", length)
    _check_positive("n_blocks", n_blocks)
    if n_blocks > length:
        raise ValueError(f"n_blocks must be at most length ({length}), so that no block is empty, got {n_blocks}")
    size, longer = divmod(length, n_blocks)
    return [size + 1] * longer + [size] * (n_blocks - longer)


def _check(u: Tensor, blocks: Sequence[int] | Tensor, q: Tensor, representatives: Tensor | None) -> Tensor:
    """Refuse what does not fit together; the block lengths as an int64 tensor."""
    length = _check_contributions(u)
    width = u.shape[1]
    lengths = _check_blocks(blocks, length, u.device)
    if not isinstance(q, Tensor) or q.shape != (width,):
        raise ValueError(f"q must be a tensor [d] = [{width}], as u is [T, d] = {list(u.shape)}, got {_describe(q)}")
    if representatives is not None and (
        not isinstance(representatives, Tensor) or representatives.shape != (len(lengths), width)
    ):
        raise ValueError(
            f"representatives must be None or a tensor [blocks, d] = [{len(lengths)}, {width}]; "
            f"got {_describe(representatives)}"
        )
    return lengths


def _check_contributions(u: Tensor) -> int:
    if not isinstance(u, Tensor) or u.ndim != 2 or u.is_complex():
        raise ValueError(f"u must be a real tensor [T, d], got {_describe(u)}")
    return u.shape[0]


def _check_blocks(blocks: Sequence[int] | Tensor, length: int, device: torch.device) -> Tensor:
    if isinstance(blocks, Tensor) and (blocks.ndim != 1 or blocks.is_floating_point()):
        raise ValueError(f"blocks must be a sequence of integers or a 1-d integer tensor, got {_describe(blocks)}")
    lengths = [int(n) for n in (blocks.tolist() if isinstance(blocks, Tensor) else blocks)]
    if any(n != given for n, given in zip(lengths, blocks, strict=True)):
        raise ValueError(f"blocks must be whole numbers, got {list(blocks)}")
    if any(n < 1 for n in lengths):
        raise ValueError(f"blocks must all be at least 1, got {min(lengths)} at index {lengths.index(min(lengths))}")
    if sum(lengths) != length:
        raise ValueError(f"blocks must sum to T = {length}, the length of u, they sum to {sum(lengths)}")
    return torch.tensor(lengths, dtype=torch.int64, device=device)


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _describe(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
