"""What a model is made of: a backbone and a memory for each layer, and their sizes."""

import difflib
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from transformers import PreTrainedConfig

from dla.models.auto_map import AUTO_MAP, is_ours, without_ours, write_code
from dla.names import check_choice
from dla.ops.rules import Merge, Score, SlotOrder
from dla.text import first_line
from dla.typed import SIZED, BadValueError, Count, Limit, NotNegative, OpenSize, Positive, Size, convert

Backbone = Literal["mamba2", "gated_deltanet", "deltanet", "linear", "softmax"]
Memory = Literal["single", "log_linear", "dynamic"]
BACKBONES: tuple[str, ...] = get_args(Backbone)
MEMORIES: tuple[str, ...] = get_args(Memory)
MOST_LAYERS = 10_000
LARGEST_MATRIX = 2**48  # numbers; beyond it torch cannot even count the bytes
PARTS = ("text_config", "text_encoder", "encoder", "decoder", "generator")  # of composite models, which these are not
# What transformers raises on values that it does not expect.
SURPRISES = (TypeError, AttributeError, KeyError, IndexError, OverflowError, RecursionError)
UNBOUNDED_SLOTS = 30  # the width of lam where there is no capacity

Depth = Annotated[Count, Limit(f"an integer <= {MOST_LAYERS}", lambda x: x <= MOST_LAYERS)]
ConvSize = Annotated[int, Limit("0 (no convolution) or at least 2", lambda x: x == 0 or x >= 2), SIZED]
Capacity = Annotated[int, Limit("an integer >= 2", lambda x: x >= 2), SIZED]
EndTokens = OpenSize | list[OpenSize] | None
Range = Annotated[tuple[float, float], Limit("two numbers, the least and the most", lambda x: 0 <= x[0] <= x[1])]


def _is_dtype(value: object) -> bool:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    return value is None or isinstance(found, torch.dtype)


