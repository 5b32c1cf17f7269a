"""Sums of the keys before every token, for routed reads: a state's c is the difference of two of them.

They are float64, so that what two sums have in common cancels without taking digits along. Position p of sequence n is
row offset[n] + n + p: a sequence has one row more than tokens. States carried in have positions below zero, and sums
that are what is missing up to the call's start, taken negative.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.language import rows, tile, tokens_of
from dla.ops.gpu.launch import launch
from dla.ops.gpu.tiles import CHUNK, Tiles


@triton.jit
def running_keys(
    k, sums, first, stop, offset, chunks, k_stride,
    KEY_HEADS: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program a sequence, key head and BK columns: sums [tokens + N, KEY_HEADS, DK] of k [tokens, ..]."""
    tiles: tl.constexpr = tl.cdiv(DK, BK)
    head_of_all = tl.program_id(0) // tiles
    n, h = head_of_all // KEY_HEADS, head_of_all % KEY_HEADS
    column = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    begin, end = tl.load(chunks + n), tl.load(chunks + n + 1)
    k += h * DK
    sums += h * DK
    total = tl.zeros([BK], tl.float64)
    start = (tl.load(offset + n) + n).to(tl.int64) * KEY_HEADS * DK
    tl.store(sums + start + column, total, mask=column < DK)
    for c in range(begin, end):
        token, inside = tokens_of(first, stop, c, C)
        k_ = rows(k, k_stride, token, inside, column, DK, C).to(tl.float64)  # [C, BK]
        at = (token + n + 1).to(tl.int64) * KEY_HEADS * DK + tl.arange(0, C)[:, None] * KEY_HEADS * DK + column[None, :]
        tl.store(sums + at, total[None, :] + tl.cumsum(k_, 0), mask=inside[:, None] & (column < DK)[None, :])
        total += tl.sum(k_, 0)


@triton.jit
def sums_before(sums, past, position, there, n, h, origin, carried, column, KEY_HEADS, GROUP, H, DK):
    """[positions, columns] of the sequence's head h; ``origin`` is its first token."""
    inside = there[:, None] & (column < DK)[None, :]
    at = ((origin + n + position).to(tl.int64) * KEY_HEADS + h // GROUP)[:, None] * DK + column[None, :]
    found = tl.load(sums + at, mask=inside & (position >= 0)[:, None], other=0.0)
    if past is not None:
        at = ((n * H + h).to(tl.int64) * carried + carried + position)[:, None] * DK + column[None, :]
        found += tl.load(past + at, mask=inside & (position < 0)[:, None], other=0.0)
    return found


@dataclass(frozen=True)
class KeySums:
    sums: Tensor  # [tokens + N, Hk, dk] float64
    past: Tensor | None  # [N, H, carried, dk] float64

    def between(self, position: Tensor, count: Tensor, tiles: Tiles) -> Tensor:
        """[N, H, K, dk] float32: the keys of the states that begin at position [N, H, K], zero from ``count`` on."""
        N, H, K = position.shape
        place = torch.arange(K + 1, device=position.device)
        length = tiles.offset.diff()[:, None, None].expand(N, H, 1)
        p = torch.where(place < count[..., None], torch.cat([position, length], 2), length).long()  # ends too
        head = torch.arange(H, device=p.device)[:, None] // (H // self.sums.shape[1])
        first = (tiles.offset[:-1] + torch.arange(N, device=p.device))[:, None, None]
        before = self.sums[first + p.clamp_min(0), head]  # [N, H, K + 1, dk]
        if self.past is not None:
            carried = self.past.shape[2]
            index = (p + carried).clamp(0, carried - 1)[..., None].expand(before.shape)
            before = torch.where((p < 0)[..., None], self.past.gather(2, index), before)
        return before.diff(dim=2).float()


def key_sums_of(k: Tensor, carried: Tensor | None, tiles: Tiles) -> KeySums:
    """k [tokens, Hk, dk]; carried [N, H, carried, dk] are the sums of the states carried in, oldest first."""
    (tokens, key_heads, dk), c, N = k.shape, config("running_keys"), tiles.sequences
    sums = torch.empty(tokens + N, key_heads, dk, dtype=torch.float64, device=k.device)
    BK = tile(dk, c["BK"])
    arguments: dict[str, Any] = {"k": k, "sums": sums, "first": tiles.first, "stop": tiles.stop, "offset": tiles.offset}
    arguments |= {
        "chunks": tiles.chunks,
        "k_stride": k.stride(0),
        "KEY_HEADS": key_heads,
        "DK": dk,
        "C": CHUNK,
        "BK": BK,
    }
    launch(running_keys, (N * key_heads * triton.cdiv(dk, BK),), arguments, c)
    past = None if carried is None else -carried.double().flip(2).cumsum(2).flip(2).contiguous()
    return KeySums(sums, past)
