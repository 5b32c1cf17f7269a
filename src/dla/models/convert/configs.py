"""The configurations of others, read as ours and written from ours.

Where a configuration leaves something out, it means its own project's default. What we do not have is refused.
"""

import math
from collections.abc import Mapping
from typing import Any

from dla.models.config import DLAConfig, Range
from dla.report import shown
from dla.typed import Finite, OpenSize, Size, convert

Config = dict[str, Any]
Options = dict[str, tuple[str, Any]]  # our name -> theirs and their default, of the type that it must have
NO_LIMIT = (0.0, math.inf)  # everybody's default for the range of the time step

STATE_SPACES: Options = {
    "hidden_size": ("d_model", 2560),
    "num_hidden_layers": ("n_layer", 64),
    "tie_word_embeddings": ("tie_embeddings", True),
    "residual_in_fp32": ("residual_in_fp32", True),
}
STATE_SPACES_SSM: Options = {
    "num_key_heads": ("ngroups", 1),
    "head_k_dim": ("d_state", 128),
    "head_v_dim": ("headdim", 64),
    "conv_size": ("d_conv", 4),
    "conv_bias": ("conv_bias", True),
    "projection_bias": ("bias", False),
}
STATE_SPACES_FIXED = {"rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False}
# options that only matter at the start of training or for speed
STATE_SPACES_IDLE = {"conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor", "chunk_size", "use_mem_eff_path"}
STATE_SPACES_EPS = 1e-5  # of every norm, which their configuration cannot change
STATE_SPACES_MULTIPLE = 128  # their MLP's width is rounded up to a multiple of it

TRANSFORMERS: Options = {
    "hidden_size": ("hidden_size", 4096),
    "num_hidden_layers": ("num_hidden_layers", 64),
    "vocab_size": ("vocab_size", 32768),
    "num_heads": ("num_heads", 128),
    "num_key_heads": ("n_groups", 8),
    "head_k_dim": ("state_size", 128),
    "head_v_dim": ("head_dim", 64),
    "conv_size": ("conv_kernel", 4),
    "conv_bias": ("use_conv_bias", True),
    "projection_bias": ("use_bias", False),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "residual_in_fp32": ("residual_in_fp32", True),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "initializer_range": ("initializer_range", 0.1),
    "use_cache": ("use_cache", True),
    "max_position_embeddings": ("max_position_embeddings", DLAConfig.max_position_embeddings),
}
TRANSFORMERS_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

FLA: Options = {
    "hidden_size": ("hidden_size", 2048),
    "num_hidden_layers": ("num_hidden_layers", 21),
    "vocab_size": ("vocab_size", 32000),
    "num_key_heads": ("num_heads", 6),
    "head_k_dim": ("head_dim", 256),
    "output_gate": ("use_gate", True),
    "allow_neg_eigval": ("allow_neg_eigval", False),
    "norm_eps": ("norm_eps", 1e-6),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "initializer_range": ("initializer_range", 0.02),
    "use_cache": ("use_cache", True),
    "max_position_embeddings": ("max_position_embeddings", 2048),
}
FLA_TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}


def read_state_spaces(config: Config) -> DLAConfig:
    ssm = _typed(config, "ssm_cfg", {})
    _check_state_spaces(config, ssm)
    options = _read(config, STATE_SPACES) | _read(ssm, STATE_SPACES_SSM)
    inner = _typed(ssm, "expand", 2) * options["hidden_size"]
    if inner % options["head_v_dim"]:
        raise ValueError(f"headdim={options['head_v_dim']} must divide expand * d_model = {inner}")
    if ssm.get("d_ssm") not in (None, inner):
        _refuse("ssm_cfg.d_ssm", ssm["d_ssm"], f"the state space must span the whole inner width, {inner}")
    vocabulary, multiple = _typed(config, "vocab_size", 50277), _typed(config, "pad_vocab_size_multiple", 8)
    return DLAConfig(
        backbone="mamba2",
        **options,
        vocab_size=_rounded(vocabulary, multiple),
        intermediate_size=_rounded(_typed(config, "d_intermediate", 0), STATE_SPACES_MULTIPLE),
        num_heads=inner // options["head_v_dim"],
        norm_groups=options["num_key_heads"],
        norm_eps=STATE_SPACES_EPS,
        time_step_limit=[*convert("dt_limit", ssm.get("dt_limit", NO_LIMIT), Range)],
    )


