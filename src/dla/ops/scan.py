"""The sequential part of the dynamic memory: its decisions for whole sequences, compiled or in torch."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dla.ops import cpu
from dla.ops.decide import safe_norm, unit
from dla.ops.eager import eager
from dla.ops.layout import Layout, compute_dtype
from dla.ops.rules import MERGES, SCORES, Rules
from dla.ops.state import DynamicState, TokenState
from dla.ops.step import advance


@dataclass
class Reads:
    """What the soft gate differentiates: the hard current state S before each step, seen by that step's token."""

    state_k: Tensor  # [B * T, H, dv] S^T k, with k over its norm
    state_v: Tensor  # [B * T, H, dk] S v, with v over its norm
    norm: Tensor  # [B * T, H] |S|, 0 before a sequence's first token


@dataclass
class Scan:
    """Decisions on the flat token axis [B * T, H], and the memory's bookkeeping after the last step."""

    score: Tensor
    boundary: Tensor  # bool
    merged: Tensor  # int64
    size: Tensor  # [N, H] int64
    count: Tensor  # [N, H, K] int64, oldest first; not filled without a capacity
    info: Tensor  # [N, H, K] float64
    reads: Reads | None = None


Given = tuple[Tensor, Tensor, Tensor]  # score, boundary, merged [B * T, H]


@eager
@torch.no_grad()
def scan(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    layout: Layout,
    rules: Rules,
    state: DynamicState | None = None,
    given: Given | None = None,
    wants_reads: bool = False,
) -> Scan:
    """Decide every step of every sequence (or follow ``given`` decisions); k [B, T, Hk, dk], v [B, T, H, dv]."""
    device, dtype = k.device, compute_dtype(k.dtype)
    compiled = cpu.library() is not None
    home = torch.device("cpu") if compiled else device  # sequential work: a GPU's tensors go to the compiled routine

    def flat(x: Tensor) -> Tensor:
        return layout.flat(x).to(home, dtype).contiguous()

    k, v = flat(k), flat(v)
    g, beta = None if g is None else flat(g), None if beta is None else flat(beta)
    run = _compiled if compiled else _fallback
    return _to(run(k, v, g, beta, layout, rules, state, given, wants_reads), device)


def _empty(k: Tensor, v: Tensor, layout: Layout, rules: Rules, given: Given | None, wants_reads: bool) -> Scan:
    """A Scan to be filled in."""
    (T, H, dv), dk, N = v.shape, k.shape[2], layout.sequences
    if given is None:
        score = v.new_zeros(T, H)
        boundary = torch.zeros(T, H, dtype=torch.bool, device=v.device)
        merged = torch.full((T, H), -1, dtype=torch.int64, device=v.device)
    else:
        kinds = (v.dtype, torch.bool, torch.int64)
        score, boundary, merged = (
            torch.empty_like(x, dtype=kind, device=v.device, memory_format=torch.contiguous_format).copy_(x)
            for x, kind in zip(given, kinds, strict=True)
        )
    slots = rules.capacity or 0
    reads = Reads(v.new_zeros(T, H, dv), v.new_zeros(T, H, dk), v.new_zeros(T, H)) if wants_reads else None
    count = torch.zeros(N, H, slots, dtype=torch.int64, device=v.device)
    return Scan(score, boundary, merged, count.new_zeros(N, H), count, count.double(), reads)


def _compiled(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    layout: Layout,
    rules: Rules,
    state: DynamicState | None,
    given: Given | None,
    wants_reads: bool,
) -> Scan:
    out = _empty(k, v, layout, rules, given, wants_reads)
    carried = _carried(state)
    tensors: dict[str, Tensor | None] = {
        "offset": torch.tensor(layout.offsets, dtype=torch.int64),
        "length": torch.tensor(layout.lengths, dtype=torch.int64),
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "score_io": out.score,
        "boundary_io": out.boundary,
        "merged_io": out.merged,
        "size": out.size,
        "count": out.count,
        "info": out.info,
        **{name: x.cpu().contiguous() for name, x in carried.items()},
    }
    if out.reads is not None:
        tensors |= {"state_k": out.reads.state_k, "state_v": out.reads.state_v, "norm": out.reads.norm}
    numbers = {
        "sequences": layout.sequences,
        "heads": v.shape[1],
        "key_heads": k.shape[1],
        "dk": k.shape[2],
        "dv": v.shape[2],
        "capacity": rules.capacity or 0,
        "block": rules.block or 0,
        "merge": MERGES.index(rules.merge),
        "score": SCORES.index(rules.score),
        "decide": int(given is None),
        "carried": carried["matrices"].shape[2] if carried else 0,
    }
    cpu.run_scan(tensors, numbers, rules.tau, v.dtype)
    return out


def _carried(state: DynamicState | None) -> dict[str, Tensor]:
    """What the scan needs of a carried state; of an unbounded one only the current state matters."""
    if state is None:
        return {}
    if isinstance(state, TokenState):
        state = current_only(state, capacity=1)
    return {
        "matrices": state.dense(),
        "size0": state.size,
        "count0": state.counts,
        "info0": state.chronological_info(),
        "position0": state.length,
    }


