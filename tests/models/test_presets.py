"""Presets against counts made by hand, from the published shapes and not from the model."""

import pytest
import torch

from dla.choices import NAMED
from dla.models import DLAForCausalLM
from dla.models.presets import PRESETS, preset

LINEAR = [name for name in PRESETS if not name.startswith("transformer")]
SMALL = [name for name in PRESETS if name.endswith(("-tiny", "-mini"))]


def mamba2(d, heads, dk, dv):
    inner = heads * dv
    channels = inner + 2 * dk
    into, out = d * (inner + channels + heads), inner * d
    return into + out + (4 + 1) * channels + 3 * heads + inner  # conv with bias; dt_bias, A_log, D; the gated norm


def linear(d, heads, dk, dv):
    key, value = heads * dk, heads * dv
    return (
        2 * d * key + 3 * d * value + 4 * (2 * key + value) + dv
    )  # q k, v gate out, convs without bias, norm of a head


def deltanet(d, heads, dk, dv):
    return linear(d, heads, dk, dv) + d * heads  # the step


def gdn(d, heads, dk, dv):
    return deltanet(d, heads, dk, dv) + d * heads + 2 * heads  # the decay; A_log, dt_bias


def model(layers, d, mixer, mlp, vocab, tied):
    block = mixer + 3 * d * mlp + (2 * d if mlp else d)
    return layers * block + vocab * d * (1 if tied else 2) + d


BY_HAND = {
    "mamba2-780m": model(48, 1536, mamba2(1536, 48, 128, 64), 0, 50288, True),
    "mamba2-802m": model(21, 1536, mamba2(1536, 48, 128, 64), 4096, 32000, False),
    "gdn-1.3b": model(21, 2048, gdn(2048, 6, 256, 512), 5632, 32000, False),
    "gdn-793m": model(21, 1536, gdn(1536, 6, 192, 384), 4096, 32000, False),
    "transformer-778m": model(24, 1536, 4 * 1536**2, 4096, 32000, False),
    "mamba2-tiny": model(4, 192, mamba2(192, 12, 32, 32), 0, 256, True),
    "gdn-tiny": model(4, 128, gdn(128, 4, 32, 64), 320, 256, True),
    "deltanet-tiny": model(4, 128, deltanet(128, 4, 32, 64), 320, 256, True),
    "linear-tiny": model(4, 128, linear(128, 4, 32, 64), 320, 256, True),
    "transformer-tiny": model(4, 128, 4 * 128**2, 448, 256, True),
    "mamba2-mini": model(10, 384, mamba2(384, 12, 64, 64), 0, 256, True),
    "gdn-mini": model(6, 384, gdn(384, 4, 64, 128), 768, 256, True),
    "deltanet-mini": model(6, 384, deltanet(384, 4, 64, 128), 768, 256, True),
    "linear-mini": model(6, 384, linear(384, 4, 64, 128), 768, 256, True),
    "transformer-mini": model(6, 384, 4 * 384**2, 896, 256, True),
}


def weights(config):
    with torch.device("meta"):
        built = DLAForCausalLM(config)
    assert all(p.device.type == "meta" for p in built.parameters())
    return dict(built.named_parameters())


def count(parameters, part=""):
    return sum(p.numel() for name, p in parameters.items() if part in name)


def test_the_formulas_give_the_published_counts():
    rounded = {name: round(n / 1e6) for name, n in BY_HAND.items()}
    assert [rounded[name] for name in ("mamba2-802m", "gdn-1.3b", "gdn-793m")] == [802, 1387, 793]
    assert BY_HAND["mamba2-780m"] == 780_161_280
    assert BY_HAND["transformer-778m"] == 777_856_512
    assert list(BY_HAND) == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters(name):
    assert count(weights(preset(name))) == BY_HAND[name]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("memory", ["log_linear", "dynamic"])
def test_a_memory_adds_its_slot_weights_alone(name, memory):
    config = preset(name, memory=memory)
    width = {"log_linear": 15, "dynamic": 30}[memory]  # 16384 tokens; the capacity
    parameters = weights(config)
    added = config.num_hidden_layers * config.num_heads * width * (config.hidden_size + 1)
    assert count(parameters, ".memory.slots.") == added
    assert count(parameters) == BY_HAND[name] + added
    assert {backbone_memory for _, backbone_memory in config.kinds()} == {memory}


def test_the_slot_weights_of_the_paper():
    assert count(weights(preset("mamba2-780m", memory="dynamic")), "slots.proj") == 48 * 30 * 1536 * 48 == 106_168_320


@pytest.mark.parametrize("name", SMALL)
def test_small_models_are_small(name):
    target = 1e6 if name.endswith("-tiny") else 1e7
    assert 0.85 * target < BY_HAND[name] < 1.15 * target
    if name in LINEAR:
        assert count(weights(preset(name, memory="dynamic"))) < 1.6 * target
        assert 16 <= preset(name).head_k_dim <= (32 if name.endswith("-tiny") else 64)
    assert preset(name).vocab_size == 256


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in SMALL])
def test_settings_of_the_large_models(name):
    config = preset(name)
    assert config.initializer_range == 0.006
    assert config.max_position_embeddings == 16384
    assert config.norm_eps == (1e-5 if name.startswith("mamba2") else 1e-6)
    assert config.residual_in_fp32 is (name == "mamba2-780m")
    assert config.tie_word_embeddings is (name == "mamba2-780m")
    assert config.conv_bias is name.startswith("mamba2")
    if name == "transformer-778m":
        assert (config.num_attention_heads, config.attention_head_dim, config.rope_theta) == (16, 96, 500000)


def test_overrides():
    config = preset("gdn-tiny", memory="dynamic", capacity=8, tau=0.9, num_hidden_layers=2)
    assert (config.memory, config.capacity, config.tau, config.num_hidden_layers) == ("dynamic", 8, 0.9, 2)
    assert preset("gdn-tiny").num_hidden_layers == 4, "a preset must not remember what was overridden"


def test_unknown_names():
    with pytest.raises(ValueError, match=r"got 'mamba2-780M'; did you mean 'mamba2-780m'\?$") as caught:
        preset("mamba2-780M")
    assert all(name in str(caught.value) for name in PRESETS)
    with pytest.raises(ValueError, match=r"got 'nosuch'$"):  # nothing is near
        preset("nosuch")


def test_unknown_memories_are_told_all_that_there_are():
    with pytest.raises(ValueError, match="memory must be one of") as caught:
        preset("mamba2-mini", "dynamik")
    assert all(repr(name) in str(caught.value) for name in NAMED)
    assert str(caught.value).endswith("got 'dynamik'; did you mean 'dynamic'?")


@pytest.mark.parametrize("memory", ["log_linear", "dynamic"])
def test_transformers_have_no_memory(memory):
    with pytest.raises(ValueError, match="needs a linear backbone"):
        preset("transformer-tiny", memory=memory)
