"""Configurations: what is refused and how, what follows from what, and their way through JSON."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dla.models import DLAConfig
from dla.models.load import find_config
from tests.models.common import KINDS, config

DYNAMIC = {"memory": "dynamic"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"backbone": "mamba"}, "backbone must be one of 'mamba2', .*'softmax', got 'mamba'"),
    ({"memory": "dla"}, "memory must be one of 'single', 'log_linear', 'dynamic', got 'dla'"),
    ({"feature_map": "relu"}, "feature_map must be one of 'identity', 'learned', got 'relu'"),
    ({"merge": "oldest"}, "merge must be one of 'density', 'similarity', 'ward', got 'oldest'"),
    ({"score": "cosine"}, "score must be one of 'token', 'state', got 'cosine'"),
    ({"slot_order": "random"}, "slot_order must be one of 'chronological', 'recency', got 'random'"),
    ({"backbone": "softmax", "memory": "dynamic"}, 'memory="dynamic" needs a linear backbone'),
    ({"backbone": "softmax", "memory": "log_linear"}, 'memory="log_linear" needs a linear backbone'),
    ({"hidden_size": 0}, "hidden_size must be an integer >= 1, got 0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
    ({"vocab_size": -1}, "vocab_size must be an integer >= 1, got -1"),
    ({"max_position_embeddings": 0}, "max_position_embeddings must be an integer >= 1, got 0"),
    ({"intermediate_size": -1}, "intermediate_size must be an integer >= 0 or None, got -1"),
    ({"loss_chunk": -1}, "loss_chunk must be an integer >= 0, got -1"),
    ({"conv_size": -1}, r"conv_size must be 0 \(no convolution\) or at least 2, got -1"),
    ({"conv_size": 1}, r"conv_size must be 0 \(no convolution\) or at least 2, got 1"),
    ({"num_heads": -2}, "num_heads must be an integer >= 0, got -2"),
    ({"head_k_dim": -2}, "head_k_dim must be an integer >= 0, got -2"),
    ({"num_heads": 6, "num_key_heads": 4}, "num_key_heads=4 must divide num_heads=6"),
    ({"norm_groups": 7, "num_heads": 4, "head_v_dim": 5}, r"norm_groups=7 must divide num_heads \* head_v_dim = 20"),
    ({"norm_groups": 0}, "norm_groups must be an integer >= 1, got 0"),
    (
        {"backbone": "softmax", "num_attention_heads": 6, "num_key_value_heads": 4},
        "num_key_value_heads=4 must divide num_attention_heads=6",
    ),
    ({"backbone": "softmax", "attention_head_dim": 5}, r"attention_head_dim must be even .*got 5"),
    ({"backbone": "softmax", "num_attention_heads": -1}, "num_attention_heads must be an integer >= 0, got -1"),
    ({**DYNAMIC, "capacity": 1}, "capacity must be an integer >= 2 or None, got 1"),
    ({**DYNAMIC, "tau": -0.5}, "tau must be a finite number >= 0, got -0.5"),
    ({**DYNAMIC, "tau": float("nan")}, "tau must be a finite number >= 0, got nan"),
    ({**DYNAMIC, "block": 0}, "block must be an integer >= 1 or None, got 0"),
    ({**DYNAMIC, "slots": 0}, "slots must be an integer >= 1 or None, got 0"),
    ({**DYNAMIC, "routed": True, "sharpness": "query"}, "sharpness must be one of 'head', 'token', got 'query'"),
    ({**DYNAMIC, "sharpness": "token"}, 'sharpness="token" is of routed reads: it needs routed=True'),
    ({**DYNAMIC, "routed": True, "sharpness_start": 0.0}, "sharpness_start must be a finite number > 0, got 0.0"),
    ({**DYNAMIC, "slot_rank": 0}, "slot_rank must be an integer >= 1 or None, got 0"),
    ({"memory": "log_linear", "levels": 0}, "levels must be an integer >= 1 or None, got 0"),
    ({**DYNAMIC, "temperature": 0.0}, "temperature must be a finite number > 0 or None, got 0.0"),
    ({**DYNAMIC, "temperature": float("nan")}, "temperature must be a finite number > 0 or None, got nan"),
    ({"routed": True}, 'routed=True needs memory="dynamic" in some layer'),
    ({"routed": True, "memory": "log_linear"}, 'routed=True needs memory="dynamic" in some layer'),
    ({"layers": []}, r'layers must be a list of "backbone" or "backbone:memory", got \[\]'),
    ({"layers": ["mamba2"] * 5}, "layers has 5 entries, which must divide num_hidden_layers=12"),
    ({"layers": ["mamba"]}, "layers must be one of .*got 'mamba'"),
    ({"layers": ["mamba2:dla"]}, "layers must be one of 'single', 'log_linear', 'dynamic', got 'dla'"),
    ({"layers": ["mamba2:"]}, "layers must be one of .*got ''"),
    ({"layers": ["softmax:dynamic"]}, 'layers: "softmax:dynamic" must be "softmax" alone'),
    ({"time_step_limit": [0.1]}, "time_step_limit"),
    ({"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
    ({"norm_eps": -1.0}, "norm_eps"),
    ({"backbone": "softmax", "rope_theta": 0.0}, "rope_theta"),
    ({"layers": ["softmax"], "routed": True}, 'routed=True needs memory="dynamic" in some layer'),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DLAConfig(**options)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "capacity", "tau", "layers", "conv_size"])
@pytest.mark.parametrize("value", ["many", [1.5]], ids=str)
def test_wrong_types(name: str, value: Any) -> None:
    """Whoever notices first, the name of the option is in the message."""
    with pytest.raises((ValueError, TypeError), match=name):
        DLAConfig(memory="dynamic", **{name: value})


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("capacty", "capacity"),
        ("slot_orders", "slot_order"),
        ("num_head", "num_heads"),
        ("temprature", "temperature"),
        ("hidden_sizes", "hidden_size"),
        ("layer", "layers"),
        ("slotbias", "slot_bias"),
        ("backbon", "backbone"),
    ],
)
def test_typos(typo: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"{typo} is not an option of DLAConfig; did you mean {meant}\\?"):
        DLAConfig(**{typo: 1})


def test_keys_of_other_tools_pass() -> None:
    made = DLAConfig(architectures=["DLAForCausalLM"], dtype="bfloat16", quantization_config={"a": 1}, my_note="x")
    assert made.my_note == "x"


@pytest.mark.parametrize("kind", KINDS)
def test_json(kind: str, tmp_path: Path) -> None:
    """Through a file and back, all settings and everything that follows from them."""
    made = config(kind)
    made.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "dla"
    for back in (DLAConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert isinstance(back, DLAConfig)
        assert {**back.to_dict(), "_name_or_path": ""} == made.to_dict()
        assert back.kinds() == made.kinds()
        assert (back.slot_width, back.level_width) == (made.slot_width, made.level_width)
        assert tuple(back.time_step_limit) == tuple(made.time_step_limit)
    assert DLAConfig(**json.loads(json.dumps(KINDS[kind]))).kinds() == DLAConfig(**KINDS[kind]).kinds()


def test_sizes_of_mamba2() -> None:
    made = DLAConfig(backbone="mamba2", hidden_size=768)
    assert (made.num_heads, made.num_key_heads, made.head_k_dim, made.head_v_dim) == (24, 1, 128, 64)
    assert made.intermediate_size == 0
    assert made.conv_bias is True
    given = DLAConfig(backbone="mamba2", hidden_size=768, head_v_dim=32, conv_bias=False, intermediate_size=100)
    assert (given.num_heads, given.conv_bias, given.intermediate_size) == (48, False, 100)


@pytest.mark.parametrize("backbone", ["gated_deltanet", "deltanet", "linear"])
def test_sizes_of_projected_backbones(backbone: str) -> None:
    made = DLAConfig(backbone=backbone, hidden_size=2048)
    assert (made.num_heads, made.num_key_heads, made.head_k_dim, made.head_v_dim) == (8, 8, 192, 384)
    assert made.intermediate_size == 5504  # 8/3 of the width, in steps of 64
    assert made.conv_bias is False
    small = DLAConfig(backbone=backbone, hidden_size=64)
    assert (small.num_heads, small.head_k_dim, small.head_v_dim) == (1, 48, 96)


def test_sizes_of_softmax() -> None:
    made = DLAConfig(backbone="softmax", hidden_size=1536)
    assert (made.num_attention_heads, made.num_key_value_heads, made.attention_head_dim) == (24, 24, 64)
    assert made.rope_theta == 500000.0
    given = DLAConfig(backbone="softmax", hidden_size=1536, num_attention_heads=16, num_key_value_heads=4)
    assert (given.num_key_value_heads, given.attention_head_dim) == (4, 96)


def test_kinds_of_layers() -> None:
    made = DLAConfig(
        memory="dynamic", num_hidden_layers=6, layers=["mamba2", "softmax", "linear:log_linear"], num_heads=4
    )
    pattern = [("mamba2", "dynamic"), ("softmax", None), ("linear", "log_linear")]
    assert made.kinds() == pattern * 2
    assert made.dynamic
    assert made.num_attention_heads == 12
    assert not DLAConfig(layers=["mamba2:single", "softmax"]).dynamic
    assert DLAConfig(layers=["mamba2:dynamic", "softmax"], routed=True).dynamic
    # a softmax model has no memory to choose, a pattern decides for itself
    assert DLAConfig(backbone="softmax").kinds() == [("softmax", None)] * 12
    assert DLAConfig(backbone="softmax", layers=["linear:dynamic"]).kinds()[0] == ("linear", "dynamic")


def test_widths_of_slot_weights() -> None:
    assert DLAConfig().capacity == 30
    assert DLAConfig().tau == 0.6
    assert DLAConfig(capacity=9).slot_width == 9
    assert DLAConfig(capacity=None, memory="dynamic").slot_width == 30
    assert DLAConfig(capacity=9, slots=4).slot_width == 4
    for longest, levels in ((1, 1), (2, 2), (64, 7), (65, 8), (16384, 15)):
        assert DLAConfig(max_position_embeddings=longest).level_width == levels
    assert DLAConfig(levels=3).level_width == 3


# Values of any kind, in every field.

ANY = ["x", "", -1, 0.5, [1], ["x"], [], {"a": 1}, {}, [[1]], True, None, float("nan"), float("inf"), 10**400, 2**63]
FIELDS = sorted(field.name for field in fields(DLAConfig))


@pytest.mark.parametrize("name", FIELDS)
def test_values_of_another_kind_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """By Python and through a file: either it can be, or one line names the field (and the file)."""
    usual = DLAConfig(memory="dynamic").to_dict()
    refused = 0
    for value in ANY:
        try:
            DLAConfig(**{"memory": "dynamic", name: value})
        except ValueError as error:
            refused += 1
            said = str(error)
            assert name in said or (name == "gate_temperature" and "temperature" in said) or name == "id2label"
            assert "\n" not in said and len(said) < 300
            (tmp_path / "config.json").write_text(json.dumps({**usual, name: value}))
            with pytest.raises((ValueError, OSError), match=r"config\.json"):
                DLAConfig.from_pretrained(tmp_path)
    assert refused >= 8


@pytest.mark.parametrize("value", [0.5, "2", -1, True, [1, "2"], [0.5], [[1]], {}, 10**400])
def test_stop_tokens_are_token_ids(value: Any) -> None:
    whole = r"eos_token_id must be an integer (>= 0|<= 2147483647) or a list of integers >= 0 or None, got"
    item = r"eos_token_id\[\d\] must be an integer >= 0, got"
    with pytest.raises(ValueError, match=item if value and isinstance(value, list) else whole):
        DLAConfig(eos_token_id=value)
    assert DLAConfig(eos_token_id=[1, 2]).eos_token_id == [1, 2]
    assert DLAConfig(eos_token_id=0).eos_token_id == 0


def test_sizes_that_no_machine_has_are_refused() -> None:
    with pytest.raises(ValueError, match="the sizes make matrices of hidden_size=2000000000 times"):
        DLAConfig(hidden_size=2 * 10**9)
    with pytest.raises(ValueError, match="hidden_size must be an integer <= 2147483647"):
        DLAConfig(hidden_size=2**40)


@pytest.mark.parametrize("name", ["kinds", "slot_width", "to_dict", "text_config", "dynamic"])
def test_keys_that_would_take_the_place_of_methods_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be an option of DLAConfig"):
        DLAConfig(**{name: 5})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not valid JSON"),
        (b"[1]", "must hold a JSON object, got list"),
        (b"5", "must hold a JSON object, got int"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        find_config(str(tmp_path))
    assert str(tmp_path / "config.json") in str(error.value) and "\n" not in str(error.value)


# Heads, as other tools know them.


@pytest.mark.parametrize("backbone", ["mamba2", "gated_deltanet", "deltanet", "linear"])
def test_linear_models_have_heads_for_tools_that_divide_by_them(backbone: str, tmp_path: Path) -> None:
    made = DLAConfig(backbone=backbone, hidden_size=768)
    assert made.num_attention_heads == made.num_heads > 0
    assert made.num_key_value_heads == made.num_key_heads > 0
    assert made.num_attention_heads % made.num_key_value_heads == 0
    made.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_attention_heads"] == made.num_heads


def test_configurations_saved_without_heads_load(tmp_path: Path) -> None:
    made = DLAConfig(hidden_size=768, memory="dynamic")
    before = {**made.to_dict(), "num_attention_heads": 0, "num_key_value_heads": 0, "time_step_limit": [0.0, 1.0]}
    (tmp_path / "config.json").write_text(json.dumps(before))
    assert DLAConfig.from_pretrained(tmp_path).num_attention_heads == made.num_heads
