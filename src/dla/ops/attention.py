"""The operators: arguments are checked, a Problem is put together, and ``backends.py`` runs it."""

from typing import Any

import torch
from torch import Tensor

from dla.names import check_choice
from dla.ops import backends
from dla.ops.backends import Backend
from dla.ops.checks import (
    check_dynamic_state,
    check_inplace,
    check_operands,
    check_rules,
    check_scale,
    check_segmentation,
    check_state,
    check_state_dtype,
    check_temperature,
    check_tensor,
)
from dla.ops.eager import eager
from dla.ops.problem import OPERANDS, Layout, MemoryKind, Problem, likeness
from dla.ops.rules import SLOT_ORDERS, Merge, Rules, Score, SlotOrder
from dla.ops.segmentation import Segmentation
from dla.ops.state import DynamicState, LinearState, LogLinearState, State

KINDS: dict[MemoryKind, type[State]] = {"single": LinearState, "log_linear": LogLinearState, "dynamic": DynamicState}


def dynamic_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    tau: float = 0.6,
    capacity: int | None = 30,
    merge: Merge = "density",
    score: Score = "token",
    slot_order: SlotOrder = "chronological",
    block: int | None = None,
    route: Tensor | None = None,
    temperature: float | None = None,
    scale: float | None = None,
    segmentation: Segmentation | None = None,
    initial_state: DynamicState | None = None,
    output_final_state: bool = False,
    inplace: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, DynamicState | None]:
    """Linear attention over a memory of at most ``capacity`` states that opens and merges them by information.

    Args:
        q, k: queries and keys [B, T, Hk, dk]; head h reads key head h // (H / Hk).
        v: values [B, T, H, dv].
        lam: slot weights [B, T, H, slots >= 1]; slots past the last use the last.
        g: log-decay [B, T, H], <= 0. beta: delta-rule step [B, T, H].
        tau: a token whose score reaches it opens a state. capacity: most states a head; None never merges.
        merge: which adjacent pair makes room: "density", "similarity" or "ward".
        score: "token" (the token against the current state) or "state" (that state with it against without it).
        slot_order: "chronological" (slot 0 is the oldest state) or "recency" (slot 0 is the current one).
        block: boundaries at every ``block``-th token instead of by score.
        route: sharpness of routed reads, [H] or [B, T, H]; None reads by slot alone.
        temperature: of the soft gate (training); None is the hard gate.
        scale: of the outputs, dk ** -0.5 by default.
        segmentation: decisions to follow instead of making them.
        initial_state: the memory to continue from. inplace: update and return it.
        state_dtype: what states are held in, torch.bfloat16 for half the bytes; None: as ``initial_state`` is, else as
            they are computed.
        cu_seqlens: ends of the sequences packed in a batch of one: [0, ..., T].
        backend: "auto", "reference", "chunked", "cpu" or "triton".

    Returns:
        outputs [B, T, H, dv] and the final state (None unless asked for).

    Example:
        >>> import torch, dla
        >>> q, k, v = torch.randn(3, 1, 100, 2, 16)  # one sequence of 100 tokens, two heads
        >>> lam = torch.ones(1, 100, 2, 8)
        >>> o, state = dla.dynamic_linear_attention(q, k, v, lam, capacity=8, output_final_state=True)
        >>> o.shape, int(state.counts.sum())  # every token of both heads is in some state
        (torch.Size([1, 100, 2, 16]), 200)
    """
    operands = (q, k, v, lam, g, beta, route)
    options = (tau, capacity, merge, score, slot_order, block, temperature)
    if traced(initial_state, output_final_state, inplace, segmentation):
        return torch.ops.dla.attend("dynamic", *operands, cu_seqlens, scale, backend, *options), None
    return attend("dynamic", operands, (*options, state_dtype), scale, cu_seqlens, backend, initial_state,
                  output_final_state, inplace, segmentation)  # fmt: skip


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: LogLinearState | None = None,
    output_final_state: bool = False,
    inplace: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, LogLinearState | None]:
    """Log-linear attention: the past as Fenwick blocks, token s seen from t weighted by lam[t, bit_length(t ^ s)].

    Shapes and the other arguments as in ``dynamic_linear_attention``; lam [B, T, H, levels >= 1].

    Example:
        >>> import torch, dla
        >>> q, k, v = torch.randn(3, 1, 100, 2, 16)
        >>> o, state = dla.log_linear_attention(q, k, v, torch.ones(1, 100, 2, 8), output_final_state=True)
        >>> state.dense().shape  # one matrix a level, of which 100 = 0b1100100 has seven
        torch.Size([1, 2, 7, 16, 16])
    """
    operands = (q, k, v, lam, g, beta, None)
    if traced(initial_state, output_final_state, inplace):
        return torch.ops.dla.attend("log_linear", *operands, cu_seqlens, scale, backend), None
    return attend("log_linear", operands, (), scale, cu_seqlens, backend, initial_state, output_final_state, inplace)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: LinearState | None = None,
    output_final_state: bool = False,
    inplace: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, LinearState | None]:
    """Linear attention with one state: plain, decayed (g), delta rule (beta) or both.

    Shapes and the other arguments as in ``dynamic_linear_attention``.

    Example:
        >>> import torch, dla
        >>> q, k, v = torch.randn(3, 1, 100, 2, 16)
        >>> o, state = dla.linear_attention(q, k, v, g=-torch.rand(1, 100, 2), output_final_state=True)
        >>> o, state = dla.linear_attention(q[:, :1], k[:, :1], v[:, :1], initial_state=state, output_final_state=True)
        >>> state.length.item()  # the decoding step went on from the prefill
        101
    """
    operands = (q, k, v, None, g, beta, None)
    if traced(initial_state, output_final_state, inplace):
        return torch.ops.dla.attend("single", *operands, cu_seqlens, scale, backend), None
    return attend("single", operands, (), scale, cu_seqlens, backend, initial_state, output_final_state, inplace)


