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

from dla.typed import Count, convert


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
    lengths = _check_blocks(u, blocks)
    _check_shape("q", q, "[d]", (u.shape[1],))
    if representatives is not None:
        _check_shape("representatives", representatives, "[blocks, d]", (len(lengths), u.shape[1]))
    q = q.detach().double()
    residual, heterogeneity = _residuals(u, lengths, representatives)
    bound = q.norm() * (lengths.double() * heterogeneity).sqrt().sum()
    # y − ỹ = Σ_t q·(u_t − ū): summing residuals keeps the digits that a difference of two large sums would lose.
    return bound, (residual @ q).sum().abs()


def block_heterogeneity(u: Tensor, blocks: Sequence[int] | Tensor) -> Tensor:
    """Σ_{t∈C_i} ‖u_t − mean_i‖² of each block. u [T, d] -> [blocks], float64."""
    return _residuals(u, _check_blocks(u, blocks))[1]


def bound_of_writes(k: Tensor, v: Tensor, blocks: Sequence[int] | Tensor) -> float:
    """Theorem 1's bound for a query of norm 1 and u_t = k_t v_tᵀ: k [T, dk], v [T, dv].

    Σ ‖u_t − ū‖² = Σ ‖k_t‖² ‖v_t‖² − ‖Σ k_t v_tᵀ‖² / n, so that no u is made: a product of two matrices a block.
    """
    k, v = k.detach().double(), v.detach().double()
    lengths = _check_blocks(k, blocks).tolist()
    size = k.square().sum(-1) * v.square().sum(-1)
    bound = 0.0
    for keys, values, sizes in zip(k.split(lengths), v.split(lengths), size.split(lengths), strict=True):
        within = sizes.sum() - (keys.T @ values).square().sum() / len(keys)
        bound += (len(keys) * within.clamp_min(0)).sqrt().item() if len(keys) > 1 else 0.0
    return bound


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
    last = convert("length", length, Count) - 1
    return [1 << bit for bit in reversed(range(last.bit_length())) if last >> bit & 1] + [1]


def fixed_blocks(length: int, n_blocks: int) -> list[int]:
    """Lengths of n_blocks contiguous blocks of `length` tokens, as equal as can be (they differ by at most one)."""
    convert("length", length, Count)
    convert("n_blocks", n_blocks, Count)
    if n_blocks > length:
        raise ValueError(f"n_blocks must be at most length ({length}), so that no block is empty, got {n_blocks}")
    size, longer = divmod(length, n_blocks)
    return [size + 1] * longer + [size] * (n_blocks - longer)


def _check_blocks(u: Tensor, blocks: Sequence[int] | Tensor) -> Tensor:
    """Refuse contributions and lengths of blocks that do not fit together; the lengths as an int64 tensor."""
    if not isinstance(u, Tensor) or u.ndim != 2 or u.is_complex():
        raise ValueError(f"u must be a real tensor [T, d], got {_describe(u)}")
    if isinstance(blocks, Tensor) and (blocks.ndim != 1 or blocks.is_floating_point()):
        raise ValueError(f"blocks must be a sequence of integers or a 1-d integer tensor, got {_describe(blocks)}")
    lengths = [int(n) for n in blocks]
    if any(n != given for n, given in zip(lengths, blocks, strict=True)):
        raise ValueError(f"blocks must be whole numbers, got {list(blocks)}")
    if any(n < 1 for n in lengths):
        raise ValueError(f"blocks must all be at least 1, got {min(lengths)} at index {lengths.index(min(lengths))}")
    if sum(lengths) != len(u):
        raise ValueError(f"blocks must sum to T = {len(u)}, the length of u, they sum to {sum(lengths)}")
    return torch.tensor(lengths, dtype=torch.int64, device=u.device)


def _check_shape(name: str, value: object, dims: str, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or value.shape != shape:
        raise ValueError(f"{name} must be a tensor {dims} = {list(shape)}, got {_describe(value)}")


def _describe(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
