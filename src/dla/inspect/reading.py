"""A text as a model's memories read it: the decisions of every layer, what they hold, and Theorem 1's bound."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dla.inspect.figures import describe
from dla.inspect.observe import watch
from dla.inspect.partitions import level_lifetimes, one_state
from dla.inspect.theory import bound_of_writes, fenwick_blocks, fixed_blocks
from dla.layers.call import Call
from dla.layers.memory import DynamicMemory, LogLinearMemory, Memory, Operands, SingleMemory
from dla.models.cache import DLACache
from dla.models.causal_lm import DLAForCausalLM
from dla.models.info import kv_cache_bytes
from dla.ops import Segmentation
from dla.ops.state import LogLinearState

KINDS: dict[type[Memory], str] = {DynamicMemory: "dynamic", LogLinearMemory: "levels", SingleMemory: "single"}
PARTITIONS = (
    "this memory",
    "as many equal blocks",
    "Log-Linear levels",
    "as many equal blocks as levels",
)  # with bounds


@dataclass(frozen=True, eq=False)
class LayerReading:
    """One layer's memory over the text. Heads are those of the values."""

    layer: int  # in the model, from 0
    kind: str  # "dynamic", "levels" or "single"
    rules: dict[str, Any]  # of a dynamic memory: tau, capacity, merge, score, block
    decided: Segmentation  # of one sequence; without scores unless the kind is dynamic
    dk: int
    dv: int
    nbytes: int  # of the states after the last token, as they are held
    kv_bytes: int  # of a KV cache of the same width
    bounds: list[dict[str, float]]  # of each head, by partition: Theorem 1 for a query of norm 1
    blocks: list[dict[str, int]]  # of each head, by partition: how many blocks that is

    @property
    def scored(self) -> bool:
        return self.kind == "dynamic"

    @property
    def heads(self) -> int:
        return self.decided.boundary.shape[2]

    @cached_property
    def totals(self) -> dict[str, float]:
        """Boundary rate, states and W as ``describe`` has them, the most states at any step, and bytes."""
        figures = describe(self.decided, self.dk, self.dv)
        live = self.decided.live_states()
        return {
            "boundary_rate": figures["boundary_rate"],
            "states": figures["states"],
            "states_most": int(live.max()),
            "W": figures["W"],
            "bytes": self.nbytes,
            "kv_cache_bytes": self.kv_bytes,
            "of_kv_cache": self.nbytes / self.kv_bytes,
        }


@dataclass(frozen=True)
class Reading:
    """What a model made of the tokens."""

    name: str  # of the model and what was changed about it
    ids: list[int]
    pieces: list[str]  # the text of every token
    layers: list[LayerReading]
    queries: list[Any] = field(default_factory=list)  # of dla.inspect.queries.Query
    words: dict[int, str] = field(default_factory=dict)  # the texts of the queries' candidates
    notes: list[str] = field(default_factory=list)  # what a reader should know


@torch.no_grad()
def read_layers(model: DLAForCausalLM, ids: Sequence[int]) -> list[LayerReading]:
    """What every memory of the model decides over the tokens, read at once from the start."""
    order = {block.mixer.memory: i for i, block in enumerate(model.model.layers) if hasattr(block.mixer, "memory")}
    kv_bytes = kv_cache_bytes(model.config, len(ids)) // model.config.num_hidden_layers
    found: dict[int, LayerReading] = {}

    def look(memory: Memory, x: Tensor, made: Operands, call: Call) -> None:
        found[order[memory]] = _read_layer(order[memory], memory, made, kv_bytes)

    cache = DLACache(model.config.num_hidden_layers)
    with watch(model, look, Memory):
        model(torch.tensor([list(ids)], device=model.device), past_key_values=cache, logits_to_keep=1)
    if not found:
        raise ValueError("the model has no linear layer, so there are no states to look at: every layer is softmax")
    held = [layer.state.nbytes if layer.state is not None else 0 for layer in cache.layers]
    return [replace(found[i], nbytes=held[i]) for i in sorted(found)]


def _read_layer(layer: int, memory: Memory, made: Operands, kv_bytes: int) -> LayerReading:
    time, heads, dv = made.v.shape[1:]
    kind, rules = KINDS[type(memory)], {}
    if isinstance(memory, DynamicMemory):
        decided, rules = memory.decide(made).to("cpu"), dict(memory.rules)
    else:
        decided = (level_lifetimes if kind == "levels" else one_state)(time, heads)
    compared = [_bounds(made, decided, head) for head in range(heads)]
    bounds = [{name: bound for name, (bound, _) in row.items()} for row in compared]
    blocks = [{name: count for name, (_, count) in row.items()} for row in compared]
    return LayerReading(layer, kind, rules, decided, made.k.shape[-1], dv, 0, kv_bytes, bounds, blocks)


def _bounds(made: Operands, decided: Segmentation, head: int) -> dict[str, tuple[float, int]]:
    """Theorem 1's bound and the number of blocks, by partition of what the head's tokens write, decays left out."""
    heads, key_heads = made.v.shape[2], made.k.shape[2]
    k, v = made.k[0, :, head // (heads // key_heads)].cpu(), made.v[0, :, head].double().cpu()
    if made.beta is not None:
        v = v * made.beta[0, :, head, None].double().cpu()
    own = [end - start for start, end in decided.spans(0, head)]
    levels = fenwick_blocks(len(k))
    cuts = (own, fixed_blocks(len(k), len(own)), levels, fixed_blocks(len(k), len(levels)))
    return {name: (bound_of_writes(k, v, cut), len(cut)) for name, cut in zip(PARTITIONS, cuts, strict=True)}


def as_levels(layer: LayerReading) -> LayerReading:
    """How Log-Linear would cut the same tokens: another partition of the same keys and values."""
    length, heads = layer.decided.boundary.shape[1:]
    shape = (1, heads, layer.dk, layer.dv)
    held = LogLinearState.empty(shape, torch.float32, "meta", tokens=length).nbytes
    own = dict(zip(PARTITIONS, PARTITIONS[2:] * 2, strict=True))  # what stands for what
    return replace(
        layer,
        kind="levels",
        rules={},
        decided=level_lifetimes(length, heads),
        nbytes=held,
        bounds=[{name: row[other] for name, other in own.items()} for row in layer.bounds],
        blocks=[{name: row[other] for name, other in own.items()} for row in layer.blocks],
    )
