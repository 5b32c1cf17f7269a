"""The model without its output head, as a Hugging Face model."""

from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple, logging

from dla.layers.call import Call
from dla.layers.fused.program import Program, decoded
from dla.layers.memory import DynamicMemory
from dla.layers.mixer import LinearMixer
from dla.layers.mlp import SwiGLU
from dla.layers.norms import RMSNorm
from dla.layers.packing import Packing, find_packing
from dla.machine import ensure_half_precision
from dla.models.auto_map import is_ours
from dla.models.build import make_mixer
from dla.models.cache import DLACache, LayerCache, check_cache
from dla.models.config import DLAConfig
from dla.ops.checks import check_rules, check_state_dtype, check_temperature
from dla.ops.rules import Rules

logger = logging.get_logger(__name__)


class DLABlock(GradientCheckpointingLayer):
    """A mixer and, where the model has them, a SwiGLU, each behind a norm and beside the residual stream."""

    def __init__(self, config: DLAConfig, layer: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = make_mixer(config, layer)
        self.mlp: SwiGLU | None = None
        if config.intermediate_size:
            self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, hidden: Tensor, call: Call) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]"""
        if (next_hidden := decoded(self, hidden, call)) is not None:
            return next_hidden
        hidden = hidden + self.mixer(self.norm(hidden), call)
        if self.mlp is not None:
            hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return hidden

    def decoding(self, program: Program, x: Tensor, past: LayerCache) -> None:
        """``forward`` for one token of every sequence, as pieces of a program."""
        assert isinstance(self.mixer, LinearMixer)
        x = self.mixer.decoding(program, program.norm(self.norm, x), past, plus=x)
        if self.mlp is not None:
            self.mlp.decoding(program, program.norm(self.mlp_norm, x), plus=x)


class DLAPreTrainedModel(PreTrainedModel):
    config_class = DLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DLABlock"]  # noqa: RUF012 (transformers' own form)
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        r"A_log$",
        r"mixer\.D$",
        r"dt_bias$",
        r"slots\.(L|B|bias)$",
        r"sharpness$",
    ]
    _supports_sdpa = True
    _is_stateful = True

    config: DLAConfig

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **options: Any) -> Any:
        """As transformers', but weights that are missing or do not fit are refused, not drawn at random.

        Unless ``config`` asks for another model than the saved one, whose new weights then start as usual.
        """
        wants_info = options.pop("output_loading_info", False)
        try:
            model, info = super().from_pretrained(name, *args, output_loading_info=True, **options)
        except SafetensorError as error:
            raise ValueError(f"the weights of {name} cannot be read: {error}") from error
        missing = sorted(info["missing_keys"]) if cls._is_saved_as(name, options.get("config")) else []
        if not options.get("ignore_mismatched_sizes"):
            missing += sorted(f"{entry[0]} (of another shape)" for entry in info["mismatched_keys"])
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise ValueError(f"the weights of {name} lack {', '.join(missing[:8])}{more}")
        return (model, info) if wants_info else model

    @classmethod
    def register_for_auto_class(cls, *args: Any, **options: Any) -> None:
        if not is_ours(cls):
            super().register_for_auto_class(*args, **options)

    @staticmethod
    def _is_saved_as(name: Any, config: Any) -> bool:
        """Whether ``config`` (None: the saved one) describes the model that was saved."""
        if not isinstance(config, DLAConfig):
            return True
        own = DLAConfig.from_pretrained(name)
        return all(getattr(own, field) == getattr(config, field) for field in DLAConfig.__annotations__)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            super()._init_weights(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    def set_memory(
        self, *, tau: float | None = None, capacity: int | None = None, state_dtype: str | None = None
    ) -> None:
        """Another threshold, memory budget or dtype of states for the dynamic layers, from the next call on.

        The width of lam stays; states past it use its last column. A cache goes on if its states fit the new capacity.
        """
        memories = [module for module in self.modules() if isinstance(module, DynamicMemory)]
        if not memories:
            raise ValueError(f'set_memory changes memory="dynamic", but the model has memory="{self.config.memory}"')
        config = self.config
        if config.capacity is None and capacity is not None:
            raise ValueError("capacity cannot be set on a model with capacity=None, whose states are never merged")
        tau = config.tau if tau is None else tau
        capacity = config.capacity if capacity is None else capacity
        check_rules(Rules(tau, capacity))
        state_dtype = config.state_dtype if state_dtype is None else state_dtype
        held: Any = None if state_dtype is None else getattr(torch, state_dtype, state_dtype)
        check_state_dtype(held, capacity, None)
        config.slots, config.tau, config.capacity = config.slot_width, tau, capacity
        config.state_dtype = state_dtype  # type: ignore[assignment]  # checked above
        for memory in memories:
            memory.rules.update(tau=tau, capacity=capacity)
            memory.state_dtype = held

    def set_temperature(self, temperature: float | None) -> None:
        """The soft gate's temperature for training; None for the hard gate."""
        check_temperature(temperature, carries_state=False)
        self.config.temperature = temperature
        for module in self.modules():
            if isinstance(module, DynamicMemory):
                module.temperature = temperature


