"""What a model remembers between calls: per layer a state and the tail of its convolution."""

import json
from collections.abc import Sequence
from os import PathLike
from typing import Any, NoReturn, Self

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dla.layers.attention import KVState
from dla.models.config import DLAConfig
from dla.ops.attention import KINDS
from dla.ops.state import DynamicState, State
from dla.ops.state.base import FLOATS, expect, read_tensors, refusals

STATES: dict[Any, type[State]] = {**KINDS, None: KVState}
FORMAT = "dla-context-1"
NO_ROLLBACK = (
    "a DLA cache cannot drop tokens it has taken in: merged states cannot be taken apart. "
    "Keep a clone() from before and go on from that"
)


class LayerCache(CacheLayerMixin):
    """One layer's past."""

    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None  # of a memory, or the keys and values of softmax attention
        self.tail: Tensor | None = None  # [batch, conv_size - 1, channels]
        self.seen = 0  # columns of the batch taken in, padding included: what generate() counts

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        found = {} if self.state is None else {f"state.{name}": x for name, x in self.state.tensors().items()}
        return found if self.tail is None else {**found, "tail": self.tail}

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    @property
    def batch_size(self) -> int:
        if self.state is not None:
            return self.state.batch
        return -1 if self.tail is None else self.tail.shape[0]

    def select(self, indices: Tensor) -> "LayerCache":
        """The sequences at ``indices``."""
        new = LayerCache()
        new.seen = self.seen
        new.state = None if self.state is None else self.state.select(indices.to(self.state.device))
        new.tail = None if self.tail is None else self.tail.index_select(0, indices.to(self.tail.device))
        return new

    @staticmethod
    def cat(layers: "Sequence[LayerCache]") -> "LayerCache":
        """A layer's pasts in several batches, which are used up, as one batch."""
        if len(layers) == 1:
            return layers[0]
        joined = LayerCache()
        joined.seen = max(layer.seen for layer in layers)
        states = [layer.state for layer in layers if layer.state is not None]
        tails = [layer.tail for layer in layers if layer.tail is not None]
        joined.state = State.cat(states) if states else None
        joined.tail = torch.cat(tails) if tails else None
        return joined

    # what transformers calls

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def reset(self) -> None:
        self.state, self.tail, self.seen = None, None, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        self.__dict__.update(self.select(indices).__dict__)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size >= 0:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def offload(self) -> None:
        self._move("cpu")

    def prefetch(self) -> None:
        """Nothing: a cache comes to where it is used when it is used."""

    def _move(self, device: torch.device | str) -> None:
        self.state = None if self.state is None else self.state.to(device)
        self.tail = None if self.tail is None else self.tail.to(device)

    def crop(self, *args: Any) -> NoReturn:
        raise ValueError(NO_ROLLBACK)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a DLA cache is filled by DLA models alone")

    update = lazy_initialization


