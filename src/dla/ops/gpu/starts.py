"""Which starts of states are alive, seen from each chunk's start and from each sequence's end: from deaths alone.

A view is a time t of a sequence: that of a chunk's first token, or of the token that would come after the last one. The
starts p < t with t < death are the states that its queries meet there, oldest first; those carried in have positions
below zero. All that is needed to find them is the latest death of any start in each chunk: of the chunks before t, no
more than there are states have one behind t, and only these are looked at.

    capacity 3, chunks of 4       token     0 1 2 3 | 4 5 6 7 |         views    t = 0   (none)
                                  death     ∞ - 5 6 | - ∞ ∞ - |                  t = 4   0 2 3
                                  latest    ∞         ∞                          t = 8   0 5 6
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import per_head, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit
def latest_deaths(death, latest, first, stop, H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr):
    """latest [chunks, H] of death [tokens, H]; -1 where no state opens."""
    c = tl.program_id(0)
    token, inside = tokens_of(first, stop, c, C)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    at = token.to(tl.int64) * H + tl.arange(0, C)[:, None] * H + head[None, :]
    d = tl.load(death + at, mask=inside[:, None] & (head < H)[None, :], other=-1)  # [C, BH]
    tl.store(latest + c * H + head, tl.max(d, 0), mask=head < H)


@triton.jit
def append(position, death, found, K, p, d, alive):
    """Add the starts p with deaths d that are alive to a list that has ``found``; how many it has then."""
    place = found + tl.cumsum(alive.to(tl.int32), 0) - 1
    kept = alive & (place < K)
    tl.store(position + place, p, mask=kept)
    tl.store(death + place, d, mask=kept)
    return found + tl.sum(alive.to(tl.int32), 0)


@triton.jit(do_not_specialize=["carried", "K"])
def starts_alive(
    death, initial_death, latest, position, ends, count, sequence, time, until, first, stop, offset, chunks, carried, K,
    H: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """One program a view and head: position, ends [views, H, K], the list's starts and deaths, and count [views, H]."""
    view, h = tl.program_id(0), tl.program_id(1)
    n, t, last = tl.load(sequence + view), tl.load(time + view), tl.load(until + view)
    origin = tl.load(offset + n)
    place = view * H + h
    position += place.to(tl.int64) * K
    ends += place.to(tl.int64) * K
    found = tl.full((), 0, tl.int32)
    if initial_death is not None:
        for i in range(0, carried, BS):
            state = i + tl.arange(0, BS)
            d = tl.load(initial_death + (n * H + h) * carried + state, mask=state < carried, other=-1)
            found = append(position, ends, found, K, state - carried, d, d > t)
    for b in range(tl.load(chunks + n), last, BC):
        chunk = b + tl.arange(0, BC)
        wanted = tl.load(latest + chunk * H + h, mask=chunk < last, other=-1) > t
        next_one = b - 1
        for _ in range(tl.sum(wanted.to(tl.int32), 0)):
            next_one = tl.min(tl.where(wanted & (chunk > next_one), chunk, last), 0)
            token, inside = tokens_of(first, stop, next_one, C)
            d = per_head(death + h, H, token, inside, -1, C)
            found = append(position, ends, found, K, token - origin + tl.arange(0, C), d, d > t)
    tl.store(count + place, tl.minimum(found, K))


@dataclass(frozen=True)
class Starts:
    """Times count from each sequence's first token. Views: every chunk's start, then every sequence's end."""

    position: Tensor  # [views, H, K] int32, oldest first
    death: Tensor  # [views, H, K] int32
    count: Tensor  # [views, H] int32
    of_tokens: Tensor  # [tokens, H] int32: the death of the start at a token, -1 where there is none
    of_carried: Tensor | None  # [N, H, carried] int32
    latest: Tensor  # [chunks, H] int32: the last death of a start in each chunk, -1 where there is none
    birth: Tensor | None = None  # [tokens, H] int32: when a start begins to count, if not at its token

    @property
    def states(self) -> int:
        """Most that a view can have."""
        return self.position.shape[2]

    @property
    def carried(self) -> int:
        return 0 if self.of_carried is None else self.of_carried.shape[2]


def starts_of(
    death: Tensor, initial: Tensor | None, tiles: Tiles, K: int, ends: bool, birth: Tensor | None = None
) -> Starts:
    """death [tokens, H], initial [N, H, carried] int32, in the sequences' own times; ``ends``: look from there too."""
    H, device, N = death.shape[1], death.device, tiles.sequences
    c = config("latest_deaths")
    latest = torch.empty(tiles.count, H, dtype=torch.int32, device=device)
    where = {"first": tiles.first, "stop": tiles.stop}
    arguments: dict[str, Any] = {"death": death, "latest": latest, **where, "H": H, "C": CHUNK, "BH": c["BH"]}
    launch(latest_deaths, (tiles.count, triton.cdiv(H, c["BH"])), arguments, c)
    sequence, until = tiles.sequence, torch.arange(tiles.count, dtype=torch.int32, device=device)
    time = tiles.first - tiles.offset[sequence]
    if ends:
        sequence = torch.cat([sequence, torch.arange(N, dtype=torch.int32, device=device)])
        time, until = torch.cat([time, tiles.offset.diff()]), torch.cat([until, tiles.chunks[1:]])
    views = len(sequence)
    position, deaths = (torch.empty(views, H, K, dtype=torch.int32, device=device) for _ in range(2))
    made = Starts(
        position, deaths, torch.empty(views, H, dtype=torch.int32, device=device), death, initial, latest, birth
    )
    c = config("starts_alive")
    arguments = {"death": death, "initial_death": initial, "latest": latest}
    arguments |= {"position": made.position, "ends": made.death, "count": made.count}
    arguments |= {"sequence": sequence, "time": time, "until": until, **where, "offset": tiles.offset}
    arguments |= {"chunks": tiles.chunks, "carried": made.carried, "K": K}
    arguments |= {"H": H, "C": CHUNK, "BC": c["BC"], "BS": c["BS"]}
    launch(starts_alive, (views, H), arguments, c)
    return made
