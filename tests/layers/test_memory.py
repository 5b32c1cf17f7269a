"""The memories as layers use them: slot weights, sharpness, the soft gate, and decisions kept for the backward pass."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dla.layers import (
    DynamicMemory,
    FactoredSlotWeights,
    LogLinearMemory,
    Memory,
    Operands,
    Packing,
    SingleMemory,
    SlotWeights,
)
from dla.layers import memory as memory_module
from dla.layers.call import Call
from dla.ops import dynamic_linear_attention, log_linear_attention, segment
from tests.ops.common import assert_close, make_inputs

HIDDEN, HEADS, WIDTH = 7, 2, 3
RULES: dict[str, Any] = {"tau": 0.6, "capacity": 3, "merge": "density", "score": "token", "block": None}


def operands(T: int = 40, mode: str = "gated_delta", seed: int = 0, scale: float = 0.7) -> Operands:
    x = make_inputs(mode, B=2, T=T, H=HEADS, Hk=1, seed=seed)
    return Operands(**{name: x[name] for name in ("q", "k", "v", "g", "beta") if name in x}, scale=scale)


def layer_input(T: int = 40, batch: int = 2) -> Tensor:
    return torch.randn(batch, T, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def dynamic(**options: Any) -> DynamicMemory:
    torch.manual_seed(0)
    return enlivened(DynamicMemory(HIDDEN, HEADS, **{"width": WIDTH, **RULES, **options}))


def enlivened(memory: Any) -> Any:
    memory = memory.double().eval()
    with torch.no_grad():
        memory.slots.proj.weight.normal_()
        memory.slots.L.normal_()
        if memory.slots.bias is not None:
            memory.slots.bias.normal_()
    return memory


# --- slot weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_slot_weights_formula(bias: bool) -> None:
    torch.manual_seed(0)
    slots = SlotWeights(HIDDEN, HEADS, WIDTH, bias).double()
    for weight in slots.parameters():
        weight.normal_()
    x = torch.randn(2, 4, HIDDEN, dtype=torch.float64)
    lam = slots(x)
    assert lam.shape == (2, 4, HEADS, WIDTH)
    for h in range(HEADS):
        for s in range(WIDTH):
            inner = (x @ slots.proj.weight[h * WIDTH + s]) * slots.L[h, s]
            if slots.bias is not None:
                inner = inner + slots.bias[h, s]
            assert_close(lam[..., h, s], torch.log1p(inner.exp()), 1e-12)


@torch.no_grad()
def test_slot_weights_start() -> None:
    slots = SlotWeights(HIDDEN, HEADS, WIDTH, True)
    assert slots.L.eq(1).all()
    slots.proj.weight.zero_()
    x = torch.randn(1, 5, HIDDEN)
    assert_close(slots(x), torch.ones(1, 5, HEADS, WIDTH), 1e-6)
    slots.L.normal_()  # L scales W x, not the bias
    assert_close(slots(x), torch.ones(1, 5, HEADS, WIDTH), 1e-6)
    plain = SlotWeights(HIDDEN, HEADS, WIDTH, False)
    assert plain.bias is None
    plain.proj.weight.zero_()
    assert_close(plain(x), torch.full((1, 5, HEADS, WIDTH), math.log(2)), 1e-6)


@torch.no_grad()
def test_slot_weights_of_half_precision_are_float32() -> None:
    slots = SlotWeights(HIDDEN, HEADS, WIDTH, True)
    slots.proj.to(torch.bfloat16)
    assert slots(torch.randn(1, 2, HIDDEN).bfloat16()).dtype == torch.float32


# --- what each memory computes ---------------------------------------------------------------------------------------


def dynamic_by_hand(made: Operands, lam: np.ndarray, capacity: int, tau: float, recent: bool, rho: float) -> np.ndarray:
    """Every head a list of states, one token at a time; density merges, scores of tokens."""
    q, k, v, g, beta = (getattr(made, name).numpy() for name in ("q", "k", "v", "g", "beta"))
    output = np.zeros(v.shape)
    for b, h in np.ndindex(v.shape[0], v.shape[2]):
        states: list[list[Any]] = []  # matrix, tokens, score sum, key sum
        for t in range(v.shape[1]):
            key, value, step = k[b, t, 0], v[b, t, h], beta[b, t, h]
            new = step * np.outer(key, value)
            score = math.sqrt(2)
            if states:
                current = states[-1][0]
                cos = (new * current).sum() / (np.linalg.norm(new) * np.linalg.norm(current))
                score = math.sqrt(max(0.0, 2 - 2 * cos))
            for state in states:
                state[0] = math.exp(g[b, t, h]) * (state[0] - step * np.outer(key, key @ state[0]))
            if score >= tau:
                if len(states) == capacity:
                    cost = [(a[2] + c[2]) / (a[1] + c[1]) for a, c in pairwise(states)]
                    i = int(np.argmin(cost))
                    states[i : i + 2] = [[x + y for x, y in zip(states[i], states[i + 1], strict=True)]]
                states.append([new, 1, score, key])
            else:
                states[-1] = [x + y for x, y in zip(states[-1], [new, 1, score, key], strict=True)]
            for i, (matrix, _, _, keys) in enumerate(states):
                slot = min(len(states) - 1 - i if recent else i, lam.shape[-1] - 1)
                weight = lam[b, t, h, slot]
                if rho:
                    query = q[b, t, 0]
                    fit = query @ keys / (np.linalg.norm(query) * np.linalg.norm(keys))
                    weight *= math.exp(rho * (fit - 1))
                output[b, t, h] += made.scale * weight * (q[b, t, 0] @ matrix)
    return output


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("slot_order", ["chronological", "recency"])
@torch.no_grad()
def test_dynamic(slot_order: str, width: int, routed: bool) -> None:
    memory = dynamic(slot_order=slot_order, width=width, routed=routed)
    x, made = layer_input(), operands()
    past: Any = SimpleNamespace(state=None, tail=None)
    o = memory(x, made, Call(Packing(2, 40), past))
    lam = memory.slots(x).numpy()
    expected = dynamic_by_hand(made, lam, 3, 0.6, slot_order == "recency", 4.0 if routed else 0.0)
    assert_close(o, torch.from_numpy(expected), 1e-7 if routed else 1e-10)  # the sharpness starts in float32
    assert past.state.counts.sum(-1).eq(40).all()
    rate = segment(made.k, made.v, made.g, made.beta).boundary.double().mean()
    assert 0.1 < rate < 0.9  # both kinds of tokens were there


@torch.no_grad()
def test_log_linear() -> None:
    memory = enlivened(LogLinearMemory(HIDDEN, HEADS, 4))
    x, made = layer_input(20), operands(20, "decay")
    assert made.g is not None
    o = memory(x, made, Call(Packing(2, 20)))
    lam, decay = memory.slots(x), made.g.cumsum(1)
    expected = torch.zeros_like(o)
    for t in range(20):
        for s in range(t + 1):
            weight = lam[:, t, :, min((t ^ s).bit_length(), 3)] * (decay[:, t] - decay[:, s]).exp()
            fit = (made.q[:, t, 0] * made.k[:, s, 0]).sum(-1)
            expected[:, t] += made.scale * (weight * fit[:, None])[..., None] * made.v[:, s]
    assert_close(o, expected, 1e-10)


@pytest.mark.parametrize("options", [{}, {"routed": True}, {"merge": "ward"}, {"score": "state"}, {"block": 4}])
@torch.no_grad()
def test_options_reach_the_operator(options: dict[str, Any]) -> None:
    memory = dynamic(**options)
    x, made = layer_input(), operands()
    o = memory(x, made, Call(Packing(2, 40)))
    route = torch.nn.functional.softplus(memory.sharpness) if memory.sharpness is not None else None
    expected, _ = dynamic_linear_attention(
        **vars(made), lam=memory.slots(x), **memory.rules, route=route, backend="reference"
    )
    assert_close(o, expected, 1e-10)
    if options:
        assert (o - dynamic()(x, made, Call(Packing(2, 40)))).abs().max() > 1e-3


@torch.no_grad()
def test_sharpness_by_token() -> None:
    """softplus(sharpness + map x), at first the same for all tokens."""
    torch.manual_seed(0)
    memory = DynamicMemory(HIDDEN, HEADS, width=5, routed=True, sharpness="token", **RULES).double()
    x, made = layer_input(), operands()
    plain = DynamicMemory(HIDDEN, HEADS, width=5, routed=True, **RULES).double()
    plain.load_state_dict({name: z for name, z in memory.state_dict().items() if name != "sharpness_map"})
    before = memory(x, made, Call(Packing(2, 40)))
    assert_close(before, plain(x, made, Call(Packing(2, 40))), 1e-12)
    assert memory.sharpness_map is not None and memory.sharpness is not None
    memory.sharpness_map.normal_()
    route = F.softplus(memory.sharpness + x @ memory.sharpness_map.T)
    o = memory(x, made, Call(Packing(2, 40)))
    assert_close(o, dynamic_linear_attention(**vars(made), lam=memory.slots(x), **RULES, route=route)[0], 1e-12)
    assert (o - before).abs().max() > 1e-3


@torch.no_grad()
def test_factored_slot_weights() -> None:
    """lam_k = sum_r softplus(W_r x + bias_r) softplus(B_rk)"""
    torch.manual_seed(0)
    slots = FactoredSlotWeights(HIDDEN, HEADS, 5, 2, bias=True).double()
    assert torch.allclose(F.softplus(slots.B), torch.tensor(0.5, dtype=torch.float64))
    slots.B.normal_()
    assert slots.bias is not None
    slots.bias.normal_()
    x = layer_input()
    lam = slots(x)
    assert lam.shape == (*x.shape[:2], HEADS, 5)
    assert torch.linalg.matrix_rank(lam[:, :, 0].flatten(0, 1)) == 2
    weight = slots.proj.weight.view(HEADS, 2, HIDDEN)
    h, k = HEADS - 1, 3
    parts = [F.softplus(weight[h, r] @ x[1, 7] + slots.bias[h, r]) * F.softplus(slots.B[h, r, k]) for r in range(2)]
    assert_close(lam[1, 7, h, k], sum(parts), 1e-12)
    assert slots.bfloat16()(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("kind", ["single", "log_linear", "dynamic"])
@torch.no_grad()
def test_slot_weights_of_one(kind: str) -> None:
    """With W = 0 and the starting bias every memory reads as one state does."""
    memory: Memory = SingleMemory()
    if kind == "log_linear":
        memory = LogLinearMemory(HIDDEN, HEADS, 3, slot_bias=True).double()
    if kind == "dynamic":
        memory = DynamicMemory(HIDDEN, HEADS, width=2, slot_bias=True, **RULES).double()
    if isinstance(memory, LogLinearMemory | DynamicMemory):
        memory.slots.proj.weight.zero_()
        memory.slots.L.normal_()
        assert memory.slots.bias is not None
        memory.slots.bias.fill_(math.log(math.e - 1))  # in float64
    made = operands()
    o = memory(layer_input(), made, Call(Packing(2, 40)))
    one = torch.ones(2, 40, HEADS, 1, dtype=torch.float64)
    assert_close(o, log_linear_attention(**vars(made), lam=one, backend="reference")[0], 1e-10)


@pytest.mark.parametrize("kind", ["single", "log_linear", "dynamic", "routed", "unbounded"])
@torch.no_grad()
def test_state_is_carried(kind: str) -> None:
    memory: Any = SingleMemory()
    if kind == "log_linear":
        memory = enlivened(LogLinearMemory(HIDDEN, HEADS, 4))
    if kind in ("dynamic", "routed", "unbounded"):
        memory = dynamic(routed=kind == "routed", capacity=None if kind == "unbounded" else 3)
    x, made = layer_input(), operands()
    expected = memory(x, made, Call(Packing(2, 40)))
    past: Any = SimpleNamespace(state=None, tail=None)
    assert_close(memory(x, made, Call(Packing(2, 40), past, keep=False)), expected, 1e-10)
    assert past.state is None
    parts, start = [], 0
    for end in (13, 14, 30, 40):
        part = Operands(**{n: t[:, start:end] for n, t in vars(made).items() if n != "scale"}, scale=made.scale)
        parts.append(memory(x[:, start:end], part, Call(Packing(2, end - start), past)))
        start = end
    assert_close(torch.cat(parts, 1), expected, 1e-10)


# --- routed reads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "start"), [({}, 4.0), ({"sharpness_start": 0.5, "sharpness": "token"}, 0.5)])
def test_sharpness_starts_at_four_or_where_it_is_told(options: dict[str, Any], start: float) -> None:
    memory = DynamicMemory(HIDDEN, HEADS, width=WIDTH, routed=True, **options, **RULES)
    assert memory.sharpness is not None
    assert memory.sharpness.shape == (HEADS,)
    assert_close(torch.nn.functional.softplus(memory.sharpness), torch.full((HEADS,), start), 1e-6)
    assert DynamicMemory(HIDDEN, HEADS, width=WIDTH, **RULES).sharpness is None


@torch.no_grad()
def test_sharpness_near_zero_is_no_routing() -> None:
    plain, routed = dynamic(), dynamic(routed=True)
    routed.slots.load_state_dict(plain.slots.state_dict())
    x, made = layer_input(), operands()
    expected = plain(x, made, Call(Packing(2, 40)))
    assert (routed(x, made, Call(Packing(2, 40))) - expected).abs().max() > 1e-2
    routed.sharpness.fill_(-60.0)
    assert_close(routed(x, made, Call(Packing(2, 40))), expected, 1e-10)


# --- the soft gate ---------------------------------------------------------------------------------------------------


def test_soft_gate_only_while_training() -> None:
    soft, hard = dynamic(temperature=0.3), dynamic()
    x, made = layer_input(), operands()
    assert_close(soft(x, made, Call(Packing(2, 40))), hard(x, made, Call(Packing(2, 40))), 0)
    soft.train()
    hard.train()
    assert soft.soft
    assert not hard.soft
    o = soft(x, made, Call(Packing(2, 40)))
    assert (o - hard(x, made, Call(Packing(2, 40)))).abs().max() > 1e-2
    expected, _ = dynamic_linear_attention(
        **vars(made), lam=soft.slots(x), **soft.rules, temperature=0.3, backend="reference"
    )
    assert_close(o, expected, 1e-10)


# --- decisions under recomputation -----------------------------------------------------------------------------------


class Spy:
    """Counts and keeps what passes through a function."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.calls: list[dict[str, Any]] = []
        self.results: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        self.results.append(self.function(*args, **kwargs))
        return self.results[-1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.3])
