"""Softmax attention with rotary positions and grouped keys: the Transformer's mixer, and that of hybrids."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dla.layers.call import Call
from dla.layers.packing import Packing
from dla.ops.state import State
from dla.ops.state.base import FLOATS, expect, expect_all, expect_length


class KVState(State):
    """Keys and values so far, or the last ``window`` of them, every sequence from the left."""

    tensor_names = ("keys", "values", "length")
    setting_names = ("window",)
    growing = ("keys", "values")

    keys: Tensor  # [N, H, L, d]
    values: Tensor  # [N, H, L, d]
    window: int | None

    @classmethod
    def empty(cls, like: Tensor, sequences: int, window: int | None = None) -> "KVState":
        """Of no tokens, for keys and values like ``like`` [B, T, H, d]."""
        none = like.new_zeros(sequences, like.shape[2], 0, like.shape[3])
        length = torch.zeros(sequences, dtype=torch.int64, device=like.device)
        return cls(keys=none, values=none, length=length, window=window)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.keys.shape[0], self.keys.shape[1], self.keys.shape[-1], self.values.shape[-1]

    @property
    def start(self) -> Tensor:
        """[N] the position of the first key held."""
        return torch.zeros_like(self.length) if self.window is None else (self.length - self.window).clamp_min(0)

    def check(self) -> None:
        expect("keys", self.keys, (-1, -1, -1, -1), *FLOATS, torch.bfloat16, torch.float16)
        N, H, L, _ = self.keys.shape
        expect("values", self.values, (N, H, L, -1), self.keys.dtype)
        expect_length(self.length, N)
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError(f"window must be an integer >= 1 or None, got {self.window!r}")
        expect_all("length", self.length - self.start <= L, f"at most {L} tokens, or the window's, as keys has places")

    def append(self, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Keys and values [N, H, L, d] from ``start`` on, with new ones [B, T, H, d] (or packed) behind the old."""
        row = torch.arange(packing.sequences, device=k.device)
        place = packing.positions(self.length - self.start)
        if packing.lengths is None:
            width, row = self.keys.shape[2] + k.shape[1], row[:, None]
        else:
            new = torch.tensor(packing.lengths, device=k.device)
            width, row = max((self.length - self.start + new).tolist(), default=0), row.repeat_interleave(new)[None]
        keys, values = (F.pad(x, (0, 0, 0, max(0, width - x.shape[2]))).clone() for x in (self.keys, self.values))
        keys[row, :, place], values[row, :, place] = k, v
        return keys, values

    def after(self, keys: Tensor, values: Tensor, packing: Packing) -> "KVState":
        """What is kept of ``append``'s keys and values."""
        lengths = torch.tensor(packing.lengths or [packing.time] * packing.sequences, device=keys.device)
        state = KVState(keys=keys, values=values, length=self.length + lengths, window=self.window)
        if self.window is not None and keys.shape[2] > self.window:
            held = (state.start - self.start)[:, None] + torch.arange(self.window, device=keys.device)
            index = held.clamp_max(keys.shape[2] - 1)[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
            state.keys, state.values = keys.gather(2, index), values.gather(2, index)
        return state


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
    """Causal softmax attention inside every sequence, over all tokens or the last ``window``."""

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int,
        key_heads: int,
        head_dim: int,
        rope_theta: float,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.window = window
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, key_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)
        self.rotary = Rotary(head_dim, rope_theta)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]"""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        packing, past = call.packing, call.past
        before: KVState | None = None if past is None else past.state
        if before is None:
            before = KVState.empty(k, packing.sequences, self.window)
        positions = packing.positions(before.length)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        if past is None:
            return self.o_proj(self._attend_fresh(q, k, v, packing).flatten(-2))
        keys, values = before.append(k, v, packing)
        past.state = before.after(keys.detach(), values.detach(), packing)
        if before.keys.shape[2] == 0:
            o = self._attend_fresh(q, k, v, packing)
        else:
            o = self._attend(q, keys, values, positions, before.start, packing)
        return self.o_proj(o.flatten(-2))

    def _attend_fresh(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
        """Sequences that begin in this call: q, k, v [B, T, H, d] or packed."""
        lengths = [q.shape[1]] if packing.lengths is None else list(packing.lengths)
        parts = []
        for q_, k_, v_ in zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True):
            time = torch.arange(q_.shape[1], device=q.device)
            mask = None if self.window is None or len(time) <= self.window else self._sees(time, time)
            parts.append(_sdpa(q_, k_.transpose(1, 2), v_.transpose(1, 2), mask))
        return torch.cat(parts, 1)

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, start: Tensor, packing: Packing
    ) -> Tensor:
        """Queries at ``positions`` over keys [N, H, L, d], those of sequence n from position start[n] on."""
        held = start[:, None] + torch.arange(keys.shape[2], device=q.device)  # [N, L]
        if packing.lengths is None:
            return _sdpa(q, keys, values, self._sees(positions, held)[:, None])
        parts = []
        queries = zip(q.split(packing.lengths, 1), positions[0].split(packing.lengths), strict=True)
        for n, (q_, position) in enumerate(queries):
            parts.append(_sdpa(q_, keys[n : n + 1], values[n : n + 1], self._sees(position, held[n])))
        return torch.cat(parts, 1)

    def _sees(self, position: Tensor, held: Tensor) -> Tensor:
        """[..., T, L] whether a query at ``position`` [..., T] sees a key ``held`` [..., L] at its own."""
        back = position[..., None] - held[..., None, :]
        return back >= 0 if self.window is None else (back >= 0) & (back < self.window)


def _sdpa(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """q [B, T, H, d] over keys, values [B, Hk, L, d] -> [B, T, H, d]; without a mask causal."""
    if q.shape[1] == 0:
        return q
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        keys.to(q.dtype),
        values.to(q.dtype),
        attn_mask=mask,
        is_causal=mask is None and q.shape[1] > 1,
        enable_gqa=q.shape[2] != keys.shape[1],
    )
    return o.transpose(1, 2)
