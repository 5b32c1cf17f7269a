"""What a model is made of: a backbone and a memory for each layer, and their sizes."""

import difflib
import json
import math
from dataclasses import fields
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, get_args

import torch
from transformers import PreTrainedConfig

from dla.names import check_choice
from dla.ops.checks import check_rules, check_temperature
from dla.ops.rules import MERGES, SCORES, SLOT_ORDERS, Rules
from dla.report import is_number, shown

SHARPNESSES = ("head", "token")
BACKBONES = ("mamba2", "gated_deltanet", "deltanet", "linear", "softmax")
MEMORIES = ("single", "log_linear", "dynamic")
FEATURE_MAPS = ("identity", "learned")
MOST_LAYERS = 10_000
LARGEST = 2**31 - 1  # of any size
LARGEST_MATRIX = 2**48  # numbers; beyond it torch cannot even count the bytes
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Fields of transformers' own that may be null, and what they are else.
THEIRS: dict[str, tuple[type, ...]] = {
    "architectures": (list, tuple),
    **dict.fromkeys(("id2label", "label2id"), (dict,)),
    **dict.fromkeys(("problem_type", "transformers_version"), (str,)),
    **dict.fromkeys(("output_hidden_states", "return_dict", "is_encoder_decoder"), (bool,)),
    "chunk_size_feed_forward": (int,),
}
PARTS = ("text_config", "text_encoder", "encoder", "decoder", "generator")  # of composite models, which these are not
# What transformers raises on values that it does not expect.
SURPRISES = (TypeError, AttributeError, KeyError, IndexError, OverflowError, RecursionError)
UNBOUNDED_SLOTS = 30  # the width of lam where there is no capacity


