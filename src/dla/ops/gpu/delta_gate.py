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

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.gpu.delta_plan import Runs, times
from dla.ops.gpu.delta_weights import Gathered
from dla.ops.gpu.tiles import CHUNK, Tiles


def soft_weights(p: Tensor, lam: Tensor, slots: Tensor, death: Tensor, count: Tensor, tiles: Tiles) -> Tensor:
    """[chunks, H, K + 1 + CHUNK, CHUNK]; p, death [tokens, H], lam [tokens, H, width]; slots of the hard gate."""
    at, K = torch.arange(CHUNK, device=p.device), slots.shape[2] - CHUNK
    opens = on_chunks(death >= 0, tiles)
    following = torch.where(opens, at, CHUNK).flip(-1).cummin(-1)[0].flip(-1)  # [chunks, H, C]
    early, late, states = both_slots(slots, following, count[: tiles.count], K)
    first = Gathered.apply(lam, torch.cat([states, early], 2).contiguous(), tiles)
    then = Gathered.apply(lam, late.contiguous(), tiles)
    own = first[:, :, K + 1 :]
    own = own + on_chunks(p, tiles)[..., None] * (then - own)
    return torch.cat([first[:, :, : K + 1], own], 2)


def soft_shares(p: Tensor, following: Tensor, runs: Runs, tiles: Tiles) -> Tensor:
    """[chunks, H, K, CHUNK] what the matrices behind a chunk take of its tokens, by the addresses of their parts."""
    view = runs.after.long()
    begin, end = runs.begin[view][..., None], runs.end[view][..., None]
    late = on_chunks(following, tiles)[:, :, None]
    early = times(tiles)[: tiles.count, None, None, None] + torch.arange(CHUNK, device=p.device) - 1
    gate = on_chunks(p, tiles)[:, :, None]
    shares = ((begin <= early) & (early < end)) * (1 - gate) + ((begin <= late) & (late < end)) * gate
    return shares.contiguous()


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
