"""Checkpoints of others to ours and back: the same tensors, the same function, or a refusal that says why."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM

from dla.choices import CONFIGURATIONS
from dla.cli import main
from dla.models import DLAConfig, DLAForCausalLM
from dla.models.convert import convert, from_dla, to_dla, upgrade
from dla.models.convert.configs import expand_v
from tests.models.foreign import (
    Tensors,
    fla_config,
    fla_logits,
    fla_tensors,
    state_spaces_config,
    state_spaces_logits,
    state_spaces_tensors,
    write_fla,
    write_state_spaces,
)

TOKENS = torch.randint(0, 11, (2, 23), generator=torch.Generator().manual_seed(5))
SSM_OPTIONS = [
    {},
    {"tie_embeddings": False, "ssm_cfg": {"bias": True, "conv_bias": False}},
    {"d_intermediate": 100, "ssm_cfg": {"ngroups": 2, "dt_limit": [0.01, 0.9]}},
]
FLA_OPTIONS = [
    {},
    {"tie_word_embeddings": True, "use_gate": False, "num_v_heads": None, "allow_neg_eigval": True},
    {"use_short_conv": False, "intermediate_size": 24, "expand_v": 1.0},
]
MAMBA2_OPTIONS = [
    {},
    {"tie_word_embeddings": True, "use_bias": True},
    {"use_conv_bias": False, "time_step_limit": (0.01, 0.9), "layer_norm_epsilon": 1e-3},
    {"n_groups": 2},
]


def write_transformers(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Mamba2ForCausalLM:
    torch.manual_seed(3)
    sizes = {
        "hidden_size": 16,
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 4,
        "num_hidden_layers": 2,
        "vocab_size": 11,
    }
    config = Mamba2Config(**{**sizes, "n_groups": 1, "residual_in_fp32": False, "chunk_size": 8, **options})
    model = Mamba2ForCausalLM(config).to(dtype).eval()
    with torch.no_grad():  # away from the zeros and ones of a new model
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def read(folder: Path) -> Tensors:
    pickled = folder / "pytorch_model.bin"
    return torch.load(pickled, weights_only=True) if pickled.exists() else load_file(folder / "model.safetensors")


def assert_same(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def functional(config: DLAConfig | dict[str, Any]) -> dict[str, Any]:
    """A configuration without what is the library's note to itself."""
    values = config.to_dict() if isinstance(config, DLAConfig) else dict(config)
    values["time_step_limit"] = list(values["time_step_limit"])
    return {name: value for name, value in values.items() if name != "transformers_version"}


@torch.no_grad()
def logits(folder: Path, **options: Any) -> Tensor:
    model, report = DLAForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    made = model.eval()(TOKENS).logits
    assert isinstance(made, Tensor)
    return made


# There and back.


