"""Softmax attention with rotary positions and grouped keys: the Transformer's mixer, and that of hybrids."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dla.layers.mixer import LayerPast
from dla.layers.packing import Packing
from dla.ops.state import State


class KVState(State):
    """All keys and values so far, every sequence from the left; ``length`` says how many are its own."""

    tensor_names = ("keys", "values", "length")
    growing = ("keys", "values")

    keys: Tensor  # [N, H, L, d]
    values: Tensor  # [N, H, L, d]

    @classmethod
    def empty(cls, like: Tensor, sequences: int) -> "KVState":
        """Of no tokens, for keys and values like ``like`` [B, T, H, d]."""
        none = like.new_zeros(sequences, like.shape[2], 0, like.shape[3])
        return cls(keys=none, values=none, length=torch.zeros(sequences, dtype=torch.int64, device=like.device))

    def append(self, k: Tensor, v: Tensor, packing: Packing) -> "KVState":
        """With new keys and values [B, T, H, d], or packed [1, N, H, d], behind the old."""
        row = torch.arange(packing.sequences, device=k.device)
        if packing.lengths is None:
            new = torch.full_like(self.length, k.shape[1])
            width, row = self.keys.shape[2] + k.shape[1], row[:, None]
        else:
            new = torch.tensor(packing.lengths, device=k.device)
            width, row = max((self.length + new).tolist(), default=0), row.repeat_interleave(new)[None]
        place = packing.positions(self.length)
        keys, values = (F.pad(x, (0, 0, 0, max(0, width - x.shape[2]))).clone() for x in (self.keys, self.values))
        keys[row, :, place], values[row, :, place] = k, v
        return KVState(keys=keys, values=values, length=self.length + new)


class Rotary(nn.Module):
    """Rotates pairs of channels by angles that grow with the position."""

    def __init__(self, size: int, theta: float) -> None:
        super().__init__()
        self.size, self.theta = size, theta

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, H, d] at positions [B, T]"""
        half = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float64)
        angle = positions[..., None].double() * self.theta ** (-half / self.size)  # [B, T, d / 2]
        cos, sin = angle.cos()[:, :, None].to(x.dtype), angle.sin()[:, :, None].to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Causal softmax attention inside every sequence."""

    def __init__(self, hidden_size: int, *, heads: int, key_heads: int, head_dim: int, rope_theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, key_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)
        self.rotary = Rotary(head_dim, rope_theta)

    def forward(
        self, x: Tensor, packing: Packing, past: LayerPast | None = None, notes: dict[str, Any] | None = None
    ) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]"""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        before: KVState | None = None if past is None else past.state
        if before is None:
            before = KVState.empty(k, packing.sequences)
        positions = packing.positions(before.length)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        now = before
        if past is not None:
            now = before.append(k, v, packing)
            past.state = now.detach()
        if before.keys.shape[2] == 0:
            o = _attend_fresh(q, k, v, packing)
        elif packing.lengths is None:
            seen = torch.arange(now.keys.shape[2], device=x.device) <= positions[..., None]  # [B, T, L]
            o = _sdpa(q, now.keys, now.values, mask=seen[:, None])
        else:
            o = _attend_each(q, now, packing.lengths)
        return self.o_proj(o.flatten(-2))


def _attend_fresh(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Sequences that begin in this call: q, k, v [B, T, H, d] or packed."""
    if packing.lengths is None:
        return _sdpa(q, k.transpose(1, 2), v.transpose(1, 2), causal=True)
    parts = zip(*(x.split(packing.lengths, 1) for x in (q, k, v)), strict=True)
    return torch.cat([_sdpa(q, k.transpose(1, 2), v.transpose(1, 2), causal=True) for q, k, v in parts], 1)


def _attend_each(q: Tensor, state: KVState, lengths: tuple[int, ...]) -> Tensor:
    """Packed queries [1, N, H, d], each sequence over its own keys, of which its queries' are the last."""
    outputs = []
    ends = state.length.tolist()
    for i, part in enumerate(q.split(lengths, 1)):
        column = torch.arange(ends[i], device=q.device)
        mask = column <= column[ends[i] - part.shape[1] :, None]
        outputs.append(
            _sdpa(part, state.keys[i : i + 1, :, : ends[i]], state.values[i : i + 1, :, : ends[i]], mask=mask)
        )
    return torch.cat(outputs, 1)


def _sdpa(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """q [B, T, H, d] over keys, values [B, Hk, L, d] -> [B, T, H, d]"""
    if q.shape[1] == 0:
        return q
    grouped = q.shape[2] != keys.shape[1]
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        keys.to(q.dtype),
        values.to(q.dtype),
        attn_mask=mask,
        is_causal=causal and q.shape[1] > 1,
        enable_gqa=grouped,
    )
    return o.transpose(1, 2)
