"""Memories that do not look at the content, as lifetimes: their states are born and end by position alone."""

import torch

from dla.ops import Segmentation
from dla.ops.segmentation import ALIVE


def level_lifetimes(length: int, heads: int) -> Segmentation:
    """Log-Linear's blocks: every token opens one, and a block that starts at p ends p's lowest set bit later.

    Seen from step t the blocks start at t with more and more of its lowest bits cleared, so a start lives from p to
    p + (p & −p), and 0 for ever. Several may end at one step, and there are no scores.
    """
    start = torch.arange(length)
    death = torch.where(start == 0, ALIVE, start + (start & -start)).int()
    return _for_heads(torch.ones(length, dtype=torch.bool), torch.where(death < length, death, ALIVE).int(), heads)


def one_state(length: int, heads: int) -> Segmentation:
    """The single memory: one state from the first token on, and no scores."""
    first = torch.arange(length) == 0
    return _for_heads(first, torch.where(first, ALIVE, -1).int(), heads)


def _for_heads(boundary: torch.Tensor, death: torch.Tensor, heads: int) -> Segmentation:
    shape = (1, len(death), heads)
    return Segmentation(
        torch.zeros(shape), boundary[None, :, None].expand(shape), death[None, :, None].expand(shape).contiguous()
    )
