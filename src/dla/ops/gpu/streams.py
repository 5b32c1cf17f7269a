"""The soft gate as two streams of values, each read by starts of its own.

Token x counts with 1 - p_x in the state that was current before it, and with p_x in the next one that opens, at x or
later; until that has opened, with the current one. Seen from t, with starts q <= t that are alive then, the slot of the
first part is the number of those with q < x, less one, and the slot of the second the number of those with prev(q) < x,
prev(q) being the boundary before q, dead or alive. So both are sums of values that starts divide as ever, but at other
tokens than where states open:

    stream   values      a start at q divides at   and counts from
    stays    (1 - p) v   q + 1                     q
    waits    p v         prev(q) + 1               q

    token    0 1 2 3 4 5 6        stays  divides at  1 3 4        waits  divides at  0 1 3
    start    x . x x . . .               from        0 2 3               from        0 2 3

The first token's p is one: its first part is nothing, whose slot may be any.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dla.ops.problem import Layout


@dataclass(frozen=True)
class Streams:
    """Deaths and births of starts at the tokens where they divide [tokens, H] int32, in the sequences' own times."""

    stays: tuple[Tensor, Tensor]
    waits: tuple[Tensor, Tensor]
    living: Tensor  # [tokens, H] int32: how many states live after each step

    @classmethod
    def of(cls, death: Tensor, boundary: Tensor, layout: Layout) -> "Streams":
        """death [tokens, H] int32 in the sequences' own times, boundary [tokens, H] bool."""
        tokens = len(death)
        time, end = _places(layout, death)
        first = time == 0

        def before(x: Tensor, otherwise: int) -> Tensor:
            """x of the token before; none before the first."""
            moved = torch.cat([x[:1], x[:-1]])
            return torch.where(first, otherwise, moved)

        stays = before(death, -1), before(time.expand_as(death), 0)
        token = torch.arange(tokens, device=death.device)[:, None]
        following = torch.where(boundary, token, tokens).flip(0).cummin(0)[0].flip(0)  # the boundary at x or later
        divides = first | (before(boundary.int(), 0) > 0)
        divides &= following < end
        opens = following.clamp_max(max(tokens - 1, 0))
        waits = torch.where(divides, death.gather(0, opens), -1), time + (opens - token).int()
        return cls(both(*stays), both(*waits), living(death, None, layout))


def both(death: Tensor, birth: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels take them."""
    return death.int().contiguous(), birth.int().contiguous()


def living(death: Tensor, initial: Tensor | None, layout: Layout) -> Tensor:
    """[tokens, H] int32: how many states live after each step, of starts with these deaths [tokens, H], and of states
    carried in, with those [N, H, carried], -1 where there is none."""
    time, end = _places(layout, death)
    length = torch.tensor(layout.lengths, dtype=torch.int64, device=death.device)[:, None, None]
    offset = torch.tensor(layout.offsets, dtype=torch.int64, device=death.device)[:, None, None]
    token = torch.arange(len(death), device=death.device)[:, None]
    change = (death >= 0).int()
    ends = (death >= 0) & (death < end - (token - time))
    change.scatter_add_(0, torch.where(ends, death + (token - time), 0), -ends.int())
    live: Tensor | int = 0
    if initial is not None:
        ends = (initial >= 0) & (initial < length)
        at = torch.where(ends, initial + offset, 0).transpose(1, 2).flatten(0, 1)
        change.scatter_add_(0, at, -ends.int().transpose(1, 2).flatten(0, 1))
        live = layout.each_token((initial >= 0).sum(2))
    return (layout.running(change) + live).int().contiguous()


def _places(layout: Layout, like: Tensor) -> tuple[Tensor, Tensor]:
    """Of every token [tokens, 1]: its time in its sequence, int32, and where on the flat axis that ends."""
    device = like.device
    offset, length = (torch.tensor(x, dtype=torch.int64, device=device) for x in (layout.offsets, layout.lengths))
    begin, count = (layout.each_token(x)[:, None] for x in (offset, length))
    time = torch.arange(len(like), device=device)[:, None] - begin
    return time.int(), begin + count
