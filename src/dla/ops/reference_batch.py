"""The reference operators over batches, heads and packed sequences: loops around ``reference.py``, nothing more."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dla.ops import reference
from dla.ops.layout import Layout, compute_dtype
from dla.ops.reference import Decisions, Slot
from dla.ops.rules import Rules
from dla.ops.segmentation import Segmentation, segmentation_of
from dla.ops.state import DynamicState, LinearState, LogLinearState, TokenState


class Heads:
    """Cuts flat inputs into (sequence, head) problems and joins the outputs again."""

    def __init__(self, layout: Layout, heads: int, key_heads: int) -> None:
        self.layout, self.heads, self.group = layout, heads, heads // key_heads

    def __iter__(self) -> Iterator[tuple[int, slice, int]]:
        for n, (start, length) in enumerate(zip(self.layout.offsets, self.layout.lengths, strict=True)):
            for h in range(self.heads):
                yield n, slice(start, start + length), h

    def cut(self, x: Tensor, part: slice, h: int) -> Tensor:
        """[T_n, ...] of head h; of its key group if x has key heads."""
        head = h // self.group if x.shape[2] < self.heads else h
        return self.layout.flat(x)[part, head].to(compute_dtype(x.dtype))

    def maybe(self, x: Tensor | None, part: slice, h: int) -> Tensor | None:
        return None if x is None else self.cut(x, part, h)

    def join(self, outputs: list[Tensor], v: Tensor) -> Tensor:
        """Per (sequence, head) [T_n, dv] -> [B, T, H, dv]"""
        rows = [torch.stack(outputs[i : i + self.heads], 1) for i in range(0, len(outputs), self.heads)]
        return self.layout.unflat(torch.cat(rows)).to(v.dtype) if rows else torch.zeros_like(v)


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    layout: Layout,
    scale: float,
    state: LinearState | None,
    wants_state: bool = True,
    inplace: bool = False,
) -> tuple[Tensor, LinearState]:
    heads, outputs, finals = Heads(layout, v.shape[2], k.shape[2]), [], []
    for n, part, h in heads:
        o, S = reference.linear_head(
            heads.cut(q, part, h),
            heads.cut(k, part, h),
            heads.cut(v, part, h),
            heads.maybe(g, part, h),
            heads.maybe(beta, part, h),
            scale=scale,
            S=None if state is None else state.matrix[n, h],
        )
        outputs.append(o)
        finals.append(S.detach())
    shape = (layout.sequences, v.shape[2], k.shape[3], v.shape[3])
    matrix = torch.stack(finals).reshape(shape) if finals else v.new_zeros(shape, dtype=compute_dtype(v.dtype))
    return heads.join(outputs, v), LinearState(matrix=matrix, length=new_length(layout, state, v.device))


def log_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    layout: Layout,
    scale: float,
    state: LogLinearState | None,
    wants_state: bool = True,
    inplace: bool = False,
) -> tuple[Tensor, LogLinearState]:
    heads, outputs = Heads(layout, v.shape[2], k.shape[2]), []
    length = new_length(layout, state, v.device)
    width = max((n.bit_length() for n in length.tolist()), default=0)
    shape = (layout.sequences, v.shape[2], width, k.shape[3], v.shape[3])
    levels = v.new_zeros(shape, dtype=compute_dtype(v.dtype))
    for n, part, h in heads:
        position = 0 if state is None else int(state.length[n])
        live = [i for i in range(position.bit_length()) if position >> i & 1]
        o, final = reference.log_linear_head(
            heads.cut(q, part, h),
            heads.cut(k, part, h),
            heads.cut(v, part, h),
            heads.cut(lam, part, h),
            heads.maybe(g, part, h),
            heads.maybe(beta, part, h),
            scale=scale,
            levels={i + 1: state.levels[n, h, i] for i in live} if state is not None else None,
            position=position,
        )
        outputs.append(o)
        for level, S in final.items():
            levels[n, h, level - 1] = S.detach()
    return heads.join(outputs, v), LogLinearState(levels=levels, length=length)


def dynamic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    layout: Layout,
    rules: Rules,
    slot_order: str,
    route: Tensor | None,
    temperature: float | None,
    scale: float,
    segmentation: Segmentation | None,
    state: DynamicState | None,
    wants_state: bool = True,
    inplace: bool = False,
) -> tuple[Tensor, DynamicState]:
    heads, outputs = Heads(layout, v.shape[2], k.shape[2]), []
    memories, made = [], []
    for n, part, h in heads:
        o, memory, decisions = reference.dynamic_head(
            heads.cut(q, part, h),
            heads.cut(k, part, h),
            heads.cut(v, part, h),
            heads.cut(lam, part, h),
            heads.maybe(g, part, h),
            heads.maybe(beta, part, h),
            rules=rules,
            slot_order=slot_order,
            route=heads.maybe(route, part, h),
            temperature=temperature,
            scale=scale,
            memory=memory_of(state, n, h),
            decisions=decisions_of(segmentation, layout, part, h),
        )
        outputs.append(o)
        memories.append(memory)
        made.append(decisions)
    device = v.device
    boundary = heads.join([torch.tensor(d.boundary, device=device)[:, None] for d in made], v[..., :1]).bool()[..., 0]
    merged = heads.join([torch.tensor(d.merged, device=device)[:, None] for d in made], v[..., :1].long())[..., 0]
    wide = v[..., :1].to(compute_dtype(v.dtype))
    score = heads.join([torch.tensor(d.score, dtype=torch.float64, device=device)[:, None] for d in made], wide)[..., 0]
    seg = segmentation_of(layout.flat(score), layout.flat(boundary), layout.flat(merged), layout, state)
    routed = route is not None
    if rules.capacity is None:
        final: DynamicState = token_state(k, v, g, beta, seg, heads, state, routed)
    else:
        final = dynamic_state(memories, k, v, rules.capacity, layout, state, routed)
    return heads.join(outputs, v), final


def memory_of(state: DynamicState | None, n: int, h: int) -> list[Slot]:
    """The carried states of one head, as the reference holds them."""
    if state is None:
        return []
    dense, count, info = state.dense()[n, h], state.counts[n, h].tolist(), state.chronological_info()[n, h].tolist()
    keys = state.chronological_keys()
    unused = dense.new_zeros(dense.shape[1])
    return [
        Slot(dense[i], dense[i], count[i], info[i], unused if keys is None else keys[n, h, i])
        for i in range(int(state.size[n, h]))
    ]


def decisions_of(segmentation: Segmentation | None, layout: Layout, part: slice, h: int) -> Decisions | None:
    if segmentation is None:
        return None
    score, boundary, merged = (
        layout.flat(x)[part, h].tolist() for x in (segmentation.score, segmentation.boundary, segmentation.merged)
    )
    return Decisions(score, boundary, merged)


def new_length(
    layout: Layout, state: LinearState | LogLinearState | DynamicState | None, device: torch.device
) -> Tensor:
    length = torch.tensor(layout.lengths, dtype=torch.int64, device=device)
    return length if state is None else state.length + length


def dynamic_state(
    memories: list[list[Slot]],
    k: Tensor,
    v: Tensor,
    capacity: int,
    layout: Layout,
    state: DynamicState | None,
    routed: bool,
) -> DynamicState:
    """The final memories of all heads as one DynamicState."""
    N, H, dk, dv = layout.sequences, v.shape[2], k.shape[3], v.shape[3]
    dtype, device = compute_dtype(v.dtype), v.device
    matrices = torch.zeros(N * H, capacity, dk, dv, dtype=dtype, device=device)
    keys = torch.zeros(N * H, capacity, dk, dtype=dtype, device=device)
    count = torch.zeros(N * H, capacity, dtype=torch.int64, device=device)
    info = torch.zeros(N * H, capacity, dtype=torch.float64, device=device)
    for i, memory in enumerate(memories):
        for j, slot in enumerate(memory):
            matrices[i, j], keys[i, j] = slot.hard, slot.keys.detach()
            count[i, j], info[i, j] = slot.count, slot.info
    size = torch.tensor([len(memory) for memory in memories], dtype=torch.int64, device=device)
    return DynamicState.chronological(
        matrices.unflatten(0, (N, H)),
        size.reshape(N, H),
        count.unflatten(0, (N, H)),
        info.unflatten(0, (N, H)),
        keys.unflatten(0, (N, H)) if routed else None,
        new_length(layout, state, device),
    )


def token_state(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    seg: Segmentation,
    heads: Heads,
    state: DynamicState | None,
    routed: bool,
) -> TokenState:
    """Every token seen, its key after all later transitions."""
    layout, H, dk, dv = heads.layout, v.shape[2], k.shape[3], v.shape[3]
    length = new_length(layout, state, v.device)
    shape = (layout.sequences, H, int(length.max()) if layout.sequences else 0)
    dtype = compute_dtype(v.dtype)
    keys, raw = v.new_zeros(*shape, dk, dtype=dtype), v.new_zeros(*shape, dk, dtype=dtype)
    values = v.new_zeros(*shape, dv, dtype=dtype)
    boundary = torch.zeros(shape, dtype=torch.bool, device=v.device)
    info = torch.zeros(shape, dtype=torch.float64, device=v.device)
    with torch.no_grad():
        for n, part, h in heads:
            old = 0
            if isinstance(state, TokenState):
                old = int(state.length[n])
                for new, x in (
                    (keys, state.keys),
                    (values, state.values),
                    (boundary, state.boundary),
                    (info, state.info),
                    (raw, state.raw_keys),
                ):
                    if x is not None:
                        new[n, h, :old] = x[n, h, :old]
            now = slice(old, int(length[n]))
            k_h, v_h = heads.cut(k, part, h), heads.cut(v, part, h)
            g_h, beta_h = heads.maybe(g, part, h), heads.maybe(beta, part, h)
            for t in range(k_h.shape[0]):
                g_t, beta_t = None if g_h is None else g_h[t], None if beta_h is None else beta_h[t]
                past = slice(0, old + t)
                keys[n, h, past] = reference.transition(keys[n, h, past].T, k_h[t], g_t, beta_t).T
                keys[n, h, old + t] = k_h[t] if beta_t is None else beta_t * k_h[t]
            values[n, h, now], raw[n, h, now] = v_h, k_h
            boundary[n, h, now] = layout.flat(seg.boundary)[part, h]
            info[n, h, now] = layout.flat(seg.score)[part, h].double()
    return TokenState(
        keys=keys,
        values=values,
        boundary=boundary,
        info=info,
        raw_keys=raw if routed else None,
        length=length,
        capacity=None,
    )
