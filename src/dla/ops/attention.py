"""The three operators: arguments are checked here, backends do the rest."""

from typing import TypeVar

from torch import Tensor

from dla.ops import backends, chunked, reference_batch
from dla.ops.checks import (
    check_dynamic_state,
    check_inplace,
    check_operands,
    check_scale,
    check_segmentation,
    check_state,
    check_temperature,
    check_tensor,
)
from dla.ops.layout import Layout
from dla.ops.rules import SLOT_ORDERS, Rules, check_choice
from dla.ops.segmentation import Segmentation
from dla.ops.state import DynamicState, LinearState, LogLinearState, State

S = TypeVar("S", bound=State)


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
    merge: str = "density",
    score: str = "token",
    slot_order: str = "chronological",
    block: int | None = None,
    route: Tensor | None = None,
    temperature: float | None = None,
    scale: float | None = None,
    segmentation: Segmentation | None = None,
    initial_state: DynamicState | None = None,
    output_final_state: bool = False,
    inplace: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
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
        cu_seqlens: ends of the sequences packed in a batch of one: [0, ..., T].
        backend: "auto", "reference", "chunked", "cpu" or "triton".

    Returns:
        outputs [B, T, H, dv] and the final state (None unless asked for).
    """
    rules = Rules(tau, capacity, merge, score, block)
    check_choice("slot_order", slot_order, SLOT_ORDERS)
    check_tensor("q", q)
    check_tensor("lam", lam)
    check_operands(q, k, v, lam, g, beta, route, cu_seqlens)
    check_scale(scale)
    check_temperature(temperature, initial_state is not None or output_final_state or inplace)
    check_inplace(inplace, initial_state)
    layout = Layout.of(k.shape[0], k.shape[1], cu_seqlens)
    check_state(initial_state, DynamicState, k, v, layout.sequences)
    check_dynamic_state(initial_state, capacity, routed=route is not None)
    if segmentation is not None:
        check_segmentation(segmentation, v.shape[:3], k.device, rules, initial_state, layout.lengths)
    chosen = backends.choose(backend, q)
    if route is not None and route.dim() == 1:
        route = route.expand(v.shape[:3])
    module = reference_batch if chosen == "reference" else chunked
    wants_state = output_final_state or inplace
    o, final = module.dynamic(
        q,
        k,
        v,
        lam,
        g,
        beta,
        layout=layout,
        rules=rules,
        slot_order=slot_order,
        route=route,
        temperature=temperature,
        scale=_scale(scale, q),
        segmentation=segmentation,
        state=initial_state,
        wants_state=wants_state,
        inplace=inplace,
    )
    return o, _returned(final, initial_state, wants_state, inplace)


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
    backend: str = "auto",
) -> tuple[Tensor, LogLinearState | None]:
    """Log-linear attention: the past as Fenwick blocks, token s seen from t weighted by lam[t, bit_length(t ^ s)].

    Shapes and the other arguments as in ``dynamic_linear_attention``; lam [B, T, H, levels >= 1].
    """
    check_tensor("q", q)
    check_tensor("lam", lam)
    check_operands(q, k, v, lam, g, beta, cu_seqlens=cu_seqlens)
    check_scale(scale)
    check_inplace(inplace, initial_state)
    layout = Layout.of(k.shape[0], k.shape[1], cu_seqlens)
    check_state(initial_state, LogLinearState, k, v, layout.sequences)
    module = reference_batch if backends.choose(backend, q) == "reference" else chunked
    wants_state = output_final_state or inplace
    o, final = module.log_linear(
        q,
        k,
        v,
        lam,
        g,
        beta,
        layout=layout,
        scale=_scale(scale, q),
        state=initial_state,
        wants_state=wants_state,
        inplace=inplace,
    )
    return o, _returned(final, initial_state, wants_state, inplace)


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
    backend: str = "auto",
) -> tuple[Tensor, LinearState | None]:
    """Linear attention with one state: plain, decayed (g), delta rule (beta) or both.

    Shapes and the other arguments as in ``dynamic_linear_attention``.
    """
    check_tensor("q", q)
    check_operands(q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens)
    check_scale(scale)
    check_inplace(inplace, initial_state)
    layout = Layout.of(k.shape[0], k.shape[1], cu_seqlens)
    check_state(initial_state, LinearState, k, v, layout.sequences)
    module = reference_batch if backends.choose(backend, q) == "reference" else chunked
    wants_state = output_final_state or inplace
    o, final = module.linear(
        q,
        k,
        v,
        g,
        beta,
        layout=layout,
        scale=_scale(scale, q),
        state=initial_state,
        wants_state=wants_state,
        inplace=inplace,
    )
    return o, _returned(final, initial_state, wants_state, inplace)


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _returned(final: S | None, initial: S | None, wanted: bool, inplace: bool) -> S | None:
    if not wanted or final is None:
        return None
    if inplace and initial is not None and final is not initial:
        return initial.assign(final)
    return final
