"""What a token read, and which state mattered: weights, and predictions with a state left out.

Leaving a state out is an intervention on the model: at the query token alone, one state of one head of one layer is
taken out of the read, as if its weight lam were zero there. Everything above that layer is computed anew for the token,
decisions included; the states that earlier tokens made stay as they are. How far that moves the prediction of the next
token is how much the state mattered to it, by itself: two states that say the same can stand in for each other.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dla.inspect.reading import LayerReading
from dla.inspect.skipping import contributions
from dla.layers.call import Call
from dla.layers.memory import DynamicMemory, LogLinearMemory, Memory
from dla.layers.packing import Packing
from dla.models.cache import DLACache
from dla.models.causal_lm import DLAForCausalLM
from dla.models.generate import read
from dla.ops.weights import read_weights

MOST_QUERIES = 64
LIKELIEST = 5  # tokens whose probabilities are shown
LEFT_OUT = 64  # states of a layer that are left out in turn, those with the largest parts of the read
ROUNDING = (
    "layer {layer} at token {t}: read token by token it decided otherwise (a score within rounding of the "
    "threshold, or costs that tie), so its reads are not shown"
)
AT_A_TIME, COPIED = (
    32,
    256 << 20,
)  # rows of a batch of variations, and the bytes that copies of a layer's state may take

Spans = list[list[tuple[int, int]]]  # by head: (start, end) of the states, oldest first


@dataclass(frozen=True)
class Effect:
    """The prediction without one state."""

    head: int
    state: int  # of those alive after the query token, oldest first
    kl: float  # KL(prediction ‖ prediction without the state), in bits
    p: list[float]  # of the query's candidates


@dataclass(frozen=True)
class LayerRead:
    """What the query token read in one layer, by head and state, oldest first."""

    lam: list[list[float]]  # what the state counts for: lam by slot, times the fit of its keys if reads are routed
    share: list[list[float]] | None  # of the sum over states of the norm of what each adds to the read
    effects: list[Effect]


@dataclass(frozen=True)
class Query:
    at: int  # the token's position
    candidates: list[
        int
    ]  # tokens: the likeliest next ones, and the one that came if there is one and it is not among them
    p: list[float]  # theirs
    layers: dict[int, LayerRead]  # by layer of the model
    notes: list[str]


@dataclass
class AtQuery:
    """What one memory did at the query token."""

    memory: Memory
    lam: Tensor  # [heads, states or levels]
    parts: Tensor | None = None  # [heads, states, dv] what each state adds to the read
    counts: list[list[int]] | None = None  # tokens of its states, by head


@torch.no_grad()
def ask(
    model: DLAForCausalLM, ids: Sequence[int], layers: Sequence[LayerReading], at: Sequence[int]
) -> Iterator[Query]:
    """What the tokens at the positions read, in the order of the text."""
    tokens, cache, taken = torch.tensor([list(ids)], device=model.device), DLACache(len(model.model.layers)), 0
    for t in sorted(set(at)):
        if t > taken:
            for _ in read(model, tokens[:, taken:t], cache):
                pass
            taken = t
        yield _ask(model, tokens, layers, cache, t)


def _ask(model: DLAForCausalLM, tokens: Tensor, layers: Sequence[LayerReading], cache: DLACache, t: int) -> Query:
    seen: dict[Memory, AtQuery] = {}
    inputs: list[Tensor] = []
    with _looking(model, seen, inputs):
        logits = model(tokens[:, t : t + 1], past_key_values=cache.clone()).logits[0, -1]
    base = logits.float().log_softmax(-1)
    candidates = base.topk(min(LIKELIEST, len(base))).indices.tolist()
    if t + 1 < tokens.shape[1] and int(tokens[0, t + 1]) not in candidates:
        candidates.append(int(tokens[0, t + 1]))
    found: dict[int, LayerRead] = {}
    notes: list[str] = []
    for layer in layers:
        block: Any = model.model.layers[layer.layer]
        memory = block.mixer.memory
        spans = [layer.decided.spans(0, head, t) for head in range(layer.heads)]
        if memory not in seen:  # a single state: nothing to weigh
            continue
        one = seen[memory]
        if one.counts is not None and one.counts != [[end - start for start, end in head] for head in spans]:
            notes.append(ROUNDING.format(layer=layer.layer, t=t))
            continue
        lam, share = _weights(one, spans, t)
        chosen = _largest(lam if share is None else share)
        without = _leave_out(model, layer.layer, inputs[layer.layer], cache, one, chosen, spans, t)
        effects = [
            Effect(head, state, _bits(base, changed), changed.exp()[candidates].tolist())
            for (head, state), changed in zip(chosen, without, strict=True)
        ]
        found[layer.layer] = LayerRead(lam, share, effects)
    return Query(t, candidates, base.exp()[candidates].tolist(), found, notes)


def _bits(base: Tensor, changed: Tensor) -> float:
    """KL(base ‖ changed) of log-probabilities, in bits."""
    return max(0.0, float((base.exp() * (base - changed)).sum()) / math.log(2))


@contextmanager
def _looking(model: DLAForCausalLM, seen: dict[Memory, AtQuery], inputs: list[Tensor]) -> Iterator[None]:
    """Takes down every block's input, and what the memories do with one token."""

    def before(block: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0])

    def after(memory: Any, args: tuple[Any, ...], out: Tensor) -> None:
        x, made, call = args[:3]
        if isinstance(memory, LogLinearMemory):
            seen[memory] = AtQuery(memory, memory.slots(x)[0, 0])
        elif isinstance(memory, DynamicMemory):
            state, q, lam, route = call.past.state, made.q[:, 0], memory.slots(x)[:, 0], memory.route(x)
            route = None if route is None else route.expand(*x.shape[:2], lam.shape[1])[:, 0]
            parts = contributions(state, q, lam, route, memory.slot_order, made.scale)[0]
            q = q.repeat_interleave(lam.shape[1] // q.shape[1], 1).to(parts.dtype)
            weight = read_weights(lam, state.size, memory.slot_order, q, state.keys, route, parts.shape[2])
            counts = [[n for n in row if n] for row in state.counts[0].tolist()]
            seen[memory] = AtQuery(memory, weight[0], parts[0], counts)

    with ExitStack() as hooks:
        for block in model.model.layers:
            hooks.enter_context(block.register_forward_pre_hook(before))
            if isinstance(memory := getattr(block.mixer, "memory", None), Memory):
                hooks.enter_context(memory.register_forward_hook(after))
        yield


def _weights(one: AtQuery, spans: Spans, t: int) -> tuple[list[list[float]], list[list[float]] | None]:
    """lam and shares of the read, by head and state."""
    if one.parts is None:  # by level: that of a block is the same for all its tokens
        last = one.lam.shape[-1] - 1
        return [[float(row[min(_level(start, t), last)]) for start, _ in head]
                for row, head in zip(one.lam, spans, strict=True)], None  # fmt: skip
    size = one.parts.norm(dim=-1).double()
    share = size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    live = [len(head) for head in spans]
    return [row[:n].tolist() for row, n in zip(one.lam, live, strict=True)], [
        row[:n].tolist() for row, n in zip(share, live, strict=True)
    ]


def _level(start: int, t: int) -> int:
    return (start ^ t).bit_length()


def _largest(size: list[list[float]]) -> list[tuple[int, int]]:
    """(head, state) of the largest, at most ``LEFT_OUT``, in order."""
    places = [(head, state) for head, row in enumerate(size) for state in range(len(row))]
    return sorted(sorted(places, key=lambda place: -size[place[0]][place[1]])[:LEFT_OUT])


def _leave_out(
    model: DLAForCausalLM, first: int, x: Tensor, cache: DLACache, one: AtQuery, chosen: list[tuple[int, int]],
    spans: Spans, t: int,
) -> Iterator[Tensor]:  # fmt: skip
    """log p of the next token [vocab], for each of the chosen (head, state) of layer ``first`` left out.

    x [1, 1, hidden] is the block's input at the query token t, cache the past before it.
    """
    pasts = cache.layers[first:]
    largest = max(*(past.nbytes for past in pasts), 1)
    for group in torch.arange(len(chosen)).split(max(1, min(AT_A_TIME, COPIED // largest))):
        rows = [chosen[i] for i in group.tolist()]
        hidden = x.expand(len(rows), *x.shape[1:]).contiguous()
        with _without(one, rows, spans, t):
            for block, past in zip(model.model.layers[first:], pasts, strict=True):
                own = past.select(torch.zeros(len(rows), dtype=torch.int64))
                hidden = block(hidden, Call(Packing(len(rows), 1), own))
        yield from model.lm_head(model.model.norm(hidden))[:, 0].float().log_softmax(-1)


@contextmanager
def _without(one: AtQuery, rows: list[tuple[int, int]], spans: Spans, t: int) -> Iterator[None]:
    """Row i of the batch reads without state rows[i] of the memory."""

    def lessen(module: nn.Module, args: Any, out: Tensor) -> Tensor:  # o [rows, 1, heads, dv]
        out = out.clone()
        for row, (head, state) in enumerate(rows):
            assert one.parts is not None
            out[row, 0, head] -= one.parts[head, state].to(out.dtype)
        return out

    def weigh(module: nn.Module, args: Any, lam: Tensor) -> Tensor:  # lam [rows, 1, heads, levels]
        lam = lam.clone()
        for row, (head, state) in enumerate(rows):
            lam[row, 0, head, min(_level(spans[head][state][0], t), lam.shape[-1] - 1)] = 0
        return lam

    slots: nn.Module = one.memory.slots  # type: ignore[assignment]
    with slots.register_forward_hook(weigh) if one.parts is None else one.memory.register_forward_hook(lessen):
        yield