@pytest.mark.parametrize("options", SSM_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_state_spaces_there_and_back(tmp_path: Path, options: dict[str, Any], dtype: torch.dtype) -> None:
    config, tensors = write_state_spaces(tmp_path / "theirs", dtype, **options)
    ours = convert(tmp_path / "theirs", tmp_path / "ours")
    assert ours.vocab_size == 16 and ours.dtype == dtype
    assert ("lm_head.weight" in read(tmp_path / "ours")) != config["tie_embeddings"]
    back = convert(tmp_path / "ours", tmp_path / "back", to="state-spaces")
    assert_same(read(tmp_path / "back"), tensors)
    again = convert(tmp_path / "back", tmp_path / "again")
    assert functional(again) == functional(ours)
    assert_same(read(tmp_path / "again"), read(tmp_path / "ours"))
    # their own code would build the same model from what we wrote
    padded = {"vocab_size": 16, "pad_vocab_size_multiple": 1, "d_intermediate": 128 * bool(config["d_intermediate"])}
    usual = {"expand": 2, "d_conv": 4, "ngroups": 1, "bias": False, "conv_bias": True}
    assert back == {**config, **padded, "ssm_cfg": {**usual, **config["ssm_cfg"]}}


def test_what_tensors_share_is_written_once(tmp_path: Path) -> None:
    """The tied head and the embeddings; and of a large storage only the part that a tensor shows."""
    _, tensors = write_state_spaces(tmp_path / "theirs")
    name = "backbone.norm_f.weight"
    torch.save({**tensors, name: tensors[name].repeat(5000)[:16]}, tmp_path / "theirs" / "pytorch_model.bin")
    convert(tmp_path / "theirs", tmp_path / "back", to="state-spaces")
    back = read(tmp_path / "back")
    assert back["lm_head.weight"].data_ptr() == back["backbone.embedding.weight"].data_ptr()
    stored = sum(tensor.nbytes for name, tensor in back.items() if name != "lm_head.weight")
    assert (tmp_path / "back" / "pytorch_model.bin").stat().st_size < 2 * stored


@pytest.mark.parametrize("options", MAMBA2_OPTIONS)
def test_transformers_there_and_back(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = write_transformers(tmp_path / "theirs", torch.bfloat16, **options)
    ours = convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to="transformers")
    assert_same(read(tmp_path / "back"), read(tmp_path / "theirs"))
    back = Mamba2Config.from_pretrained(tmp_path / "back")
    wanted, got = theirs.config.to_dict(), back.to_dict()
    assert {name for name in wanted if got.get(name) != wanted[name]} <= {"transformers_version", "chunk_size"}
    again = convert(tmp_path / "back", tmp_path / "again")
    assert functional(again) == functional(ours)
    assert_same(read(tmp_path / "again"), read(tmp_path / "ours"))


@pytest.mark.parametrize("options", FLA_OPTIONS)
def test_fla_there_and_back(tmp_path: Path, options: dict[str, Any]) -> None:
    config, tensors = write_fla(tmp_path / "theirs", torch.bfloat16, **options)
    ours = convert(tmp_path / "theirs", tmp_path / "ours")
    back = convert(tmp_path / "ours", tmp_path / "back", to="fla")
    assert_same(read(tmp_path / "back"), tensors)
    settled = {"intermediate_size": config["intermediate_size"] or 256, "num_v_heads": config["num_v_heads"] or 2}
    ignored = {"attn_mode", "fuse_norm", "hidden_ratio"}
    assert {**back, **config, **settled} == {**back, **{name: config[name] for name in ignored}}
    again = convert(tmp_path / "back", tmp_path / "again")
    assert functional(again) == functional(ours)
    assert_same(read(tmp_path / "again"), read(tmp_path / "ours"))


def test_every_head_size_has_an_expand_v() -> None:
    pairs = [(key, value) for key in range(1, 150) for value in range(1, 300)]
    assert any(int(key * (value / key)) != value for key, value in pairs)
    assert all(int(key * expand_v(key, value)) == value for key, value in pairs)


def test_from_one_of_theirs_to_another(tmp_path: Path) -> None:
    _, tensors = write_state_spaces(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "other", to="transformers")
    model = Mamba2ForCausalLM.from_pretrained(tmp_path / "other").eval()
    with torch.no_grad():
        made = model(TOKENS).logits
    for row, tokens in zip(made, TOKENS, strict=True):
        torch.testing.assert_close(row.double(), state_spaces_logits(state_spaces_config(), tensors, tokens), **CLOSE)


# The same function.

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("options", MAMBA2_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_logits_of_transformers(tmp_path: Path, options: dict[str, Any], dtype: torch.dtype) -> None:
    theirs = write_transformers(tmp_path / "theirs", dtype, **options)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    convert(tmp_path / "theirs", tmp_path / "ours")
    made = logits(tmp_path / "ours")
    assert made.dtype == dtype
    torch.testing.assert_close(made.to(expected.dtype), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("options", SSM_OPTIONS)
def test_the_logits_of_state_spaces(tmp_path: Path, options: dict[str, Any]) -> None:
    config, tensors = write_state_spaces(tmp_path / "theirs", **options)
    convert(tmp_path / "theirs", tmp_path / "ours")
    for row, tokens in zip(logits(tmp_path / "ours"), TOKENS, strict=True):
        torch.testing.assert_close(row.double(), state_spaces_logits(config, tensors, tokens), **CLOSE)


@pytest.mark.parametrize("options", FLA_OPTIONS)
def test_the_logits_of_fla(tmp_path: Path, options: dict[str, Any]) -> None:
    config, tensors = write_fla(tmp_path / "theirs", **options)
    convert(tmp_path / "theirs", tmp_path / "ours")
    for row, tokens in zip(logits(tmp_path / "ours"), TOKENS, strict=True):
        torch.testing.assert_close(row.double(), fla_logits(config, tensors, tokens), **CLOSE)


# More memory.


@pytest.mark.parametrize("write", [write_state_spaces, write_fla, write_transformers])
@pytest.mark.parametrize(
    ("memory", "overrides"),
    [
        ("log_linear", {}),
        ("dynamic", {}),
        ("dynamic", {"capacity": 3, "tau": 0.2, "merge": "ward", "slots": 2}),
        ("dynamic", {"slot_rank": 2}),
    ],
)
def test_upgrades_compute_the_same(
    tmp_path: Path, write: Callable[..., Any], memory: str, overrides: dict[str, Any]
) -> None:
    write(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "single")
    config = convert(tmp_path / "theirs", tmp_path / "more", memory=memory, **overrides)
    assert config.memory == memory and config.slot_bias
    assert all(getattr(config, name) == value for name, value in overrides.items())
    single, more = read(tmp_path / "single"), read(tmp_path / "more")
    assert_same(single, {name: more[name] for name in single})
    assert {name.split(".mixer.")[1] for name in more.keys() - single.keys()} == {
        "memory.slots.proj.weight",
        "memory.slots.B" if "slot_rank" in overrides else "memory.slots.L",
        "memory.slots.bias",
    }
    torch.testing.assert_close(logits(tmp_path / "more"), logits(tmp_path / "single"), rtol=1e-5, atol=1e-5)
    # ours to ours, the same
    convert(tmp_path / "single", tmp_path / "again", memory=memory, **overrides)
    assert_same(read(tmp_path / "again"), more)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_upgrades_to_memories_with_a_name(tmp_path: Path, name: str) -> None:
    """The paper's computes the same; routed reads start so soft that the difference is small, and can be trained."""
    write_fla(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "single")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "more"), "--memory", name]) == 0
    config = DLAConfig.from_pretrained(tmp_path / "more")
    asked = {option: x for option, x in CONFIGURATIONS[name].items() if option != "sharpness_start"}
    assert {option: getattr(config, option) for option in asked} == asked
    single = logits(tmp_path / "single")
    torch.testing.assert_close(logits(tmp_path / "more"), single, rtol=0, atol=0.005 * float(single.abs().max()))
    model = DLAForCausalLM.from_pretrained(tmp_path / "more")
    model(TOKENS, labels=TOKENS).loss.backward()
    learned = [p.grad for part, p in model.named_parameters() if "sharpness" in part]
    assert all(grad.any() for grad in learned) and bool(learned) == config.routed
    copied = convert(tmp_path / "more", tmp_path / "copy", memory=name)
    assert copied.routed == config.routed


