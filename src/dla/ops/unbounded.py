"""The dynamic memory without a capacity, run by the bounded engine, and its state of tokens.

Slots past the width of lam share its last column. So unless reads are routed, states that share it can be read as
one, and a memory of ``width`` rows computes the same: this keeps the cost linear. Routed reads need every state.
"""

import torch
from torch import Tensor

from dla.ops.grid import Grid
from dla.ops.layout import Layout, compute_dtype
from dla.ops.rules import Rules
from dla.ops.scan import Scan, empty_state
from dla.ops.state import DynamicState, TokenState
from dla.ops.transitions import spread, transitions


def as_bounded(
    state: DynamicState | None,
    scanned: Scan,
    layout: Layout,
    rules: Rules,
    *,
    width: int,
    recency: bool,
    routed: bool,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> tuple[DynamicState, Tensor, Tensor]:
    """The memory to start from, and boundaries and merges [B * T, H], as the bounded engine takes them."""
    device = scanned.score.device
    if rules.capacity is not None:
        state = empty_state(*shape, rules.capacity, routed, dtype, device) if state is None else state
        return state, scanned.boundary, scanned.merged
    size = torch.zeros(shape[:2], dtype=torch.int64, device=device) if state is None else state.size
    before = _states_before(scanned.boundary, size, layout)
    if routed:
        slots = max([1, *(int(x.max()) for x in (before + 1, size) if x.numel())])
        every = _collapsed(state, size, slots, False, True, shape, dtype, device)
        return every, scanned.boundary, scanned.merged
    full = before >= width
    if recency and width > 1:  # the oldest states share the last column: merge the oldest pair
        merged = torch.where(scanned.boundary & full, 0, -1)
        boundary = scanned.boundary
    else:  # the newest share it: they stay one state
        merged, boundary = scanned.merged, scanned.boundary & ~full
    return _collapsed(state, size, width, recency, False, shape, dtype, device), boundary, merged


def _states_before(boundary: Tensor, size: Tensor, layout: Layout) -> Tensor:
    """States alive before each step [B * T, H] when none is merged."""
    before = torch.empty(boundary.shape, dtype=torch.int64, device=boundary.device)
    for n, (start, length) in enumerate(zip(layout.offsets, layout.lengths, strict=True)):
        opened = boundary[start : start + length].long()
        before[start : start + length] = size[n] + opened.cumsum(0) - opened
    return before


def _collapsed(
    state: DynamicState | None,
    size: Tensor,
    slots: int,
    recency: bool,
    routed: bool,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> DynamicState:
    """The carried tokens as a memory of ``slots`` states; what does not fit shares the last column's."""
    bounded = empty_state(*shape, slots, routed, dtype, device)
    if not isinstance(state, TokenState) or state.boundary.shape[2] == 0:
        return bounded
    index = state.boundary.cumsum(-1) - 1  # [N, H, L] the state of each token
    if recency:
        index = (index - (size[..., None] - slots).clamp_min(0)).clamp_min(0)
    index = index.clamp_max(slots - 1)
    inside = torch.arange(index.shape[2], device=device) < state.length[:, None, None]
    member = ((index[:, :, None] == torch.arange(slots, device=device)[:, None]) & inside[:, :, None]).to(dtype)
    for slot in range(slots):  # one at a time: tokens x slots x dk would be large
        keys = state.keys * member[:, :, slot, :, None]
        bounded.matrices[:, :, slot] = keys.transpose(-1, -2) @ state.values
    bounded.size[:] = size.clamp_max(slots)
    if bounded.key_sums is not None and state.raw_keys is not None:
        bounded.key_sums[:] = member @ state.raw_keys
    return bounded


@torch.no_grad()
def token_state(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scanned: Scan,
    layout: Layout,
    state: TokenState | None,
    routed: bool,
) -> TokenState:
    """Every token seen, its key after all later transitions: old keys are moved on chunk by chunk."""
    H, dtype, device = v.shape[2], compute_dtype(v.dtype), v.device
    start = torch.zeros(layout.sequences, dtype=torch.int64, device=device) if state is None else state.length
    length = start + torch.tensor(layout.lengths, dtype=torch.int64, device=device)
    longest = int(length.max()) if layout.sequences else 0
    new = {
        "keys": (k.shape[3], dtype),
        "values": (v.shape[3], dtype),
        "raw_keys": (k.shape[3], dtype),
        "boundary": (None, torch.bool),
        "info": (None, torch.float64),
    }
    store = {}
    for name, (dim, kind) in new.items():
        shape = (layout.sequences, H, longest) + (() if dim is None else (dim,))
        store[name] = torch.zeros(shape, dtype=kind, device=device)
        old = None if state is None else getattr(state, name)
        if old is not None:
            held = min(longest, old.shape[2])  # sequences taken out of a batch may be shorter than its width
            store[name][:, :, :held] = old[:, :, :held]
    spread_k = spread(layout.flat(k), H // k.shape[2]).to(dtype)
    sources = {
        "values": layout.flat(v).to(dtype),
        "raw_keys": spread_k,
        "boundary": scanned.boundary,
        "info": scanned.score,
    }
    moved = _moved_keys(k, g, beta, layout, H, store["keys"], start)
    for n, (offset, count) in enumerate(zip(layout.offsets, layout.lengths, strict=True)):
        now = slice(int(start[n]), int(start[n]) + count)
        for name, source in sources.items():
            store[name][n, :, now] = source[offset : offset + count].transpose(0, 1).to(store[name].dtype)
    return TokenState(
        keys=moved,
        values=store["values"],
        boundary=store["boundary"],
        info=store["info"],
        raw_keys=store["raw_keys"] if routed else None,
        length=length,
        capacity=None,
    )


def _moved_keys(
    k: Tensor, g: Tensor | None, beta: Tensor | None, layout: Layout, H: int, keys: Tensor, start: Tensor
) -> Tensor:
    """keys [N, H, L, dk] with the old ones carried through all transitions and the new ones added."""
    grid = Grid(layout, 64, k.device)
    flat = [None if x is None else layout.flat(x).to(keys.dtype) for x in (k, g, beta)]
    for step in range(grid.steps):
        n = grid.active(step)
        k_c, g_c, beta_c = (None if x is None else grid.take(x, step, 1) for x in flat)
        assert k_c is not None
        move = transitions(None, k_c, g_c, beta_c, H)
        rows = grid.rows[:n]
        past = keys[rows]
        if move.T is not None:
            T = move.T[:, :, 0]
            past = past * T if T.shape[-1] == 1 else past @ T.transpose(-1, -2)
        for row, sequence in enumerate(rows.tolist()):
            first = int(start[sequence]) + step * grid.chunk
            count = min(grid.chunk, int(start[sequence]) + layout.lengths[sequence] - first)
            past[row, :, first : first + count] = move.Z[row, :, 0, :count]
        keys[rows] = past
    return keys