def _check_state_spaces(config: Config, ssm: Config) -> None:
    layer = ssm.get("layer", "Mamba1")
    if layer != "Mamba2":
        _refuse("ssm_cfg.layer", layer, 'of their layers only "Mamba2" is')
    if config.get("attn_layer_idx"):
        _refuse("attn_layer_idx", config["attn_layer_idx"], "all layers must be Mamba2, none attention")
    if not _typed(config, "rms_norm", True):
        _refuse("rms_norm", False, "the layers' norms must be RMS norms")
    for name, needed in STATE_SPACES_FIXED.items():
        if _typed(ssm, name, needed) != needed:
            _refuse(f"ssm_cfg.{name}", ssm[name], f"it must be {needed}")
    known = {theirs for theirs, _ in STATE_SPACES_SSM.values()} | {"layer", "expand", "d_ssm", "dt_limit"}
    known |= STATE_SPACES_IDLE | STATE_SPACES_FIXED.keys()
    for name in sorted(ssm.keys() - known):
        _refuse(f"ssm_cfg.{name}", ssm[name], f"known options are {', '.join(sorted(known))}")


def write_state_spaces(config: DLAConfig) -> Config:
    to = "state-spaces"
    groups, mlp = f"norm_groups={config.num_key_heads}, the number of key heads", STATE_SPACES_MULTIPLE
    _need(to, config, "norm_eps", config.norm_eps == STATE_SPACES_EPS, f"{STATE_SPACES_EPS}, fixed in their code")
    _need(to, config, "norm_groups", config.norm_groups == config.num_key_heads, groups)
    _need(to, config, "conv_size", config.conv_size > 0, "a short convolution")
    _need(to, config, "intermediate_size", (config.intermediate_size or 0) % mlp == 0, f"a multiple of {mlp}")
    ssm = {"layer": "Mamba2", "expand": _expand(to, config), **_written(config, STATE_SPACES_SSM)}
    return {
        **_written(config, STATE_SPACES),
        "vocab_size": config.vocab_size,
        "pad_vocab_size_multiple": 1,  # vocab_size is the number of rows already
        "d_intermediate": config.intermediate_size,
        "ssm_cfg": ssm | _written_limits("dt_limit", config),
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "fused_add_norm": True,
    }


def read_transformers(config: Config) -> DLAConfig:
    _check_activation(config, "silu")
    options = _read(config, TRANSFORMERS)
    inner, outer = options["num_heads"] * options["head_v_dim"], _typed(config, "expand", 2) * options["hidden_size"]
    if inner != outer:
        raise ValueError(f"num_heads * head_dim = {inner} must equal expand * hidden_size = {outer}")
    return DLAConfig(
        backbone="mamba2",
        **options,
        **_tokens(config, TRANSFORMERS_TOKENS),
        intermediate_size=0,
        norm_groups=1,  # over the whole width, however many groups there are
        time_step_limit=[*convert("time_step_limit", config.get("time_step_limit", NO_LIMIT), Range)],
    )


def write_transformers(config: DLAConfig) -> Config:
    to = "transformers"
    _need(to, config, "norm_groups", config.norm_groups == 1, "1, as its norm spans the whole width")
    _need(to, config, "conv_size", config.conv_size > 0, "a short convolution")
    _need(to, config, "intermediate_size", config.intermediate_size == 0, "0, as its layers have no MLP")
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        **_written(config, TRANSFORMERS),
        "expand": _expand(to, config),
        "hidden_act": "silu",
        **_written_limits("time_step_limit", config),
        **_written_tokens(config),
    }