def test_upgraded_states_are_really_there(tmp_path: Path) -> None:
    """Weights other than 1 change the outcome, so the upgraded model does read several states."""
    write_fla(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "more", memory="dynamic", capacity=4, tau=0.1)
    model = DLAForCausalLM.from_pretrained(tmp_path / "more").eval()
    with torch.no_grad():
        before = model(TOKENS).logits
        for name, parameter in model.named_parameters():
            if name.endswith("slots.bias"):
                parameter[:, 1:] = -3
        assert (model(TOKENS).logits - before).abs().max() > 1e-2


def test_new_tensors_have_the_checkpoints_dtype_or_float32(tmp_path: Path) -> None:
    write_state_spaces(tmp_path / "theirs", torch.float16)
    convert(tmp_path / "theirs", tmp_path / "more", memory="dynamic")
    tensors = read(tmp_path / "more")
    slots = {name.split("slots.")[1]: tensor for name, tensor in tensors.items() if "layers.1.mixer.memory" in name}
    assert {name: tensor.dtype for name, tensor in slots.items()} == {
        "proj.weight": torch.float16,
        "L": torch.float32,
        "bias": torch.float32,
    }
    assert slots["L"].shape == slots["bias"].shape == (4, 30) and slots["proj.weight"].shape == (120, 16)
    assert torch.equal(torch.nn.functional.softplus(slots["bias"]), torch.ones(4, 30))
    assert not slots["proj.weight"].any() and torch.equal(slots["L"], torch.ones(4, 30))


