"""Where the sequences of a batch lie once padding is gone."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """The tokens of a [B, T] batch as layers see them.

    Either as they are, every row one sequence (``lengths`` is None), or one after another in [1, N] without padding.
    """

    batch: int
    time: int
    lengths: tuple[int, ...] | None = None  # of the packed sequences
    kept: Tensor | None = None  # [N] which tokens of the flat [B * T] are there; None for all
    rows: bool = True  # whether sequence i is row i of the batch, so that a cache can follow it

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor | None:
        """Ends of the packed sequences [0, ..., N] on the host, where they are needed."""
        if self.lengths is None:
            return None
        return torch.tensor([0, *accumulate(self.lengths)])

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> what the layers see."""
        if self.lengths is None:
            return x
        x = x.flatten(0, 1)
        return (x if self.kept is None else x[self.kept.to(x.device)])[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Back to [B, T, ...], zero where there was padding."""
        if self.lengths is None:
            return x
        x = x[0]
        if self.kept is not None:
            x = x.new_zeros(self.batch * self.time, *x.shape[1:]).index_copy(0, self.kept.to(x.device), x)
        return x.unflatten(0, (self.batch, self.time))

    def positions(self, past: Tensor) -> Tensor:
        """[B, T] or [1, N]: each token's position in its sequence, given the tokens seen before [sequences]."""
        if self.lengths is None:
            return past[:, None] + torch.arange(self.time, device=past.device)
        within = torch.cat([torch.arange(n) for n in self.lengths]).to(past.device)
        return (within + past.repeat_interleave(torch.tensor(self.lengths, device=past.device)))[None]

    def starts(self, device: torch.device) -> Tensor:
        """[1, N] or [B, T] bool: where a sequence begins in this call."""
        if self.lengths is None:
            first = torch.zeros(self.batch, self.time, dtype=torch.bool, device=device)
            first[:, :1] = True
            return first
        ends = [0, *accumulate(self.lengths)]
        first = torch.zeros(1, ends[-1], dtype=torch.bool, device=device)
        first[0, [a for a, b in pairwise(ends) if b > a]] = True
        return first


def find_packing(
    batch: int,
    time: int,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    continues: bool = False,
) -> Packing:
    """How a [B, T] batch is to be read.

    ``attention_mask`` [B, >= T] drops tokens (its last T columns count), ``position_ids`` [B or 1, T] start a sequence
    wherever they are 0, ``cu_seqlens`` gives the ends of the sequences packed in a batch of one. ``continues``: there
    is a past, so that no sequence can begin inside the batch.
    """
    if cu_seqlens is not None:
        return _given_packing(batch, time, attention_mask, cu_seqlens, continues)
    keep = _kept(batch, time, attention_mask)
    first = _resets(batch, time, position_ids, keep) if not continues else None
    if keep is None and first is None:
        return Packing(batch, time)
    if first is None:
        assert keep is not None
        return Packing(batch, time, tuple(keep.sum(1).tolist()), keep.flatten().nonzero()[:, 0])
    if keep is None:
        keep = torch.ones_like(first)
    begin = first.flatten()[keep.flatten()].nonzero()[:, 0].tolist()
    lengths = tuple(b - a for a, b in pairwise([*begin, int(keep.sum())]))
    return Packing(batch, time, lengths, keep.flatten().nonzero()[:, 0], rows=False)


def _given_packing(
    batch: int, time: int, attention_mask: Tensor | None, cu_seqlens: Tensor, continues: bool
) -> Packing:
    if continues:
        raise ValueError("cu_seqlens packs whole sequences and cannot continue a cache; pass past_key_values=None")
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        raise ValueError("cu_seqlens packs sequences without padding; got an attention_mask with zeros as well")
    ends = cu_seqlens.flatten().tolist()
    if batch != 1 or len(ends) < 2 or ends[0] != 0 or ends[-1] != time or any(a > b for a, b in pairwise(ends)):
        raise ValueError(
            f"cu_seqlens must be [0, ..., {time}], never decreasing, with a batch of one, "
            f"got {ends} and a batch of {batch}"
        )
    return Packing(batch, time, tuple(b - a for a, b in pairwise(ends)), rows=len(ends) == 2)


def _kept(batch: int, time: int, attention_mask: Tensor | None) -> Tensor | None:
    """[B, T] bool, or None where no token is dropped."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < time:
        raise ValueError(
            f"attention_mask must be [{batch}, {time}] (or longer, with the past), got {list(attention_mask.shape)}"
        )
    keep = attention_mask[:, attention_mask.shape[1] - time :].bool()
    return None if bool(keep.all()) else keep


def _resets(batch: int, time: int, position_ids: Tensor | None, keep: Tensor | None) -> Tensor | None:
    """[B, T] bool, where sequences begin, or None where each row is one sequence."""
    if position_ids is None or time == 1:
        return None
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != time:
        raise ValueError(f"position_ids must be [{batch}, {time}] or [1, {time}], got {list(position_ids.shape)}")
    first = (position_ids == 0).expand(batch, time)
    if keep is None:
        first = first.clone()
        first[:, 0] = True
        return first if int(first.sum()) > batch else None
    row_start = keep & (keep.cumsum(1) == 1)
    first = (first & keep) | row_start
    return first if bool((first & ~row_start).any()) else None