def current_only(state: TokenState, capacity: int) -> DynamicState:
    """A bounded state that holds an unbounded one's current state alone."""
    index = torch.arange(state.boundary.shape[2], device=state.device)
    start = torch.where(state.boundary, index, -1).amax(-1, keepdim=True) if index.numel() else index[None, None]
    current = (index >= start) & (index < state.length[:, None, None])
    keys = state.keys * current[..., None]
    matrix = keys.transpose(-1, -2) @ state.values  # [N, H, dk, dv]
    N, H = matrix.shape[:2]
    fresh = empty_state(N, H, matrix.shape[2], matrix.shape[3], capacity, False, matrix.dtype, matrix.device)
    fresh.matrices[:, :, 0] = matrix
    fresh.count[:, :, 0] = current.sum(-1)
    fresh.size[:] = (state.length > 0).long()[:, None]
    fresh.length[:] = state.length
    return fresh


def empty_state(
    N: int, H: int, dk: int, dv: int, capacity: int, routed: bool, dtype: torch.dtype, device: torch.device
) -> DynamicState:
    """A memory that has seen nothing."""
    count = torch.zeros(N, H, capacity, dtype=torch.int64, device=device)
    return DynamicState.chronological(
        torch.zeros(N, H, capacity, dk, dv, dtype=dtype, device=device),
        count.new_zeros(N, H),
        count,
        count.double(),
        torch.zeros(N, H, capacity, dk, dtype=dtype, device=device) if routed else None,
        count.new_zeros(N),
    )


def _fallback(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    layout: Layout,
    rules: Rules,
    state: DynamicState | None,
    given: Given | None,
    wants_reads: bool,
) -> Scan:
    """The same in torch: ``advance`` token by token, all sequences and heads at once."""
    out = _empty(k, v, layout, rules, given, wants_reads)
    (_, H, dv), dk, group = v.shape, k.shape[2], v.shape[1] // k.shape[1]
    if rules.capacity is None:  # only the current state matters, and two slots keep it apart
        memory_rules = replace(rules, capacity=2, merge="density")
        memory = None if state is None else current_only(state, capacity=2)  # type: ignore[arg-type]
    else:
        memory_rules, memory = rules, None if state is None else state.clone()
    if memory is None:
        memory = empty_state(layout.sequences, H, dk, dv, memory_rules.capacity, False, v.dtype, v.device)  # type: ignore[arg-type]
    offset = torch.tensor(layout.offsets, dtype=torch.int64, device=v.device)
    length = torch.tensor(layout.lengths, dtype=torch.int64, device=v.device)
    for t in range(max(layout.lengths, default=0)):
        active = length > t
        at = torch.where(active, offset + t, 0)
        ended = ~active[:, None]
        k_t = k[at].repeat_interleave(group, 1).masked_fill(ended[..., None], 0)
        v_t = v[at].masked_fill(ended[..., None], 0)
        g_t, beta_t = (None if x is None else x[at].masked_fill(ended, 0) for x in (g, beta))
        if out.reads is not None:
            _save_reads(out.reads, memory, k_t, v_t, at[active], active)
        given_t = None
        if given is not None:
            pair = out.merged[at] if rules.capacity else torch.where(out.boundary[at] & (memory.size == 2), 0, -1)
            given_t = (out.score[at], out.boundary[at], torch.where(active[:, None], pair, -1))
        decision = advance(memory, k_t, v_t, g_t, beta_t, memory_rules, given_t, active)
        for store, x in zip((out.score, out.boundary, out.merged), decision, strict=True):
            store[at[active]] = x[active].to(store.dtype)
    if rules.capacity is None:
        out.merged.fill_(-1)
    else:
        out.size, out.count, out.info = memory.size, memory.counts, memory.chronological_info()
    return out


def _save_reads(reads: Reads, memory: DynamicState, k: Tensor, v: Tensor, at: Tensor, active: Tensor) -> None:
    last = memory.order.gather(2, (memory.size - 1).clamp_min(0)[..., None])
    S = memory.matrices.gather(2, last[..., None, None].expand(-1, -1, -1, *memory.matrices.shape[3:]))[:, :, 0]
    reads.state_k[at] = (unit(k, safe_norm(k))[:, :, None] @ S)[:, :, 0][active]
    reads.state_v[at] = (S @ unit(v, safe_norm(v))[..., None])[..., 0][active]
    reads.norm[at] = safe_norm(S, dims=2)[active]


def _to(result: Scan, device: torch.device) -> Scan:
    if result.score.device == device:
        return result
    moved = {
        name: getattr(result, name).to(device) for name in ("score", "boundary", "merged", "size", "count", "info")
    }
    reads = result.reads
    if reads is not None:
        reads = Reads(reads.state_k.to(device), reads.state_v.to(device), reads.norm.to(device))
    return Scan(**moved, reads=reads)