class DLACache(Cache):
    """The memory of a model in one context: bounded for linear layers, growing for softmax ones.

    ``save`` and ``load`` make it a snapshot: a document read once goes on anywhere, without being read again.
    """

    layers: list[LayerCache]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[LayerCache() for _ in range(num_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of everything held."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def batch_size(self) -> int:
        return self.layers[0].batch_size

    def advance(self, columns: int) -> None:
        """Count tokens that all layers have taken in."""
        for layer in self.layers:
            layer.seen += columns

    def clone(self) -> "DLACache":
        """A copy that goes its own way."""
        return self.select(torch.arange(self.batch_size)) if self.batch_size >= 0 else DLACache(len(self.layers))

    def select(self, indices: Tensor) -> "DLACache":
        """The sequences at ``indices`` (repeats allowed), as a cache of their own."""
        new = DLACache(0)
        new.layers = [layer.select(indices) for layer in self.layers]
        return new

    @staticmethod
    def cat(caches: "Sequence[DLACache]") -> "DLACache":
        """Caches, which are used up, as one batch, in order."""
        joined = DLACache(0)
        joined.layers = [LayerCache.cat(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)]
        return joined

    def to(self, device: torch.device | str) -> Self:
        """Move everything to a device."""
        for layer in self.layers:
            layer._move(device)
        return self

    def inputs(self, input_ids: Tensor) -> dict[str, Any]:
        """Arguments of ``generate`` that go on from here with ``input_ids`` [B, new tokens] alone."""
        mask = torch.ones(input_ids.shape[0], self.get_seq_length() + input_ids.shape[1], dtype=torch.int64)
        return {
            "input_ids": input_ids,
            "attention_mask": mask.to(input_ids.device),
            "past_key_values": self,
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write a snapshot: one safetensors file."""
        tensors = {
            f"{i}.{name}": x.contiguous() for i, layer in enumerate(self.layers) for name, x in layer.tensors().items()
        }
        labels = [None if layer.state is None else layer.state.label() for layer in self.layers]
        metadata = {"format": FORMAT, "layers": json.dumps(labels), "seen": str(self.get_seq_length())}
        save_file(tensors, path, metadata=metadata)

    @classmethod
    def load(cls, path: str | PathLike[str], device: str = "cpu") -> "DLACache":
        """Read a snapshot that ``save`` wrote."""
        with refusals(path, "context"):
            metadata, tensors = read_tensors(path, device)
            if metadata.get("format") != FORMAT:
                raise ValueError(f"the format is {metadata.get('format')!r}, not {FORMAT!r}")
            return cls._restore(metadata, tensors)

    @classmethod
    def _restore(cls, metadata: dict[str, str], tensors: dict[str, Tensor]) -> "DLACache":
        labels = json.loads(metadata.get("layers", "null"))
        if not isinstance(labels, list):
            raise ValueError(f"layers must be a list of labels, got {type(labels).__name__}")
        cache, left = cls(len(labels)), dict(tensors)
        for i, (layer, label) in enumerate(zip(cache.layers, labels, strict=True)):
            own = {name.removeprefix(f"{i}."): left.pop(name) for name in tensors if name.startswith(f"{i}.")}
            layer.tail = own.pop("tail", None)
            if layer.tail is not None:
                expect(f"{i}.tail", layer.tail, (-1, -1, -1), *FLOATS, torch.bfloat16, torch.float16)
            if label is not None:
                layer.state = State.restore(label, {name.removeprefix("state."): x for name, x in own.items()})
            elif own:
                raise ValueError(f"layer {i} has no state, yet there are {', '.join(sorted(own))} of it")
        if left:
            raise ValueError(f"there are {len(labels)} layers, and tensors of none of them: {', '.join(sorted(left))}")
        cache.advance(_seen(metadata.get("seen", ""), cache.layers))
        return cache

    def __repr__(self) -> str:
        seen, size = self.get_seq_length(), self.nbytes
        return f"DLACache({len(self.layers)} layers, {seen} tokens, {size:,} bytes)"


def _seen(text: str, layers: list[LayerCache]) -> int:
    """How many tokens a saved context has seen, if all its layers have seen the same ones."""
    batches = {layer.state.batch for layer in layers if layer.state is not None}
    batches |= {layer.tail.shape[0] for layer in layers if layer.tail is not None}
    if len(batches) > 1:
        raise ValueError(f"all layers must hold as many sequences, got {sorted(batches)}")
    lengths = [layer.state.length for layer in layers if layer.state is not None]
    if any(not length.equal(lengths[0]) for length in lengths):
        raise ValueError("length must be the same in all layers")
    longest = int(lengths[0].max()) if lengths and lengths[0].numel() else 0
    if not text.isdecimal() or not longest <= int(text) < 2**48:
        raise ValueError(f"seen must be a number of tokens, {longest} at least, got {text!r}")
    return int(text)


def check_cache(cache: object, config: DLAConfig, batch: int) -> None:
    """Refuse what is not a cache of a model like this for a batch of this size."""
    if not isinstance(cache, DLACache):
        raise ValueError(f"past_key_values must be a DLACache or None, got {type(cache).__name__}")
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"past_key_values is of a model with {len(cache.layers)} layers, this one has {config.num_hidden_layers}"
        )
    if cache.batch_size not in (-1, batch):
        raise ValueError(f"past_key_values holds {cache.batch_size} sequences, the batch has {batch}")
    for i, ((backbone, memory), layer) in enumerate(zip(config.kinds(), cache.layers, strict=True)):
        if wrong := _misfit(layer, backbone, memory, config, batch):
            raise ValueError(f"past_key_values is of another model: layer {i} {wrong}")


def _misfit(layer: LayerCache, backbone: str, memory: str | None, config: DLAConfig, batch: int) -> str | None:
    """What keeps a model's layer from going on from here, before any layer has moved on; None if nothing does."""
    state = layer.state
    if state is None:
        return None if layer.tail is None else _misfit_tail(layer.tail, memory, config, batch)
    sizes = (config.num_heads, config.head_k_dim, config.head_v_dim)
    if memory is None:
        sizes = (config.num_key_value_heads, config.attention_head_dim, config.attention_head_dim)
    if not isinstance(state, STATES[memory]) or state.shape != (batch, *sizes):
        kind = f"{backbone} (memory {memory}) with {sizes[0]} heads of {sizes[1]} x {sizes[2]}"
        return f"is {kind}, and got {state!r}"
    if isinstance(state, KVState) and state.window != config.window:
        return f"has window={config.window}, and got a state of window={state.window}"
    if isinstance(state, DynamicState):
        if state.routed != config.routed:
            words = {True: "with", False: "without"}
            return f"is {words[config.routed]} routed reads, and got a state {words[state.routed]} routed reads"
        state.resized(config.capacity)  # refuses
    return _misfit_tail(layer.tail, memory, config, batch)


def _misfit_tail(tail: Tensor | None, memory: str | None, config: DLAConfig, batch: int) -> str | None:
    wanted, found = None, None if tail is None else list(tail.shape)
    if memory is not None and config.conv_size:
        channels = 2 * config.num_key_heads * config.head_k_dim + config.num_heads * config.head_v_dim
        wanted = [batch, config.conv_size - 1, channels]
    return None if found == wanted else f"needs the last inputs of its convolution, {wanted}, and got {found}"