def read_fla(config: Config) -> DLAConfig:
    for name in ("attn", "attnres_block_size"):
        if config.get(name) is not None:
            _refuse(name, config[name], "all layers must be Gated DeltaNet with plain residuals, so it must be null")
    _check_activation(config, "swish")
    options = _read(config, FLA)
    expand = _typed(config, "expand_v", 2.0)
    value = options["head_k_dim"] * expand
    if not (math.isfinite(value) and value >= 1 and math.isclose(value, int(value), rel_tol=1e-5)):
        raise ValueError(f"expand_v={expand} times head_dim={options['head_k_dim']} must be a whole number")
    heads, width = (convert(name, config.get(name), Size | None) for name in ("num_v_heads", "intermediate_size"))
    ratio = 4 if config.get("hidden_ratio") is None else _typed(config, "hidden_ratio", 4.0)
    return DLAConfig(
        backbone="gated_deltanet",
        **options,
        **_tokens(config, FLA_TOKENS),
        num_heads=heads or options["num_key_heads"],
        head_v_dim=int(value),
        intermediate_size=width or _rounded(int(options["hidden_size"] * ratio * 2 / 3), 256),
        conv_size=_typed(config, "conv_size", 4) if _typed(config, "use_short_conv", True) else 0,
        conv_bias=False,
    )


def write_fla(config: DLAConfig) -> Config:
    to = "fla"
    _need(to, config, "intermediate_size", bool(config.intermediate_size), "an MLP in every layer")
    _need(to, config, "conv_bias", not (config.conv_bias and config.conv_size), "a convolution without bias")
    _need(to, config, "residual_in_fp32", not config.residual_in_fp32, "False, as it adds up in the weights' dtype")
    return {
        "architectures": ["GatedDeltaNetForCausalLM"],
        "model_type": "gated_deltanet",
        **_written(config, FLA),
        "num_v_heads": config.num_heads,
        "expand_v": expand_v(config.head_k_dim, config.head_v_dim),
        "use_short_conv": config.conv_size > 0,
        "conv_size": config.conv_size or 4,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "swish",
        "attn": None,
        **_written_tokens(config),
    }


def expand_v(key: int, value: int) -> float:
    """The number that ``key`` times, rounded down, is ``value``."""
    ratio = value / key
    while int(key * ratio) < value:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _read(config: Config, options: Options) -> Config:
    return {ours: _typed(config, theirs, default) for ours, (theirs, default) in options.items()}


def _typed(config: Config, name: str, default: Any) -> Any:
    """A value of its default's type: sizes of 1 and more, or of 0 where that is the default, and finite numbers."""
    kinds: dict[type, Any] = {int: Size if default else OpenSize, float: Finite}
    return convert(name, config.get(name, default), kinds.get(type(default), type(default)))


def _tokens(config: Config, defaults: Mapping[str, int | None]) -> Config:
    return {name: config.get(name, default) for name, default in defaults.items()}


def _rounded(value: int, multiple: int) -> int:
    """Up to a multiple."""
    return -(-value // multiple) * multiple


def _check_activation(config: Config, usual: str) -> None:
    if config.get("hidden_act", usual) not in ("silu", "swish"):
        _refuse("hidden_act", config["hidden_act"], f'it must be "{usual}"')


def _refuse(name: str, value: object, supported: str) -> None:
    raise ValueError(f"{name}={shown(value)} is not supported: {supported}")


def _written(config: DLAConfig, options: Options) -> Config:
    return {theirs: getattr(config, ours) for ours, (theirs, _) in options.items()}


def _written_limits(name: str, config: DLAConfig) -> Config:
    """Nothing where there is no limit: JSON has no infinity."""
    limits = list(config.time_step_limit)
    return {} if limits == list(NO_LIMIT) else {name: limits}


def _written_tokens(config: DLAConfig) -> Config:
    written = {name: getattr(config, name) for name in FLA_TOKENS}
    if config.dtype is not None:
        written["dtype"] = str(config.dtype).removeprefix("torch.")
    return written


def _expand(to: str, config: DLAConfig) -> int:
    inner, outer = config.num_heads * config.head_v_dim, config.hidden_size
    if inner % outer:
        raise ValueError(f'to="{to}" needs num_heads * head_v_dim = {inner} to be a multiple of hidden_size={outer}')
    return inner // outer


def _need(to: str, config: DLAConfig, name: str, met: bool, needed: str) -> None:
    if not met:
        raise ValueError(f'to="{to}" needs {needed}; the model has {name}={getattr(config, name)!r}')
