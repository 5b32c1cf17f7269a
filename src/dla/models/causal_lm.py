"""The language model, as a Hugging Face model."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple

from dla.models.cache import NO_ROLLBACK, DLACache
from dla.models.config import DLAConfig
from dla.models.loss import next_token_targets, token_loss, token_losses
from dla.models.model import DLAModel, DLAPreTrainedModel, packing_of
from dla.names import check_choice

if TYPE_CHECKING:
    from dla.models.card import History


class DLAForCausalLM(DLAPreTrainedModel, GenerationMixin):
    """The language model: ``DLAModel`` with an output head, a loss and ``generate()``."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012 (transformers' own form)

    def __init__(self, config: DLAConfig) -> None:
        super().__init__(config)
        self.model = DLAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def save_pretrained(
        self,
        save_directory: str | PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        training: "History | None" = None,
        license: str | None = None,
        **options: Any,
    ) -> None:
        """As transformers', with a model card (``write_card``) of what is known: the training, the license."""
        from dla.models.card import write_card

        super().save_pretrained(save_directory, is_main_process, *args, **options)
        adapters_alone = getattr(self, "_hf_peft_config_loaded", False)
        if is_main_process and not adapters_alone:
            write_card(Path(save_directory), self.config, training=training, license=license)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DLACache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        loss_reduction: str = "mean",
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, vocab] and, with ``labels`` [B, T], the mean loss of predicting each sequence's next token.

        Args:
            attention_mask: [B, T] (or longer, with the past); zeros are padding, anywhere, and change nothing.
            position_ids: [B or 1, T]; a sequence begins wherever they are 0 (packing).
            cu_seqlens: [0, ..., T], the ends of sequences packed in a batch of one.
            labels: like ``input_ids``, -100 where nothing is to be predicted. While training the logits are not kept
                (``logits`` is None) unless the config says ``loss_chunk=0``.
            logits_to_keep: only the last so many positions, or the positions given; 0 for all.
            loss_reduction: "mean", or "none" for the loss of every token [B, T], without logits.
            shift_labels, num_items_in_batch (in ``kwargs``): what each token itself is to predict [B, T], instead of
                ``labels``; what the loss is divided by, instead of the number of its tokens.
        """
        check_choice("loss_reduction", loss_reduction, ("mean", "none"))
        packing = packing_of(
            input_ids, inputs_embeds, attention_mask, position_ids, cu_seqlens, past_key_values, self.config
        )
        outputs = self.model(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            packing=packing,
            return_dict=True,
        )
        hidden, loss, logits = outputs.last_hidden_state, None, None
        targets = None if labels is None else next_token_targets(labels, packing)
        if (shifted := kwargs.get("shift_labels")) is not None:
            targets = packing.pack(shifted)
        if targets is not None:
            chunk = self.config.loss_chunk or max(targets.numel(), 1)
            packed = packing.pack(hidden)
            if loss_reduction == "none":
                loss = packing.unpack(token_losses(self.lm_head, packed, targets, chunk))
            else:
                loss = token_loss(self.lm_head, packed, targets, chunk, kwargs.get("num_items_in_batch"))
        if loss is None or (loss_reduction != "none" and not (self.training and self.config.loss_chunk)):
            logits = self.lm_head(slice_logits_to_keep(hidden, logits_to_keep))
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """generate() starts from an empty DLACache, or from the one it is given."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f'cache_implementation="{generation_config.cache_implementation}" is not available: '
                "DLA models keep their memory in a DLACache; leave it at None"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache:
            model_kwargs["past_key_values"] = DLACache(self.config.num_hidden_layers)

    def _validate_generation_mode(self, generation_mode: Any, *args: Any, **kwargs: Any) -> None:
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            raise ValueError(f"assisted and prompt-lookup decoding are not available: {NO_ROLLBACK}")
        super()._validate_generation_mode(generation_mode, *args, **kwargs)
