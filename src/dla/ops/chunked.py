"""The chunked backend: decisions by the scan, everything else by matmuls on chunks."""

import torch
from torch import Tensor

from dla.ops import decode
from dla.ops.decode import Token, is_decoding
from dla.ops.eager import eager
from dla.ops.engine import ChunkedAttention, Engine, Inputs
from dla.ops.gate import soft_gate
from dla.ops.grid import Grid, chunk_length
from dla.ops.layout import Layout, compute_dtype
from dla.ops.memories import DynamicMemory, LogLinearMemory, SingleMemory
from dla.ops.rules import Rules
from dla.ops.scan import Scan, scan
from dla.ops.segmentation import Segmentation, decisions
from dla.ops.state import DynamicState, LinearState, LogLinearState, TokenState, newest_first, take_rows
from dla.ops.unbounded import as_bounded, token_state


@eager
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
    wants_state: bool,
    inplace: bool,
) -> tuple[Tensor, LinearState | None]:
    if state is not None and is_decoding(layout, state, q, k, v, g, beta):
        state = state if inplace else state.clone()
        return decode.linear(Token.of(q, k, v, g=g, beta=beta), state, scale).to(v.dtype), state
    grid = Grid(layout, chunk_length(layout, k.shape[3] * v.shape[3]), v.device)
    engine = Engine(grid, SingleMemory(), compute_dtype(v.dtype), scale, wants_state=wants_state)
    carry = _empty_carry(k, v, layout, 1) if state is None else state.matrix[grid.rows, :, None]
    o, (matrix,) = _attend(engine, layout, [carry], q, k, v, g=g, beta=beta)
    if not wants_state:
        return o, None
    return o, LinearState(matrix=_unsort(matrix, grid)[:, :, 0].contiguous(), length=_length(layout, state, v))


@eager
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
    wants_state: bool,
    inplace: bool,
) -> tuple[Tensor, LogLinearState | None]:
    if state is not None and is_decoding(layout, state, q, k, v, lam, g, beta):
        state = state if inplace else state.clone()
        return decode.log_linear(Token.of(q, k, v, lam=lam, g=g, beta=beta), state, scale).to(v.dtype), state
    start = torch.zeros(layout.sequences, dtype=torch.int64, device=v.device) if state is None else state.length
    end = _length(layout, state, v)
    chunk = chunk_length(layout, k.shape[3] * v.shape[3], power=True)
    grid = Grid(layout, chunk, v.device, lead=(start % chunk).tolist())
    memory = LogLinearMemory(start, end - start, lam.shape[-1])
    carry = _empty_carry(k, v, layout, memory.rows)
    if state is not None:
        rows = min(memory.rows, state.levels.shape[2])
        carry[:, :, :rows] = state.levels[grid.rows, :, :rows]
    engine = Engine(grid, memory, compute_dtype(v.dtype), scale, wants_state=wants_state)
    o, (levels,) = _attend(engine, layout, [carry], q, k, v, lam=lam, g=g, beta=beta)
    if not wants_state:
        return o, None
    width = max((n.bit_length() for n in end.tolist()), default=0)
    return o, LogLinearState(levels=_unsort(levels, grid)[:, :, :width].contiguous(), length=end)


@eager
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
    wants_state: bool,
    inplace: bool,
) -> tuple[Tensor, DynamicState | None]:
    given = None if segmentation is None else decisions(segmentation, layout)
    if state is not None and is_decoding(layout, state, q, k, v, lam, g, beta, route):
        state = state if inplace else state.clone()
        token = Token.of(q, k, v, lam=lam, g=g, beta=beta, route=route)
        o = decode.dynamic(token, state, scale, rules=rules, slot_order=slot_order, given=given)
        return o.to(v.dtype), state
    soft = temperature is not None
    scanned = scan(k, v, g, beta, layout=layout, rules=rules, state=state, given=given, wants_reads=soft)
    gate = None
    if temperature is not None:
        gate = soft_gate(k, v, beta, scanned, layout=layout, rules=rules, temperature=temperature)
    bounded, boundary, merged = as_bounded(
        state,
        scanned,
        layout,
        rules,
        width=lam.shape[-1],
        recency=slot_order == "recency",
        routed=route is not None,
        shape=(layout.sequences, v.shape[2], k.shape[3], v.shape[3]),
        dtype=compute_dtype(v.dtype),
    )
    capacity = bounded.matrices.shape[2]
    moved = capacity * k.shape[3] * v.shape[3] // 4  # moving many states at once is cheaper than one by one
    grid = Grid(layout, chunk_length(layout, moved, most=128, whole=g is None and beta is None), v.device)
    offsets = torch.tensor(layout.offsets, dtype=torch.int64, device=v.device)
    memory = DynamicMemory(boundary, merged, bounded.size, offsets, capacity, soft)
    recency = slot_order == "recency"
    engine = Engine(grid, memory, compute_dtype(v.dtype), scale, recency, wants_state=wants_state)
    carry = bounded.newest_first(grid.rows)
    if soft:
        carry[0] = torch.cat([torch.zeros_like(carry[0][:, :, :1]), carry[0]], 2)
    o, carry = _attend(engine, layout, carry, q, k, v, lam=lam, g=g, beta=beta, gate=gate, route=route)
    if not wants_state:
        return o, None
    if rules.capacity is None:
        assert state is None or isinstance(state, TokenState)
        return o, token_state(k, v, g, beta, scanned, layout, state, route is not None)
    return o, _final_state(carry, scanned, grid, _length(layout, state, v))


def _attend(
    engine: Engine,
    layout: Layout,
    carry: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
    route: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run the engine on [B, T, ...] inputs (the gate is flat already): outputs [B, T, H, dv] and the last carry."""
    flat = [None if x is None else layout.flat(x) for x in (q, k, v, lam, g, beta)]
    tensors = [*flat, gate, None if route is None else layout.flat(route)]
    engine.fit(Inputs(*tensors))  # type: ignore[arg-type]
    keeps = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    carry = [c.detach() for c in carry]
    if keeps and 0 < engine.grid.steps <= engine.group:
        o, after = engine.run_at_once(Inputs(*tensors), carry)  # type: ignore[arg-type]
    else:
        o, *after = ChunkedAttention.apply(engine, keeps, carry, *tensors)
    return layout.unflat(o), after


def _final_state(carry: list[Tensor], scanned: Scan, grid: Grid, length: Tensor) -> DynamicState:
    places = newest_first(scanned.size, carry[0].shape[2])
    matrices, *keys = (take_rows(x, places, grid.rows.argsort()) for x in carry)
    return DynamicState.chronological(
        matrices, scanned.size, scanned.count, scanned.info, keys[0] if keys else None, length
    )


def _unsort(x: Tensor, grid: Grid) -> Tensor:
    """Rows of the grid back to the order of the sequences."""
    return torch.empty_like(x).index_copy_(0, grid.rows, x)


def _empty_carry(k: Tensor, v: Tensor, layout: Layout, rows: int) -> Tensor:
    shape = (layout.sequences, v.shape[2], rows, k.shape[3], v.shape[3])
    return torch.zeros(shape, dtype=compute_dtype(v.dtype), device=v.device)


def _length(layout: Layout, state: LinearState | LogLinearState | DynamicState | None, v: Tensor) -> Tensor:
    length = torch.tensor(layout.lengths, dtype=torch.int64, device=v.device)
    return length if state is None else state.length + length