def test_a_hybrid_is_upgraded_in_its_linear_layers() -> None:
    pattern = ["linear:single", "softmax", "deltanet"]
    config = DLAConfig(layers=pattern, hidden_size=16, num_hidden_layers=3, vocab_size=11, num_attention_heads=2)
    torch.manual_seed(0)
    model = DLAForCausalLM(config).eval()
    new, tensors = upgrade(config, model.state_dict(), "dynamic", capacity=4)
    assert new.kinds() == [("linear", "dynamic"), ("softmax", None), ("deltanet", "dynamic")]
    other = DLAForCausalLM(new).eval()
    other.load_state_dict(tensors)
    with torch.no_grad():
        torch.testing.assert_close(other(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_memory_that_is_there_already_stays(tmp_path: Path) -> None:
    write_state_spaces(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "more", memory="dynamic", capacity=5)
    config = convert(tmp_path / "more", tmp_path / "copy", memory="dynamic")
    assert config.capacity == 5
    assert_same(read(tmp_path / "copy"), read(tmp_path / "more"))
    for options, said in (
        ({"memory": "log_linear"}, "one state a head"),
        ({"memory": "single"}, "one state a head"),
        ({"memory": "dynamic", "capacity": 3}, "one state a head"),
        ({"to": "state-spaces"}, '"mamba2:dynamic"'),
    ):
        with pytest.raises(ValueError, match=said):
            convert(tmp_path / "more", tmp_path / "no", **options)
    assert not (tmp_path / "no").exists()


# Refusals.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ssm_cfg": {"layer": "Mamba1"}}, "ssm_cfg.layer='Mamba1'.*only \"Mamba2\""),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer='Mamba3'"),
        ({"ssm_cfg": {"norm_before_gate": True}}, "norm_before_gate=True"),
        ({"ssm_cfg": {"rmsnorm": False}}, "rmsnorm=False"),
        ({"ssm_cfg": {"D_has_hdim": True}}, "D_has_hdim=True"),
        ({"ssm_cfg": {"d_ssm": 16}}, "d_ssm=16.*32"),
        ({"ssm_cfg": {"new_trick": 1}}, "new_trick"),
        ({"ssm_cfg": {"headdim": 5}}, "headdim=5"),
        ({"ssm_cfg": {"headdim": 0}}, "headdim must be an integer >= 1, got 0"),
        ({"ssm_cfg": {"dt_limit": "ab"}}, "dt_limit must be a list of 2 numbers, got 'ab'"),
        ({"rms_norm": False}, "rms_norm=False"),
        ({"attn_layer_idx": [1]}, "attn_layer_idx"),
        ({"d_model": 10**10}, "d_model must be an integer <= 2147483647, got 10000000000"),
        ({"d_model": 10**9}, "matrices of hidden_size=1000000000 times"),
        ({"d_model": 10**400}, "d_model must be an integer <= 2147483647, got an integer that is too large"),
        ({"ssm_cfg": {"dt_limit": [0, 10**400]}}, r"dt_limit\[1] must be a number, got an integer that is too large"),
        ({"ssm_cfg": {"dt_limit": [True, 2.0]}}, r"dt_limit\[0] must be a number, got True"),
        ({"d_model": "wide"}, "d_model must be an integer >= 1, got 'wide'"),
        ({"tie_embeddings": 1}, "tie_embeddings must be true or false, got 1"),
        ({"n_layer": 3}, "3 layers, the weights have 2"),
        ({"n_layer": 1}, "has 1 layers, the weights have 2"),
        ({"model_type": "llama"}, "model_type='llama' cannot be converted"),
        ({"model_type": ["mamba2"]}, "cannot be converted"),
    ],
)
def test_state_spaces_options_we_do_not_have(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    write_state_spaces(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(state_spaces_config(**changes)))
    with pytest.raises(ValueError, match=said):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn": {"layers": [1]}}, "attn="),
        ({"attnres_block_size": 4}, "attnres_block_size=4"),
        ({"hidden_act": "powlu"}, "hidden_act='powlu'"),
        ({"expand_v": 1.3}, "expand_v=1.3"),
        ({"expand_v": float("inf")}, "expand_v must be a finite number, got inf"),
        ({"expand_v": 10**400}, "expand_v must be a finite number, got an integer that is too large"),
        ({"hidden_ratio": float("inf")}, "hidden_ratio must be a finite number, got inf"),
        ({"eos_token_id": 0.5}, "eos_token_id must be an integer >= 0 or a list of integers >= 0 or None, got 0.5"),
        ({"pad_token_id": "x"}, "pad_token_id must be an integer >= 0 or None"),
        ({"num_v_heads": 3}, "num_key_heads=2 must divide num_heads=3"),
        ({"num_v_heads": 0}, "num_v_heads must be an integer >= 1"),
        ({"intermediate_size": -1}, "intermediate_size must be an integer >= 1"),
    ],
)
def test_fla_options_we_do_not_have(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        to_dla(fla_config(**changes), fla_tensors(fla_config()))


def test_transformers_options_we_do_not_have(tmp_path: Path) -> None:
    theirs = write_transformers(tmp_path)
    for changes, said in (({"hidden_act": "gelu"}, "hidden_act"), ({"expand": 3}, "expand")):
        with pytest.raises(ValueError, match=said):
            to_dla({**theirs.config.to_dict(), **changes}, theirs.state_dict())


@pytest.mark.parametrize(
    ("to", "options", "said"),
    [
        ("fla", {}, 'holds layers of kind "gated_deltanet:single", the model has "mamba2:single"'),
        ("transformers", {"backbone": "gated_deltanet"}, 'the model has "gated_deltanet:single"'),
        ("transformers", {"memory": "dynamic"}, 'the model has "mamba2:dynamic"'),
        ("transformers", {"layers": ["mamba2", "softmax"]}, 'the model has "softmax"'),
        ("transformers", {"feature_map": "learned"}, "feature_map"),
        ("transformers", {"norm_groups": 2}, "norm_groups=2"),
        ("transformers", {"conv_size": 0}, "conv_size=0"),
        ("transformers", {"intermediate_size": 128}, "intermediate_size=128"),
        ("transformers", {"num_heads": 3}, "hidden_size=16"),
        ("state-spaces", {"norm_eps": 1e-6}, "norm_eps=1e-06"),
        ("state-spaces", {"num_key_heads": 2}, "norm_groups=1"),
        ("state-spaces", {"conv_size": 0}, "conv_size=0"),
        ("state-spaces", {"intermediate_size": 100}, "intermediate_size=100"),
        ("fla", {"backbone": "gated_deltanet", "intermediate_size": 0}, "intermediate_size=0"),
        ("fla", {"backbone": "gated_deltanet", "conv_bias": True}, "conv_bias=True"),
        ("fla", {"backbone": "gated_deltanet", "residual_in_fp32": True}, "residual_in_fp32=True"),
        ("gguf", {}, "to must be one of"),
    ],
)
def test_what_others_do_not_have(to: str, options: dict[str, Any], said: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 11, "num_heads": 4, "head_v_dim": 8}
    config = DLAConfig(**{**sizes, "head_k_dim": 4, "num_attention_heads": 2, **options})
    with pytest.raises(ValueError, match=said):
        from_dla(config, DLAForCausalLM(config).state_dict(), to)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "onnx"}, "to must be one of 'dla', 'state-spaces', 'transformers', 'fla', got 'onnx'"),
        ({"memory": "infinite"}, "memory must be one of"),
        ({"to": "transformers", "memory": "dynamic"}, 'memory="dynamic" needs to="dla"'),
        ({"capacity": 4}, "need memory="),
        ({"memory": "recomended"}, "'paper_equation', 'recommended', got 'recomended'; did you mean 'recommended'"),
        ({"memory": "dynamic", "norm_eps": 1.0}, "norm_eps cannot be given"),
        ({"memory": "dynamic", "slot_bias": False}, "slot_bias cannot be given"),
        ({"memory": "dynamic", "capacity": 1}, "capacity must be"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    write_state_spaces(tmp_path / "theirs")
    with pytest.raises(ValueError, match=said):
        convert(tmp_path / "theirs", tmp_path / "ours", **options)
    assert not (tmp_path / "ours").exists()


def spoil(tensors: Tensors, how: str) -> Tensors:
    name = "backbone.layers.1.mixer.in_proj.weight"
    if how == "missing":
        del tensors[name]
    elif how == "unexpected":
        tensors["backbone.layers.1.mixer.extra"] = torch.ones(2)
    elif how == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif how == "flat":
        tensors[name] = torch.tensor(1.0)
    elif how == "integers":
        tensors[name] = tensors[name].to(torch.int8)
    elif how == "untied":
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    return tensors


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", r"lacks backbone.layers.1.mixer.in_proj.weight"),
        ("unexpected", r"also has backbone.layers.1.mixer.extra"),
        ("shape", r"in_proj.weight has shape \[75, 16\], where the configuration needs \[76, 16\]"),
        ("flat", r"in_proj.weight has shape \[\]"),
        ("integers", r"in_proj.weight is of torch.int8"),
        ("untied", r"tied, but lm_head.weight differs from backbone.embedding.weight"),
    ],
)
def test_tensors_that_do_not_fit(how: str, said: str) -> None:
    config = state_spaces_config()
    tensors = state_spaces_tensors(config)
    to_dla(config, dict(tensors))
    with pytest.raises(ValueError, match=said):
        to_dla(config, spoil(tensors, how))