@eager
def segment(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    tau: float = 0.6,
    capacity: int | None = 30,
    merge: Merge = "density",
    score: Score = "token",
    block: int | None = None,
    initial_state: DynamicState | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Segmentation:
    """The decisions that ``dynamic_linear_attention`` would make.

    k [B, T, Hk, dk], v [B, T, H, dv], g, beta [B, T, H]; the options are that operator's.

    Example:
        >>> import torch, dla
        >>> topics = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])  # one key and value a topic
        >>> k = v = torch.eye(3)[topics].view(1, 8, 1, 3)
        >>> dla.segment(k, v).spans(0, 0)
        [(0, 3), (3, 5), (5, 8)]
    """
    rules = Rules(tau, capacity, merge, score, block)
    check_rules(rules)
    check_operands(None, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens)
    layout = Layout.of(k.shape[0], k.shape[1], cu_seqlens)
    check_state(initial_state, DynamicState, k, v, layout.sequences)
    check_dynamic_state(initial_state, capacity, routed=None)
    problem = Problem(memory="dynamic", layout=layout, k=k, v=v, g=g, beta=beta, rules=rules, state=initial_state)
    return backends.decide(problem, backend).segmentation


def traced(state: State | None, wants_state: bool, inplace: bool, given: Segmentation | None = None) -> bool:
    """Whether torch.compile is looking, and the call can be one node of its graph."""
    return torch.compiler.is_compiling() and state is None and given is None and not (wants_state or inplace)


@eager
def attend(
    memory: MemoryKind,
    operands: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    scale: float | None,
    cu_seqlens: Tensor | None,
    backend: Backend,
    state: Any = None,
    wants_state: bool = False,
    inplace: bool = False,
    given: Segmentation | None = None,
) -> tuple[Tensor, Any]:
    """The operator of a memory as plain eager code. operands: as ``OPERANDS``; options: the dynamic memory's own."""
    like_options = (memory, *options, scale, backend)
    repeats = inplace and given is None and cu_seqlens is None
    if repeats and getattr(state, "decoder", None) is not None:
        # like the last decoding step on its state, nothing is to be checked anew
        decoded = backends.decode_again(state, operands, like_options)
        if decoded is not None:
            return decoded, state
    q, k, v, lam, _, _, route = operands
    fields = dict(zip(OPERANDS, operands, strict=True))
    own: dict[str, Any] = {}
    state_dtype = None
    if memory == "dynamic":
        own, state_dtype = _dynamic_options(options, lam, state, state is not None or wants_state or inplace)
    elif memory == "log_linear":
        check_tensor("lam", lam)
    check_tensor("q", q)
    check_operands(**fields, cu_seqlens=cu_seqlens)  # type: ignore[arg-type]
    assert q is not None and k is not None and v is not None
    check_scale(scale)
    check_inplace(inplace, state)
    layout = Layout.of(k.shape[0], k.shape[1], cu_seqlens)
    check_state(state, KINDS[memory], k, v, layout.sequences)
    like = likeness(operands, like_options) if repeats else None
    if route is not None and route.dim() == 1:
        fields["route"] = route.expand(v.shape[:3])
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    problem = Problem(memory=memory, layout=layout, scale=scale, state=state, wants_state=wants_state or inplace,
                      inplace=inplace, like=like, given=given, **fields, **own)  # type: ignore[arg-type] # fmt: skip
    if isinstance(state, DynamicState):
        check_dynamic_state(state, problem.rules.capacity, routed=problem.routed)
    if given is not None:
        check_segmentation(given, problem)
    o, final = backends.run(problem, backend)
    if not problem.wants_state or final is None:
        return o, None
    final = state.assign(final) if inplace and final is not state else final
    return o, final if state_dtype is None or not isinstance(final, DynamicState) else final.stored_in(state_dtype)


def _dynamic_options(
    options: tuple[Any, ...], lam: Tensor | None, state: Any, carries_state: bool
) -> tuple[dict[str, Any], torch.dtype | None]:
    """What a Problem has of the dynamic memory's options, checked, and what its states are to be held in."""
    tau, capacity, merge, score, slot_order, block, temperature, state_dtype = options
    rules = Rules(tau, capacity, merge, score, block)
    check_rules(rules)
    check_choice("slot_order", slot_order, SLOT_ORDERS)
    check_tensor("lam", lam)
    check_temperature(temperature, carries_state)
    check_state_dtype(state_dtype, capacity, state)
    if state_dtype is None and isinstance(state, DynamicState):  # of another kind: refused later
        state_dtype = state.state_dtype
    return {"rules": rules, "slot_order": slot_order, "temperature": temperature}, state_dtype
