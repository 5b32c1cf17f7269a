"""Which states are matrices, and which of few tokens are rows (delta_rows.py).

A token's part belongs to the state that the part's address lies in, among those that have begun. Without a gate a token
is one part, and its time the address. With the soft gate the part 1 - p of token s has the address s - 1, and the part
p that of the first boundary at s or later, which the state waits for that begins there; what has no boundary yet is one
more state behind the newest, from the next boundary on and without an end.

    tokens       0 1 2 3 4 5          1 - p at     - 0 1 2 3 4
    boundaries   x . . x . .          p at         0 3 3 3 ? ?         states    0 to 2, 3 to 5, ? waits

A state that has become a matrix stays one: it only grows. Chunks of which all tokens are in matrices have no rows; they
lie in a row, from ``low`` to ``high``, wherever matrices do.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.gpu.delta_operation import RowTables
from dla.ops.gpu.delta_plan import BEHIND, Runs, next_of, ranks, times
from dla.ops.gpu.delta_row_plan import lives_of
from dla.ops.gpu.starts import Starts
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.problem import Layout

NEVER = BEHIND - 1  # the next boundary, where there is none
TYPICAL = (8, 36)  # matrices and tiles of rows at a view: the most in benchmarks/gpu_rows.py, where nothing is counted


@dataclass(frozen=True)
class Boundaries:
    """Of each token [tokens, H] int32, in its sequence's own time."""

    last: Tensor  # at it or before
    following: Tensor  # at it or later; NEVER if there is none

    @classmethod
    def of(cls, opened: Tensor, layout: Layout) -> "Boundaries":
        """opened [tokens, H]; first tokens always are."""
        device, tokens = opened.device, len(opened)
        edges = torch.tensor([(a, a + n) for a, n in zip(layout.offsets, layout.lengths, strict=True)], device=device)
        origin, end = layout.each_token(edges.view(-1, 2))[:, :, None].unbind(1)
        at = torch.arange(tokens, device=device)[:, None]
        if not tokens:  # something to look up, of no use
            return cls(*(torch.zeros(1, opened.shape[1], dtype=torch.int32, device=device) for _ in range(2)))
        last = torch.where(opened, at, -1).cummax(0)[0].maximum(origin)
        following = torch.where(opened, at, tokens).flip(0).cummin(0)[0].flip(0)
        following = torch.where(following < end, following - origin, NEVER)
        return cls((last - origin).int(), following.int().contiguous())

    def before(self, time: Tensor, tiles: Tiles) -> Tensor:
        """The last boundary before each time [views, H, K]; -1 before the first token."""
        token = time.clamp(max=2**30) - 1 + origins(tiles)[:, None, None]
        found = self.last[token.clamp(0, len(self.last) - 1), heads_of(time)]
        return torch.where(time > 0, found, -1)


@dataclass(frozen=True)
class StateViews:
    """All states of each view, oldest first: [views, H, K] int32, in the sequences' own times."""

    begin: Tensor  # of their addresses; BEHIND where there is no state
    end: Tensor
    tokens: Tensor  # how many tokens they have parts of
    low: Tensor  # the first token that has no part in an older one
    high: Tensor  # behind the last token that has no part in a newer one

    @classmethod
    def hard(cls, starts: Starts, tiles: Tiles) -> "StateViews":
        begin, end = begin_and_end(starts, tiles)
        return cls(begin, end, torch.where(begin < 0, BEHIND, end - begin), begin.clamp_min(0), end)

    @classmethod
    def soft(cls, starts: Starts, boundaries: Boundaries, tiles: Tiles) -> "StateViews":
        """With the state that waits, and without any from before."""
        now = times(tiles)[:, None, None]
        begin, end = (F.pad(x, (0, 1), value=BEHIND) for x in begin_and_end(starts, tiles))
        waits = (ranks(begin) == starts.count[..., None]) & (now > 0)
        token = (now + origins(tiles)[:, None, None]).clamp(max=len(boundaries.last) - 1)
        token = token.expand(-1, begin.shape[1], -1)
        following = boundaries.following[token, heads_of(token)]
        following[tiles.count :] = NEVER
        begin = torch.where(waits, following, begin)
        there = begin < BEHIND
        stop = torch.where(waits, now, end)
        first = torch.where(waits, boundaries.before(now.expand_as(token), tiles), boundaries.before(begin, tiles)) + 1
        high = torch.where(waits, now, boundaries.before(end, tiles) + 1)
        return cls(begin, end, torch.where(there, stop - first, 0), begin + (begin > 0), high)

    def split(self, least: int, ends: bool, tiles: Tiles, following: Tensor | None = None) -> tuple[Runs, RowTables]:
        """Those of ``least`` tokens or more are matrices; ``ends``: all are, behind the last token.

        How many there are at most is asked of the device, which is waited for.
        """
        there = self.begin < BEHIND
        long = there & (self.tokens >= least)
        if ends:
            long[tiles.count :] = there[tiles.count :]
        before = F.pad(long[..., :-1], (1, 0))
        first = torch.where(long & ~before, -(-self.low // CHUNK), 0)
        high = torch.where(long, (self.high // CHUNK).maximum(first), 0).cummax(2)[0]
        low = torch.where(long & ~before, first, F.pad(high[..., :-1], (1, 0)))
        met = (times(tiles)[:, None] // CHUNK - (high - low).sum(2)).int().contiguous()
        most, slots = TYPICAL
        if not long.is_meta:
            found = (x.max() if x.numel() else long.new_zeros(()) for x in (long.sum(2), met[: tiles.count]))
            most, slots = torch.stack([x.long() for x in found]).tolist()
        most, slots = min(max(most, 1), long.shape[2]), max(slots, 1)
        runs = Runs.of_long(self.begin, self.end, long, most, tiles)
        low, high = low.int().contiguous(), high.int().contiguous()
        short = torch.where(long, BEHIND, self.begin).contiguous()
        until = lives_of(low, high, tiles)
        return runs, RowTables(short, self.end.contiguous(), low, high, met, until, following, slots)


def begin_and_end(starts: Starts, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """[views, H, K] of the states at each view, of which each ends where the next begins."""
    now = times(tiles)[:, None, None]
    there = ranks(starts.position) < starts.count[..., None]
    begin = torch.where(there, starts.position, BEHIND)
    return begin, torch.where(there, next_of(begin).minimum(now), BEHIND)


def origins(tiles: Tiles) -> Tensor:
    """[views] the first token of each one's sequence."""
    return torch.cat([tiles.offset[tiles.sequence], tiles.offset[:-1]])


def heads_of(x: Tensor) -> Tensor:
    """[H, 1] of x [views, H, K]"""
    return torch.arange(x.shape[1], device=x.device)[:, None]