def test_our_own_tensors_are_checked_too(tmp_path: Path) -> None:
    write_state_spaces(tmp_path / "theirs")
    config = convert(tmp_path / "theirs", tmp_path / "ours")
    tensors = read(tmp_path / "ours")
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        from_dla(config, tensors, "transformers")
    save_file(tensors, tmp_path / "ours" / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        convert(tmp_path / "ours", tmp_path / "again")


def test_what_older_versions_wrote(tmp_path: Path) -> None:
    config, tensors = fla_config(), fla_tensors(fla_config())
    unused = {f"model.layers.{i}.attn.D": torch.ones(4) for i in range(2)}
    assert_same(to_dla(config, tensors | unused)[1], to_dla(config, tensors)[1])
    theirs = write_transformers(tmp_path)
    old = {name.replace("embeddings", "embedding"): tensor for name, tensor in theirs.state_dict().items()}
    assert_same(to_dla(theirs.config.to_dict(), old)[1], to_dla(theirs.config.to_dict(), theirs.state_dict())[1])


# Files.


class Attack:
    """Leaves a mark if it is ever unpickled freely."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_not_run(tmp_path: Path, zipped: bool) -> None:
    _, tensors = write_state_spaces(tmp_path / "theirs")
    path, mark = tmp_path / "theirs" / "pytorch_model.bin", tmp_path / "mark"
    torch.save({**tensors, "backbone.extra": Attack(mark)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin .*more than tensors"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    path.write_bytes(pickle.dumps(Attack(mark), protocol=2))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not mark.exists() and not (tmp_path / "ours").exists()
    pickle.loads(path.read_bytes())  # what free unpickling would have done
    assert mark.exists()


@pytest.mark.parametrize("content", [[torch.ones(2)], {1: torch.ones(2)}, {"a": 3}, {"a": torch.eye(2).to_sparse()}])
def test_pickles_of_other_things(tmp_path: Path, content: object) -> None:
    write_state_spaces(tmp_path / "theirs")
    torch.save(content, tmp_path / "theirs" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.* must "):
        convert(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_truncated_weights(tmp_path: Path, keep: float) -> None:
    write_state_spaces(tmp_path / "a")
    write_fla(tmp_path / "b")
    for path in (tmp_path / "a" / "pytorch_model.bin", tmp_path / "b" / "model.safetensors"):
        content = path.read_bytes()
        path.write_bytes(content[: int(keep * len(content))])
        with pytest.raises(ValueError, match=path.name):
            convert(path.parent, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"ssm_cfg": {}', "\udc80", "[" * 100_000, '{"a": 1}'])
def test_bad_config_files(tmp_path: Path, content: str) -> None:
    write_state_spaces(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"config\.json"):
        convert(tmp_path / "theirs", tmp_path / "ours")


def test_missing_files(tmp_path: Path) -> None:
    write_state_spaces(tmp_path / "theirs")
    (tmp_path / "theirs" / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"has no weights: model\.safetensors"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "theirs" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(ValueError, match="there is no folder"):
        convert(tmp_path / "nowhere", tmp_path / "ours")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="got the file"):
        convert(tmp_path / "file", tmp_path / "ours")


def test_the_hub_when_it_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no network\nand a long story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"no folder 'some-org/some-model'.*ConnectionError: no network\)"):
        convert("some-org/some-model", tmp_path / "ours")


@pytest.mark.parametrize("write", [write_state_spaces, write_fla])
def test_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Any]) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        write(tmp_path / "cache")
        asked.append(any("bin" in pattern for pattern in allow_patterns))
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    convert("some-org/some-model", tmp_path / "ours")
    # pickles only where there is nothing else
    assert asked == ([False, True] if write is write_state_spaces else [False])
    assert (tmp_path / "ours" / "config.json").exists()


def test_the_target_must_be_free(tmp_path: Path) -> None:
    write_state_spaces(tmp_path / "theirs")
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        convert(tmp_path / "theirs", full)
    with pytest.raises(ValueError, match="is not empty"):
        convert(tmp_path / "theirs", tmp_path / "theirs")
    with pytest.raises(ValueError, match="got the file"):
        convert(tmp_path / "theirs", full / "notes.txt")
    assert [path.name for path in full.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "theirs", tmp_path / "empty")
    convert(tmp_path / "theirs", tmp_path / "new" / "deep")


def test_nothing_is_left_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state_spaces(tmp_path / "theirs")
    (tmp_path / "empty").mkdir()

    def full(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(import_module("dla.models.convert.files"), "copy_companions", full)
    for name in ("new", "empty"):
        with pytest.raises(OSError, match="no space"):
            convert(tmp_path / "theirs", tmp_path / name)
    assert not (tmp_path / "new").exists() and not any((tmp_path / "empty").iterdir())


def test_tokenizers_come_along(tmp_path: Path) -> None:
    write_state_spaces(tmp_path / "theirs")
    wanted = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"}
    wanted |= {"generation_config.json", "tokenizer.model"}
    for name in wanted | {"README.md", "script.py", "optimizer.bin"}:
        (tmp_path / "theirs" / name).write_text(name)
    convert(tmp_path / "theirs", tmp_path / "ours")
    made = {"config.json", "model.safetensors", "modeling_dla.py", "README.md"}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == wanted | made
    assert "Mamba-2 with one state a head" in (tmp_path / "ours" / "README.md").read_text()
    assert all((tmp_path / "ours" / name).read_text() == name for name in wanted)


def shard(folder: Path, kind: str) -> Path:
    """Split the weights of a folder in two files with an index."""
    single = folder / kind
    tensors = read(folder)
    single.unlink()
    places = {}
    stem, _, ending = kind.partition(".")
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        place = f"{stem}-0000{number}-of-00002.{ending}"
        part = {name: tensors[name].clone() for name in names}
        torch.save(part, folder / place) if ending == "bin" else save_file(part, folder / place)
        places |= dict.fromkeys(names, place)
    index = folder / f"{kind}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


@pytest.mark.parametrize(
    ("write", "kind"), [(write_fla, "model.safetensors"), (write_state_spaces, "pytorch_model.bin")]
)
def test_sharded_weights(tmp_path: Path, write: Callable[..., Any], kind: str) -> None:
    write(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "whole")
    index = shard(tmp_path / "theirs", kind)
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert_same(read(tmp_path / "ours"), read(tmp_path / "whole"))
    right = json.loads(index.read_text())
    name, place = next(iter(right["weight_map"].items()))
    other = next(p for p in right["weight_map"].values() if p != place)
    for weight_map, said in (
        (None, "weight_map"),
        ({**right["weight_map"], name: "../" + place}, "files beside it"),
        ({**right["weight_map"], name: 3}, "files beside it"),
        ({**right["weight_map"], name: other}, "does not expect there"),
        ({**right["weight_map"], "more": place}, "lacks more"),
        ({**right["weight_map"], name: "absent.bin"}, r"absent\.bin is missing"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=said):
            convert(tmp_path / "theirs", tmp_path / "no")


def test_large_weights_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fla(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "whole")
    monkeypatch.setattr("dla.models.convert.files.SHARD_BYTES", 20_000)
    convert(tmp_path / "theirs", tmp_path / "ours")
    shards = sorted((tmp_path / "ours").glob("model-*.safetensors"))
    assert len(shards) > 3 and not (tmp_path / "ours" / "model.safetensors").exists()
    together = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert_same(together, read(tmp_path / "whole"))
    assert torch.equal(logits(tmp_path / "ours"), logits(tmp_path / "whole"))
    convert(tmp_path / "ours", tmp_path / "back", to="fla")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_state_spaces(tmp_path / "theirs")
    folders = [str(tmp_path / "theirs"), str(tmp_path / "ours")]
    assert main(["convert", *folders, "--memory", "dynamic"]) == 0
    tensors = load_file(tmp_path / "ours" / "model.safetensors").values()
    size = sum(tensor.numel() for tensor in tensors) / 1e6
    assert capsys.readouterr().out == f"{folders[1]}: dla checkpoint, {len(tensors)} tensors, {size:.1f}M numbers\n"
    assert main(["convert", *folders]) == 2
    assert capsys.readouterr().err.startswith("dla convert: dst must be a new or an empty folder")