class DLAConfig(PreTrainedConfig):
    """Configuration of ``DLAForCausalLM``. Sizes left at 0 follow from ``hidden_size`` and the backbone.

    Args:
        backbone: what makes q, k, v, decay and step: "mamba2", "gated_deltanet", "deltanet", "linear" or "softmax".
        memory: how the past is kept and read: "single" (one state), "log_linear" (Fenwick levels) or "dynamic".
        layers: a pattern of layer kinds, repeated over the depth, for hybrids: "backbone" or "backbone:memory" each,
            e.g. ["mamba2", "mamba2", "mamba2", "softmax"]. None: ``backbone`` and ``memory`` in every layer.
        intermediate_size: width of the SwiGLU after every mixer; 0 for none, None for the backbone's custom.
        num_heads, num_key_heads, head_k_dim, head_v_dim: of linear layers; key heads divide heads. In Mamba-2's words
            they are the heads, the groups, the state size and the head dimension.
        conv_size: length of the short convolution; 0 for none. conv_bias: whether it has a bias.
        projection_bias: biases in Mamba-2's projections. norm_groups: groups of its output norm.
        output_gate: gate the output norm of (gated) DeltaNet and linear layers.
        allow_neg_eigval: delta steps up to 2 instead of 1.
        feature_map: "identity", or "learned": a linear map of keys and queries.
        time_step_limit: range that Mamba-2's time step is clamped to.
        num_attention_heads, num_key_value_heads, attention_head_dim, rope_theta: of softmax layers. Without any, the
            first two are those of the linear layers: other tools divide by them.
        window: how many tokens softmax layers see, their own included; None for all.
        capacity, tau, merge, score, slot_order, block: of the dynamic memory, as in ``dynamic_linear_attention``.
        temperature: of the soft gate while training; None is the hard gate.
        routed: reads weighted also by how well the query fits a state's keys, with a learned sharpness a head.
        state_dtype: what the dynamic memory holds its states in: "bfloat16" for half the bytes; None: float32.
        sharpness: of routed reads: "head", or "token" where the layer's input moves it; sharpness_start: at first.
        slots: width of lam for the dynamic memory (None: the capacity). levels: for log-linear (None: what
            ``max_position_embeddings`` needs). slot_bias: a learned bias in lam.
        slot_rank: lam of the dynamic memory as a product of this rank, with fewer parameters; None: a weight a slot.
        residual_in_fp32: keep the residual stream in float32 in half-precision models.
        loss_chunk: tokens whose logits are computed at a time for the training loss; 0 computes (and returns) all.
    """

    model_type = "dla"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    backbone: str = "mamba2"
    memory: str = "single"
    layers: list[str] | None = None

    vocab_size: int = 32000
    hidden_size: int = 768
    num_hidden_layers: int = 12
    intermediate_size: int | None = None
    max_position_embeddings: int = 16384
    tie_word_embeddings: bool = False
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    residual_in_fp32: bool = False
    loss_chunk: int = 1024
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    num_heads: int = 0
    num_key_heads: int = 0
    head_k_dim: int = 0
    head_v_dim: int = 0
    conv_size: int = 4
    conv_bias: bool | None = None
    projection_bias: bool = False
    norm_groups: int = 1
    output_gate: bool = True
    allow_neg_eigval: bool = False
    feature_map: str = "identity"
    time_step_limit: tuple[float, ...] | list[float] = (0.0, float("inf"))

    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    attention_head_dim: int = 0
    rope_theta: float = 500000.0
    window: int | None = None

    capacity: int | None = 30
    tau: float = 0.6
    merge: str = "density"
    score: str = "token"
    slot_order: str = "chronological"
    block: int | None = None
    gate_temperature: float | None = None  # `temperature`, under a name that generate() does not take for its own
    routed: bool = False
    sharpness: str = "head"
    sharpness_start: float = 4.0
    state_dtype: str | None = None
    slots: int | None = None
    levels: int | None = None
    slot_bias: bool = False
    slot_rank: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.gate_temperature = kwargs.pop("temperature", self.gate_temperature)
        _refuse_typos(kwargs)
        self._check_types()
        self._check_theirs()
        self._check_kinds()
        self._fill_sizes()
        self._check_sizes()
        try:
            super().__post_init__(**kwargs)
        except SURPRISES as error:
            raise ValueError(f"transformers cannot take the configuration: {_first_line(error)}") from error

    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], *args: Any, **options: Any) -> "DLAConfig":
        """As transformers', but what is wrong with config.json is a ValueError of one line that names the file."""
        try:
            made: DLAConfig = super().from_pretrained(name, *args, **options)
        except (ValueError, *SURPRISES) as error:
            raise ValueError(f"{Path(name) / 'config.json'}: {_first_line(error)}") from error
        return made

    @property
    def temperature(self) -> float | None:
        """Of the soft gate while training; None for the hard gate."""
        return self.gate_temperature

    @temperature.setter
    def temperature(self, value: float | None) -> None:
        self.gate_temperature = value

    def _get_generation_parameters(self) -> dict[str, Any]:
        """What transformers takes for settings of generate() in a model's configuration: not the gate's temperature."""
        return {name: x for name, x in super()._get_generation_parameters().items() if name != "temperature"}

    def kinds(self) -> list[tuple[str, str | None]]:
        """(backbone, memory) of every layer; softmax layers have no memory."""
        pattern = self.layers or [self.backbone]
        kinds = []
        for entry in pattern * (self.num_hidden_layers // len(pattern)):
            backbone, _, memory = entry.partition(":")
            kinds.append((backbone, None if backbone == "softmax" else memory or self.memory))
        return kinds

    @property
    def dynamic(self) -> bool:
        return any(memory == "dynamic" for _, memory in self.kinds())

    @property
    def slot_width(self) -> int:
        """How many slots lam has in the dynamic memory."""
        return self.slots or self.capacity or UNBOUNDED_SLOTS

    @property
    def level_width(self) -> int:
        """How many levels lam has in the log-linear memory."""
        return self.levels or (self.max_position_embeddings - 1).bit_length() + 1

    def _check_types(self) -> None:
        for name, annotation in DLAConfig.__annotations__.items():
            kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
            if not set(kinds) <= {int, float, bool, str, NoneType}:
                continue
            value = getattr(self, name)
            accepted = (*kinds, int) if float in kinds else kinds
            if type(value) not in accepted:
                wanted = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
                raise ValueError(f"{name} must be {wanted}, got {shown(value)}")
            if type(value) is int and abs(value) > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST}, got {shown(value)}")
        limit = self.time_step_limit
        pair = isinstance(limit, list | tuple) and len(limit) == 2 and all(is_number(x) or x == math.inf for x in limit)
        if not pair or not 0 <= limit[0] <= limit[1]:
            raise ValueError(f"time_step_limit must be two numbers, the least and the most, got {shown(limit)}")
        for name in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number > 0, got {getattr(self, name)}")
        if not 0 <= self.initializer_range < float("inf"):
            raise ValueError(f"initializer_range must be a number >= 0, got {self.initializer_range}")
        for name in TOKENS:
            check_tokens(name, getattr(self, name), several=name == "eos_token_id")

    def _check_theirs(self) -> None:
        """Fields of transformers, which takes them as they are and fails on them later."""
        for name, kinds in THEIRS.items():
            value = getattr(self, name)
            if value is not None and type(value) not in kinds:
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(f"{name} must be {wanted}, got {shown(value)}")
        for name in self.architectures or ():
            if not isinstance(name, str):
                raise ValueError(f"architectures must be a list of texts, got {shown(self.architectures)}")
        named = isinstance(self.dtype, str) and isinstance(getattr(torch, self.dtype, None), torch.dtype)
        if not (named or self.dtype is None or isinstance(self.dtype, torch.dtype)):
            raise ValueError(
                f'dtype must be that of a tensor, such as "float32" or "bfloat16", got {shown(self.dtype)}'
            )

    def _check_kinds(self) -> None:
        check_choice("backbone", self.backbone, BACKBONES)
        check_choice("memory", self.memory, MEMORIES)
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("merge", self.merge, MERGES)
        check_choice("score", self.score, SCORES)
        check_choice("slot_order", self.slot_order, SLOT_ORDERS)
        for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
            _check_count(name, getattr(self, name))
        if self.num_hidden_layers > MOST_LAYERS:
            raise ValueError(f"num_hidden_layers must be at most {MOST_LAYERS}, got {self.num_hidden_layers}")
        if self.layers is not None:
            self._check_pattern(self.layers)
        for backbone, memory in self.kinds():
            if backbone == "softmax" and self.layers is None and memory is None and self.memory != "single":
                raise ValueError(
                    f'memory="{self.memory}" needs a linear backbone ({", ".join(BACKBONES[:-1])}); '
                    'backbone="softmax" keeps all keys and values and goes with memory="single"'
                )

    def _check_pattern(self, layers: object) -> None:
        if not isinstance(layers, list | tuple) or not layers or not all(isinstance(x, str) for x in layers):
            raise ValueError(f'layers must be a list of "backbone" or "backbone:memory", got {shown(layers)}')
        if self.num_hidden_layers % len(layers):
            raise ValueError(
                f"layers has {len(layers)} entries, which must divide num_hidden_layers={self.num_hidden_layers}"
            )
        for entry in layers:
            backbone, colon, memory = entry.partition(":")
            check_choice("layers", backbone, BACKBONES)
            if colon and backbone == "softmax":
                raise ValueError(f'layers: "{entry}" must be "softmax" alone; softmax layers keep keys and values')
            if colon:
                check_choice("layers", memory, MEMORIES)

    def _fill_sizes(self) -> None:
        """Sizes left open, by the customs of each backbone."""
        linear = [backbone for backbone, memory in self.kinds() if memory is not None]
        first = linear[0] if linear else None
        d = self.hidden_size
        if first == "mamba2":
            self.head_v_dim = self.head_v_dim or 64
            self.num_heads = self.num_heads or max(1, 2 * d // self.head_v_dim)
            self.head_k_dim = self.head_k_dim or 128
            self.num_key_heads = self.num_key_heads or 1
        elif first is not None:
            # q and k of 3/4 of the width and v of twice that, so that the layer has about 6 d^2 parameters
            self.num_heads = self.num_heads or max(1, d // 256)
            self.head_k_dim = self.head_k_dim or max(1, 3 * d // 4 // self.num_heads)
            self.head_v_dim = self.head_v_dim or 2 * self.head_k_dim
            self.num_key_heads = self.num_key_heads or self.num_heads
        if self.conv_bias is None:
            self.conv_bias = first == "mamba2"
        if any(backbone == "softmax" for backbone, _ in self.kinds()):
            self.num_attention_heads = self.num_attention_heads or max(1, d // 64)
            self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
            self.attention_head_dim = self.attention_head_dim or d // self.num_attention_heads
        else:  # other tools divide by these
            self.num_attention_heads = self.num_attention_heads or self.num_heads
            self.num_key_value_heads = self.num_key_value_heads or self.num_key_heads
        if self.intermediate_size is None:
            self.intermediate_size = 0 if first == "mamba2" else -(-8 * d // 3 // 64) * 64

    def _check_sizes(self) -> None:
        for name in ("intermediate_size", "conv_size", "loss_chunk"):
            _check_count(name, getattr(self, name), least=0)
        if self.conv_size == 1:
            raise ValueError("conv_size must be 0 (no convolution) or at least 2, got 1")
        if any(memory is not None for _, memory in self.kinds()):
            self._check_linear()
        for name in ("num_attention_heads", "num_key_value_heads"):
            _check_count(name, getattr(self, name))
        if any(backbone == "softmax" for backbone, _ in self.kinds()):
            self._check_softmax()
        for name in ("slots", "levels", "window", "slot_rank"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.dynamic:
            check_rules(Rules(self.tau, self.capacity, self.merge, self.score, self.block))  # type: ignore[arg-type]
        elif self.routed:
            raise ValueError('routed=True needs memory="dynamic" in some layer')
        check_choice("sharpness", self.sharpness, SHARPNESSES)
        if self.sharpness != "head" and not self.routed:
            raise ValueError(f'sharpness="{self.sharpness}" is of routed reads: it needs routed=True')
        if self.state_dtype is not None:
            check_choice("state_dtype", self.state_dtype, ("float32", "bfloat16"))
            if self.capacity is None:
                raise ValueError(f"state_dtype={self.state_dtype!r} needs a capacity, which is None")
        if not (math.isfinite(self.sharpness_start) and self.sharpness_start > 0):
            raise ValueError(f"sharpness_start must be a finite number > 0, got {self.sharpness_start}")
        check_temperature(self.temperature, carries_state=False)
        self._check_matrices()

    def _check_matrices(self) -> None:
        """Refuse matrices larger than any machine's memory; the widest map of a layer has so many rows."""
        heads = max(self.num_heads, self.num_key_heads) * max(self.head_k_dim, self.head_v_dim)
        softmax = self.num_attention_heads * self.attention_head_dim
        slots = self.num_heads * max(self.slot_width if self.dynamic else 0, self.level_width)
        rows = max(self.vocab_size, self.intermediate_size or 0, heads, softmax, slots)
        if self.hidden_size * rows > LARGEST_MATRIX or heads * self.conv_size > LARGEST_MATRIX:
            raise ValueError(
                f"the sizes make matrices of hidden_size={self.hidden_size} times {rows} numbers, "
                f"where {LARGEST_MATRIX} are the most"
            )

    def _check_linear(self) -> None:
        for name in ("num_heads", "num_key_heads", "head_k_dim", "head_v_dim", "norm_groups"):
            _check_count(name, getattr(self, name))
        if self.num_heads % self.num_key_heads:
            raise ValueError(f"num_key_heads={self.num_key_heads} must divide num_heads={self.num_heads}")
        width = self.num_heads * self.head_v_dim
        if width % self.norm_groups:
            raise ValueError(f"norm_groups={self.norm_groups} must divide num_heads * head_v_dim = {width}")

    def _check_softmax(self) -> None:
        _check_count("attention_head_dim", self.attention_head_dim)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.attention_head_dim % 2:
            raise ValueError(f"attention_head_dim must be even (rotary positions), got {self.attention_head_dim}")


def check_saved(name: str | PathLike[str]) -> None:
    """Refuse the folder of a saved model whose config.json cannot be read, before anybody takes it for one."""
    file = Path(name) / "config.json"
    if not file.is_file():
        return  # a preset, or no model, which whoever looks for it says
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")


def check_tokens(name: str, value: object, several: bool = False) -> None:
    """Refuse what is no token id; ``several``: a list of them will do."""
    given = value if several and isinstance(value, list) else [value]
    if value is not None and not all(type(x) is int and 0 <= x <= LARGEST for x in given):
        wanted = "an integer >= 0, a list of them" if several else "an integer >= 0"
        raise ValueError(f"{name} must be {wanted} or None, got {shown(value)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _check_count(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {shown(value)}")


def _refuse_typos(kwargs: dict[str, Any]) -> None:
    """Unknown keys are other tools' business unless they look like one of ours, or would take a method's place."""
    own = [*(f.name for f in fields(DLAConfig)), "temperature"]
    for name in kwargs:
        taken = callable(getattr(DLAConfig, name, None)) or isinstance(DLAConfig.__dict__.get(name), property)
        if taken or name in PARTS:
            raise ValueError(f"{name} cannot be an option of DLAConfig, where the name means something else")
        near = difflib.get_close_matches(name, own, n=1, cutoff=0.85)
        if near:
            raise ValueError(f"{name} is not an option of DLAConfig; did you mean {near[0]}?")