class DLAModel(DLAPreTrainedModel):
    """Embeddings, blocks and a last norm."""

    def __init__(self, config: DLAConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DLABlock(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DLACache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        packing: Packing | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The hidden states [B, T, hidden] of ``input_ids`` [B, T] or ``inputs_embeds`` [B, T, hidden].

        The arguments are those of ``DLAForCausalLM``; ``packing`` is what follows from them, if it is known already.
        """
        if packing is None:
            packing = packing_of(
                input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, past_key_values, self.config
            )
        cache = self._cache(past_key_values, use_cache, packing)
        all_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        x, steps = self._run(packing.pack(self.embed(input_ids, inputs_embeds)), packing, cache, bool(all_hidden))
        return BaseModelOutputWithPast(
            last_hidden_state=packing.unpack(x),
            past_key_values=cache,
            hidden_states=tuple(packing.unpack(h) for h in steps) if all_hidden else None,
        )

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None = None) -> Tensor:
        """What the first block takes of tokens [B, T] or embeddings: [B, T, hidden] in the residual stream's dtype."""
        try:
            x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        except IndexError as error:  # torch's, on a CPU, where it looks at every token anyway
            if input_ids is not None and (said := unknown_token(input_ids, self.config.vocab_size)):
                raise ValueError(said) from error
            raise
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            autocast = torch.is_autocast_enabled("cpu")
            ensure_half_precision(torch.get_autocast_dtype("cpu") if autocast else self.embeddings.weight.dtype)
        return x.float() if self.config.residual_in_fp32 and x.dtype != torch.float64 else x

    def _cache(self, past: DLACache | None, use_cache: bool | None, packing: Packing) -> DLACache | None:
        if use_cache is False and past is not None:
            raise ValueError("use_cache=False cannot go on from past_key_values; leave use_cache out, or pass a clone")
        if not (use_cache or past is not None or (use_cache is None and self.config.use_cache and not self.training)):
            return None
        soft = self.config.dynamic and self.config.temperature is not None
        if self.training and (self.gradient_checkpointing or soft):
            if past is not None:
                raise ValueError(
                    "past_key_values cannot be used while training with gradient checkpointing or a soft gate"
                )
            logger.warning_once("No cache is kept while training with gradient checkpointing or a soft gate.")
            return None
        if not packing.rows:
            if use_cache:
                raise ValueError("use_cache=True needs one sequence a row; a packed batch has several")
            return None
        return DLACache(len(self.layers)) if past is None else past

    def _run(
        self, x: Tensor, packing: Packing, cache: DLACache | None, all_hidden: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """All blocks and the last norm on embedded, packed tokens: hidden states, and those of every step if asked."""
        steps = [x]
        recomputes = self.gradient_checkpointing and self.training
        for i, block in enumerate(self.layers):
            past = None if cache is None else cache.layers[i]
            x = block(x, Call(packing, past, notes={} if recomputes else None))
            steps = [*steps, x] if all_hidden else steps
        if cache is not None:
            cache.advance(packing.time)
        x = self.norm(x)
        return x, [*steps[:-1], x]


def unknown_token(input_ids: Tensor, vocab_size: int) -> str:
    """What to say of the first token that is not in the vocabulary; "" if there is none."""
    for place in ((input_ids < 0) | (input_ids >= vocab_size)).nonzero().tolist():
        token = int(input_ids[tuple(place)])
        return f"input_ids must be from 0 to {vocab_size - 1} (vocab_size={vocab_size}), got {token} at {place}"
    return ""


def packing_of(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    past: DLACache | None,
    config: DLAConfig,
) -> Packing:
    """Where the sequences lie in a model's inputs, which are checked on the way."""
    given = inputs_embeds if input_ids is None else input_ids
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError("pass either input_ids or inputs_embeds (one of the two)")
    batch, time = given.shape[:2]
    if past is not None:
        check_cache(past, config, batch)
    continues = past is not None and past.get_seq_length() > 0
    return find_packing(batch, time, attention_mask, position_ids, cu_seqlens, continues)
