"""Models with a name: the shapes of the literature, and small ones for a CPU."""

from typing import Any

from dla.choices import spelled_out
from dla.models.config import DLAConfig
from dla.names import check_choice

_LARGE = {"initializer_range": 0.006, "max_position_embeddings": 16384}
_UNTIED = {"vocab_size": 32000, "tie_word_embeddings": False}
_BYTES = {"vocab_size": 256, "tie_word_embeddings": True}

# The norms' eps are those of the models these shapes come from.
_MAMBA2 = {"backbone": "mamba2", "norm_eps": 1e-5, "num_key_heads": 1, "conv_size": 4, "conv_bias": True}
_GDN = {"backbone": "gated_deltanet", "norm_eps": 1e-6, "conv_size": 4, "conv_bias": False, "output_gate": True}
_DELTANET = {**_GDN, "backbone": "deltanet"}
_LINEAR = {**_GDN, "backbone": "linear"}
_SOFTMAX = {"backbone": "softmax", "norm_eps": 1e-6, "rope_theta": 500000.0}

_MAMBA2_WIDE = {"hidden_size": 1536, "num_heads": 48, "head_k_dim": 128, "head_v_dim": 64}


def _shape(layers: int, width: int, mlp: int) -> dict[str, int]:
    return {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": mlp}


def _heads(heads: int, dk: int, dv: int) -> dict[str, int]:
    return {"num_heads": heads, "head_k_dim": dk, "head_v_dim": dv}


# Shapes of the small models: about a million parameters (tiny) or ten (mini) with one state a head, in every backbone.
_TINY = {**_BYTES, **_shape(4, 128, 320), **_heads(4, 32, 64)}
_MINI = {**_BYTES, **_shape(6, 384, 768), **_heads(4, 64, 128)}

PRESETS: dict[str, dict[str, Any]] = {
    "mamba2-780m": {
        **_LARGE,
        **_MAMBA2,
        **_shape(48, 1536, 0),
        **_MAMBA2_WIDE,
        "vocab_size": 50288,
        "tie_word_embeddings": True,
        "residual_in_fp32": True,
    },
    "mamba2-802m": {**_LARGE, **_UNTIED, **_MAMBA2, **_shape(21, 1536, 4096), **_MAMBA2_WIDE},
    "gdn-1.3b": {**_LARGE, **_UNTIED, **_GDN, **_shape(21, 2048, 5632), **_heads(6, 256, 512)},
    "gdn-793m": {**_LARGE, **_UNTIED, **_GDN, **_shape(21, 1536, 4096), **_heads(6, 192, 384)},
    "transformer-778m": {**_LARGE, **_UNTIED, **_SOFTMAX, **_shape(24, 1536, 4096), "num_attention_heads": 16},
    "mamba2-tiny": {**_BYTES, **_MAMBA2, **_shape(4, 192, 0), **_heads(12, 32, 32)},
    "gdn-tiny": {**_TINY, **_GDN},
    "deltanet-tiny": {**_TINY, **_DELTANET},
    "linear-tiny": {**_TINY, **_LINEAR},
    "transformer-tiny": {**_BYTES, **_SOFTMAX, **_shape(4, 128, 448), "num_attention_heads": 4},
    "mamba2-mini": {**_BYTES, **_MAMBA2, **_shape(10, 384, 0), **_heads(12, 64, 64)},
    "gdn-mini": {**_MINI, **_GDN},
    "deltanet-mini": {**_MINI, **_DELTANET},
    "linear-mini": {**_MINI, **_LINEAR},
    "transformer-mini": {**_BYTES, **_SOFTMAX, **_shape(6, 384, 896), "num_attention_heads": 6},
}


def preset(name: str, memory: str = "single", **overrides: Any) -> DLAConfig:
    """The configuration of a named model with the given memory.

    Args:
        name: one of ``PRESETS``.
        memory: "single", "log_linear", "dynamic", or one of ``CONFIGURATIONS`` ("paper", "recommended"), whose other
            options then hold as well; softmax models take "single" only.
        overrides: any option of ``DLAConfig`` that is to differ from the preset.
    """
    check_choice("preset", name, PRESETS)
    return DLAConfig(**{**PRESETS[name], **spelled_out({"memory": memory, **overrides})})