def test_recomputation_follows_the_first_pass(
    monkeypatch: pytest.MonkeyPatch, temperature: float | None, reentrant: bool
) -> None:
    """Even where it sees other keys, as a recomputation with other rounding might."""
    segmented, attended = Spy(segment), Spy(dynamic_linear_attention)
    monkeypatch.setattr(memory_module, "segment", segmented)
    monkeypatch.setattr(memory_module, "dynamic_linear_attention", attended)
    memory = dynamic(temperature=temperature).train()
    x, made, passes = layer_input().requires_grad_(), operands(), []

    def run(y: Tensor, notes: dict[str, Any]) -> Tensor:
        passes.append(1)
        changed = Operands(**{**vars(made), "v": made.v if len(passes) == 1 else made.v.flip(1)})
        return memory(y, changed, Call(Packing(2, 40), notes=notes))

    options = {} if reentrant else {"determinism_check": "none"}
    checkpoint(run, x, {}, use_reentrant=reentrant, **options).sum().backward()
    assert len(passes) == 2
    assert len(segmented.calls) == 1
    assert len(attended.calls) == 2
    assert all(call["segmentation"] is segmented.results[0] for call in attended.calls)
    other = segment(made.k, made.v.flip(1), made.g, made.beta, **memory.rules)
    assert not other.boundary.equal(segmented.results[0].boundary)  # it would have decided otherwise


def test_noted_decisions_change_nothing() -> None:
    memory = dynamic()
    x, made = layer_input(), operands()
    assert_close(memory(x, made, Call(Packing(2, 40), notes={})), memory(x, made, Call(Packing(2, 40))), 1e-12)
    packing = Packing(1, 40, (11, 0, 29))
    packed = Operands(**{n: t[:1] for n, t in vars(made).items() if n != "scale"})
    assert_close(memory(x[:1], packed, Call(packing, notes={})), memory(x[:1], packed, Call(packing)), 1e-12)


def test_each_call_has_its_own_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    segmented = Spy(segment)
    monkeypatch.setattr(memory_module, "segment", segmented)
    memory = dynamic()
    for seed in (0, 1):
        memory(layer_input(), operands(seed=seed), Call(Packing(2, 40), notes={}))
    assert len(segmented.calls) == 2
