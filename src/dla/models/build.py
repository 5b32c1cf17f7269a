"""From a configuration to the mixer and the memory of a layer."""

from torch import nn

from dla import layers
from dla.models.config import DLAConfig

MIXERS = {
    "mamba2": layers.Mamba2,
    "gated_deltanet": layers.GatedDeltaNet,
    "deltanet": layers.DeltaNet,
    "linear": layers.Linear,
}
SHARED = ("head_k_dim", "head_v_dim", "conv_size", "conv_bias", "norm_eps", "feature_map")
OWN = {
    "mamba2": ("projection_bias", "norm_groups", "time_step_limit"),
    "gated_deltanet": ("output_gate", "allow_neg_eigval"),
    "deltanet": ("output_gate", "allow_neg_eigval"),
    "linear": ("output_gate",),
}


def make_mixer(config: DLAConfig, layer: int) -> nn.Module:
    """The mixer of a layer, with its memory."""
    backbone, memory = config.kinds()[layer]
    if memory is None:
        return layers.Attention(
            config.hidden_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            head_dim=config.attention_head_dim,
            rope_theta=config.rope_theta,
            window=config.window,
        )
    options = {name: getattr(config, name) for name in (*SHARED, *OWN[backbone])}
    heads, key_heads = config.num_heads, config.num_key_heads
    return MIXERS[backbone](
        config.hidden_size, make_memory(config, memory), heads=heads, key_heads=key_heads, **options
    )


def make_memory(config: DLAConfig, kind: str) -> layers.Memory:
    """A memory for the layers' heads."""
    heads = config.num_heads
    if kind == "single":
        return layers.SingleMemory()
    if kind == "log_linear":
        return layers.LogLinearMemory(config.hidden_size, heads, config.level_width, config.slot_bias)
    reads = ("slot_bias", "slot_rank", "routed", "sharpness", "sharpness_start", "temperature", "slot_order")
    chosen = {name: getattr(config, name) for name in (*reads, "state_dtype", *layers.DynamicMemory.rule_names)}
    return layers.DynamicMemory(config.hidden_size, heads, width=config.slot_width, **chosen)
