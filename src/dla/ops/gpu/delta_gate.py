"""The soft gate with delta steps: a part p_s of token s waits for the next state (SPEC of the gate: chunked/gate.py).

What waits is one more state, behind the newest: it takes p of every token, until the next boundary opens a state, which
then is what has waited. 1 - p goes to the state that was current before. So for a chunk's token s, with next(s) the
boundary at s or later (if there is one in the chunk), and slots as the hard gate has them,

                  counts at t like                       goes at the chunk's end to the state of
    1 - p_s       token s - 1                            token s - 1
    p_s           token next(s), or t itself before      token next(s), or to what waits

    tokens        0 1 2 3     (0: the newest state at the chunk's start)      what waits at the chunk's start goes
    boundary      . . x .     1 - p:  - 0 1 2          p:  2 2 2 waits        where p of token 0 goes
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.gpu.delta_plan import Runs
from dla.ops.gpu.delta_weights import Gathered
from dla.ops.gpu.tiles import CHUNK, Tiles


@dataclass(frozen=True)
class GateShares:
    """The walk's tables with the soft gate, over one state more."""

    runs: Runs
    weight: Tensor  # [chunks, H, K + 1 + CHUNK, CHUNK]
    shares: Tensor  # [chunks, H, K + 1, CHUNK]

    @classmethod
    def of(cls, p: Tensor, lam: Tensor, slots: Tensor, death: Tensor, runs: Runs, tiles: Tiles) -> "GateShares":
        """p, death [tokens, H], lam [tokens, H, width]; slots and runs of the hard gate."""
        at = torch.arange(CHUNK, device=p.device)
        opens = on_chunks(death >= 0, tiles)
        following = torch.where(opens, at, CHUNK).flip(-1).cummin(-1)[0].flip(-1)  # [chunks, H, C]
        old = runs.count[: tiles.count]
        gate = on_chunks(p.float(), tiles)
        early, late, states = both_slots(slots, following, old, runs.states)
        first = Gathered.apply(lam, torch.cat([states, early], 2).contiguous(), tiles)
        then = Gathered.apply(lam, late.contiguous(), tiles)
        own = first[:, :, runs.states + 1 :]
        own = own + gate[..., None] * (then - own)
        weight = torch.cat([first[:, :, : runs.states + 1], own], 2)
        soft, shares = both_places(runs, following, old, gate)
        return cls(soft, weight, shares)


def on_chunks(x: Tensor, tiles: Tiles) -> Tensor:
    """x [tokens, H] by chunk: [chunks, H, CHUNK], zero where there is no token."""
    place = tiles.first[:, None].long() + torch.arange(CHUNK, device=x.device)
    place = torch.where(place < tiles.stop[:, None], place, len(x))
    return F.pad(x, (0, 0, 0, 1))[place].transpose(1, 2)


def both_slots(slots: Tensor, following: Tensor, old: Tensor, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots [chunks, H, CHUNK or K + 1, CHUNK] of the tokens' 1 - p, of their p, and of states with what waits."""
    states, own = slots[:, :, :K], slots[:, :, K:]
    at = torch.arange(CHUNK, device=slots.device)
    seen = own >= 0
    newest = states.gather(2, (old - 1).clamp_min(0).long()[..., None, None].expand(*old.shape, 1, CHUNK))
    newest = torch.where((old > 0)[..., None, None], newest, -1)
    early = torch.where(seen, torch.cat([newest, own[:, :, :-1]], 2), -1)
    opened = own.gather(2, following[..., None].minimum(at))  # [.., x, t]: of the token min(next(x), t)
    late = torch.where(seen, opened, -1)
    rank = torch.arange(K + 1, device=slots.device)[:, None]
    waits = (rank == old[..., None, None]) & (old > 0)[..., None, None]
    padded = F.pad(states, (0, 0, 0, 1), value=-1)
    return early, late, torch.where(waits, opened[:, :, :1], padded)


def both_places(runs: Runs, following: Tensor, old: Tensor, gate: Tensor) -> tuple[Runs, Tensor]:
    """Runs with what waits as one more state, and the tokens' shares of all of them."""
    device, K = gate.device, runs.states
    new = runs.count[runs.after.long()]  # [chunks, H] states behind each chunk
    token = torch.arange(CHUNK + 1, device=device)
    of_token = (runs.places[..., None] <= token).sum(2)  # [chunks, H, C + 1] the state of each token
    of_token = torch.where(token == CHUNK, new[..., None], of_token)
    to_next = of_token.gather(2, following)
    newest = (runs.heirs < old[..., None]).sum(2, keepdim=True)
    to_last = torch.cat([newest, of_token[..., : CHUNK - 1]], 2)
    rank = torch.arange(K + 1, device=device)
    shares = (to_last[:, :, None] == rank[:, None]) * (1 - gate[:, :, None])
    shares = shares + (to_next[:, :, None] == rank[:, None]) * gate[:, :, None]
    heirs = F.pad(runs.heirs, (0, 1))
    heirs = torch.where(rank >= new[..., None], old[..., None], heirs)
    heirs = heirs + ((rank >= to_next[..., :1]) & (old > 0)[..., None])
    count = torch.where(runs.count > 0, runs.count + 1, 0)
    one_more = {name: F.pad(getattr(runs, name), (0, 1)) for name in ("begin", "end", "since", "places")}  # not needed
    return replace(runs, count=count.int(), heirs=heirs.int().contiguous(), **one_more), shares.contiguous()