# Fields of transformers, which takes them as they are and fails on them later.
THEIRS: dict[str, Any] = {
    "architectures": list[str] | None,
    "dtype": Annotated[Any, Limit('that of a tensor, such as "float32" or "bfloat16"', _is_dtype)],
    **dict.fromkeys(("id2label", "label2id"), dict | None),
    **dict.fromkeys(("problem_type", "transformers_version"), str | None),
    **dict.fromkeys(("output_hidden_states", "return_dict", "is_encoder_decoder"), bool | None),
    "chunk_size_feed_forward": int | None,
}


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
    attribute_map: ClassVar[dict[str, str]] = {"temperature": "gate_temperature"}

    backbone: Backbone = "mamba2"
    memory: Memory = "single"
    layers: list[str] | None = None

    vocab_size: Size = 32000
    hidden_size: Size = 768
    num_hidden_layers: Depth = 12
    intermediate_size: OpenSize | None = None
    max_position_embeddings: Size = 16384
    tie_word_embeddings: bool = False
    norm_eps: Positive = 1e-5
    initializer_range: NotNegative = 0.02
    residual_in_fp32: bool = False
    loss_chunk: OpenSize = 1024
    use_cache: bool = True
    pad_token_id: OpenSize | None = None
    bos_token_id: OpenSize | None = None
    eos_token_id: EndTokens = None

    num_heads: OpenSize = 0
    num_key_heads: OpenSize = 0
    head_k_dim: OpenSize = 0
    head_v_dim: OpenSize = 0
    conv_size: ConvSize = 4
    conv_bias: bool | None = None
    projection_bias: bool = False
    norm_groups: Size = 1
    output_gate: bool = True
    allow_neg_eigval: bool = False
    feature_map: Literal["identity", "learned"] = "identity"
    time_step_limit: Range = (0.0, float("inf"))

    num_attention_heads: OpenSize = 0
    num_key_value_heads: OpenSize = 0
    attention_head_dim: OpenSize = 0
    rope_theta: Positive = 500000.0
    window: Size | None = None

    capacity: Capacity | None = 30
    tau: NotNegative = 0.6
    merge: Merge = "density"
    score: Score = "token"
    slot_order: SlotOrder = "chronological"
    block: Size | None = None
    gate_temperature: Positive | None = None  # `temperature`, under a name that generate() does not take for its own
    routed: bool = False
    sharpness: Literal["head", "token"] = "head"
    sharpness_start: Positive = 4.0
    state_dtype: Literal["float32", "bfloat16"] | None = None
    slots: Size | None = None
    levels: Size | None = None
    slot_bias: bool = False
    slot_rank: Size | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.gate_temperature = kwargs.pop("temperature", self.gate_temperature)
        if auto_map := without_ours(kwargs.pop("auto_map", None)):
            kwargs["auto_map"] = auto_map
        _refuse_typos(kwargs)
        for name, kind in {**OPTIONS, **THEIRS}.items():
            convert(name.removeprefix("gate_"), getattr(self, name), kind)
        self._check_layers()
        self._fill_sizes()
        self._check_sizes()
        try:
            super().__post_init__(**kwargs)
        except SURPRISES as error:
            raise ValueError(f"transformers cannot take the configuration: {first_line(error)}") from error

    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], *args: Any, **options: Any) -> "DLAConfig":
        """As transformers', but what is wrong with config.json is a ValueError of one line that names the file."""
        try:
            made: DLAConfig = super().from_pretrained(name, *args, **options)
        except (ValueError, *SURPRISES) as error:
            raise ValueError(f"{Path(name) / 'config.json'}: {first_line(error)}") from error
        return made

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **options: Any) -> None:
        """As transformers', with the file beside it that config.json names in its auto_map."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_code(folder)
        super().save_pretrained(save_directory, *args, **options)

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written to config.json."""
        theirs = getattr(self, "auto_map", None)
        return {**super().to_diff_dict(), "auto_map": {**AUTO_MAP, **(theirs if isinstance(theirs, dict) else {})}}

    @classmethod
    def register_for_auto_class(cls, *args: Any, **options: Any) -> None:
        if not is_ours(cls):
            super().register_for_auto_class(*args, **options)

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

    def _check_layers(self) -> None:
        if self.layers is None:
            if self.backbone == "softmax" and self.memory != "single":
                raise ValueError(
                    f'memory="{self.memory}" needs a linear backbone ({", ".join(BACKBONES[:-1])}); '
                    'backbone="softmax" keeps all keys and values and goes with memory="single"'
                )
            return
        if not self.layers:
            raise BadValueError("layers", 'a list of "backbone" or "backbone:memory"', self.layers)
        if self.num_hidden_layers % len(self.layers):
            raise ValueError(
                f"layers has {len(self.layers)} entries, which must divide num_hidden_layers={self.num_hidden_layers}"
            )
        for entry in self.layers:
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
        backbones, memories = zip(*self.kinds(), strict=True)
        if set(memories) != {None}:
            self._check_divides("num_key_heads", "num_heads=", self.num_heads)
            self._check_divides("norm_groups", "num_heads * head_v_dim = ", self.num_heads * self.head_v_dim)
        if "softmax" in backbones:
            self._check_divides("num_key_value_heads", "num_attention_heads=", self.num_attention_heads)
            if self.attention_head_dim % 2 or not self.attention_head_dim:
                even = "even (rotary positions) and at least 2"
                raise BadValueError("attention_head_dim", even, self.attention_head_dim)
        if self.routed and not self.dynamic:
            raise ValueError('routed=True needs memory="dynamic" in some layer')
        if self.sharpness != "head" and not self.routed:
            raise ValueError(f'sharpness="{self.sharpness}" is of routed reads: it needs routed=True')
        if self.state_dtype is not None and self.capacity is None:
            raise ValueError(f"state_dtype={self.state_dtype!r} needs a capacity, which is None")
        self._check_matrices()

    def _check_divides(self, name: str, whole: str, size: int) -> None:
        if size % getattr(self, name):
            raise ValueError(f"{name}={getattr(self, name)} must divide {whole}{size}")

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


# The options by name, and what each may be.
OPTIONS: dict[str, Any] = {f.name: f.type for f in fields(DLAConfig) if f.name in DLAConfig.__annotations__}


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
