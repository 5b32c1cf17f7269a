import json

import pytest
import torch

from dla.cli import main
from dla.models import DLAForCausalLM
from dla.models.config import DLAConfig
from dla.models.info import _popcounts, cache_bytes, info, run
from dla.models.presets import preset

MEMORIES = ("single", "log_linear", "dynamic")
TINY = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_heads": 2,
    "head_k_dim": 4,
    "head_v_dim": 8,
    "max_position_embeddings": 256,
    "capacity": 5,
}
BACKBONES = ("mamba2", "gated_deltanet", "deltanet", "linear")


@pytest.fixture(scope="module")
def by_hand():
    """Plain linear attention, two layers, T = 100."""
    return info(DLAConfig(backbone="linear", tie_word_embeddings=False, **TINY), 100)


def test_parameters_by_hand(by_hand):
    q_k, v_gate_out, conv, norm = 2 * 16 * 8, 3 * 16 * 16, 4 * 32, 8
    expected = {
        "embeddings": 50 * 16,
        "output_head": 50 * 16,
        "mixers": 2 * (q_k + v_gate_out + conv + norm),
        "mlps": 2 * 3 * 16 * 24,
        "norms": (2 * 2 + 1) * 16,
        "routing": 0,
    }
    for memory, width in zip(MEMORIES, (0, 9, 5), strict=True):  # 9 levels for 256 tokens
        parts = by_hand["memories"][memory]["parameters"]
        lam = 2 * 2 * width * (16 + 1)
        assert parts == {**expected, "lam": lam, "total": sum(expected.values()) + lam}


def test_bytes_by_hand(by_hand):
    matrices = 2 * 2 * 4 * 8 * 4  # one a head in every layer
    tail = 2 * 3 * 32 * 2  # bfloat16
    for memory, rows in zip(MEMORIES, (1, 7, 5), strict=True):  # 100 has seven bits
        held = by_hand["memories"][memory]["cache_bytes"]
        of_states = 8 + 8 + 8 + 4 + 4  # tokens, scores, rows, which matrix, its factor
        bookkeeping = 2 * 8 + (2 * 2 * 5 * of_states if memory == "dynamic" else 0)
        assert held["states_per_head"] == rows
        assert (held["states"], held["bookkeeping"], held["convolutions"]) == (rows * matrices, bookkeeping, tail)
        assert held["total"] == rows * matrices + bookkeeping + tail
        assert held["of_kv_cache"] == held["total"] / (2 * 2 * 16 * 2 * 100)
    assert by_hand["kv_cache_bytes"] == {"same width and depth": 2 * 2 * 16 * 2 * 100}


def test_flops_by_hand(by_hand):
    maps = 2 * (2 * (2 * 16 * 8 + 3 * 16 * 16 + 4 * 32 + 3 * 16 * 24) + 50 * 16)
    unit = 2 * 2 * 4 * 8  # layers, heads, dk, dv
    fenwick = sum(bin(t).count("1") + 1 for t in range(100)) / 100
    slots = sum(min(t + 1, 5) for t in range(100)) / 100
    lam = {"single": 0, "log_linear": 9, "dynamic": 5}
    mean = {"single": 2 + 2, "log_linear": 2 + 2 * fenwick + 1, "dynamic": 2 + 2 * slots + 3}
    most = {"single": 4, "log_linear": 2 + 2 * 7 + 1, "dynamic": 2 + 2 * 5 + 3}
    for memory in MEMORIES:
        got = by_hand["memories"][memory]["flops_per_token"]
        assert got["linear_maps"] == maps + 2 * 2 * 16 * 2 * lam[memory]
        assert got["mixing"] == round(unit * mean[memory])
        assert got["mixing_most"] == unit * most[memory]
        assert got["total"] == got["linear_maps"] + got["mixing"]
    assert by_hand["softmax_mixing_flops"] == sum(4 * 2 * 16 * (t + 1) for t in range(100)) / 100


def test_flops_of_the_delta_rule_softmax_and_other_rules():
    unit, slots = 2 * 2 * 4 * 8, sum(min(t + 1, 5) for t in range(100)) / 100
    delta = info(DLAConfig(backbone="deltanet", **TINY), 100)["memories"]
    assert delta["single"]["flops_per_token"]["mixing"] == 6 * unit
    assert delta["dynamic"]["flops_per_token"]["mixing"] == round(unit * (6 * slots + 1))
    ward = info(DLAConfig(backbone="linear", merge="ward", **TINY), 100)["memories"]["dynamic"]
    assert ward["flops_per_token"]["mixing"] == round(unit * (2 + 6 * slots + 3))
    softmax = info(DLAConfig(backbone="softmax", num_attention_heads=2, **TINY), 100)
    assert list(softmax["memories"]) == ["softmax"]
    assert softmax["memories"]["softmax"]["flops_per_token"]["mixing"] == softmax["softmax_mixing_flops"]


def test_tied_heads_still_multiply():
    def get(tied):
        return info(DLAConfig(backbone="linear", tie_word_embeddings=tied, **TINY), 100)["memories"]["single"]

    assert get(True)["flops_per_token"] == get(False)["flops_per_token"]
    assert get(True)["parameters"]["output_head"] == 0
    assert get(True)["parameters"]["total"] == get(False)["parameters"]["total"] - 50 * 16


def test_the_total_is_the_models_own():
    for backbone in BACKBONES:
        config = DLAConfig(backbone=backbone, memory="dynamic", routed=True, slot_bias=True, **TINY)
        parts = info(config, 10)["memories"]["dynamic"]["parameters"]
        assert parts["total"] == DLAForCausalLM(config).num_parameters()
        assert parts["routing"] == 2 * 2
        assert parts["lam"] == 2 * 2 * 5 * (16 + 2)
        config = DLAConfig(backbone=backbone, memory="dynamic", slot_rank=3, slot_bias=True, **TINY)
        parts = info(config, 10)["memories"]["dynamic"]["parameters"]
        assert parts["total"] == DLAForCausalLM(config).num_parameters()
        assert parts["lam"] == 2 * 2 * 3 * (16 + 5 + 1)


VARIANTS = [
    *[{"backbone": backbone, "memory": memory} for backbone in BACKBONES for memory in MEMORIES],
    {"backbone": "gated_deltanet", "memory": "dynamic", "routed": True, "conv_size": 0},
    {"backbone": "mamba2", "memory": "dynamic", "capacity": None},
    {"backbone": "deltanet", "memory": "dynamic", "capacity": None, "routed": True},
    {"backbone": "softmax", "num_attention_heads": 4, "num_key_value_heads": 2},
    {"memory": "log_linear", "layers": ["mamba2", "softmax"], "num_attention_heads": 4},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_bytes_are_those_of_a_real_cache(options):
    config = DLAConfig(**{**TINY, **options})
    torch.manual_seed(0)
    model = DLAForCausalLM(config).eval()
    for length in (3, 31, 32):  # fewer tokens than slots; around a new Fenwick level
        with torch.no_grad():
            cache = model(torch.randint(50, (1, length)), use_cache=True).past_key_values
        assert fits(config, cache_bytes(config, length, torch.float32)["total"], cache.nbytes)
    with torch.no_grad():  # and after a decoding step
        cache = model(torch.randint(50, (1, 1)), past_key_values=cache, use_cache=True).past_key_values
    total = cache_bytes(config, 33, torch.float32)["total"]
    if config.capacity is None:  # room for tokens to come
        assert total <= cache.nbytes <= 1.3 * total
    else:
        assert fits(config, total, cache.nbytes)


def fits(config, told, held):
    """What the dynamic memory holds depends on the text; of heads as small as these, indices of rows add to it."""
    bounded = config.dynamic and config.capacity is not None
    return held <= 1.2 * told and held >= told / 4 if bounded else held == told


def test_bytes_in_bfloat16_are_those_of_a_real_cache():
    model = DLAForCausalLM(DLAConfig(backbone="mamba2", memory="dynamic", **TINY)).bfloat16().eval()
    with torch.no_grad():
        cache = model(torch.randint(50, (1, 20)), use_cache=True).past_key_values
    assert fits(model.config, cache_bytes(model.config, 20)["total"], cache.nbytes)


def test_a_million_tokens_need_no_million_steps():
    for end in (0, 1, 2, 3, 64, 100, 1023):
        assert _popcounts(end) == sum(bin(t).count("1") for t in range(end))
    assert info(DLAConfig(**TINY), 10**12)["memories"]["log_linear"]["cache_bytes"]["states_per_head"] == 40


def test_which_memories_are_shown():
    config = DLAConfig(memory="dynamic", routed=True, **TINY)
    assert list(info(config, 10)["memories"]) == list(MEMORIES)
    assert list(info(config, 10, ["dynamic"])["memories"]) == ["dynamic"]
    fixed = DLAConfig(layers=["mamba2:dynamic", "softmax"], **TINY)
    assert list(info(fixed, 10)["memories"]) == ["as configured"]
    with pytest.raises(ValueError, match="needs a linear backbone"):
        info(preset("transformer-tiny"), 10, ["dynamic"])
    with pytest.raises(ValueError, match="context must be an integer >= 1, got 0"):
        info(config, 0)


def test_text_and_figures():
    found = run("mamba2-780m")
    figures, text = found.figures, found.text
    assert json.loads(json.dumps(figures)) == figures
    assert figures["memories"]["dynamic"]["cache_bytes"]["states"] == 2_264_924_160
    assert figures["memories"]["log_linear"]["cache_bytes"]["states"] == 1_132_462_080
    assert figures["kv_cache_bytes"]["transformer-778m"] == 2 * 24 * 1536 * 2 * 16384
    for number in ("780,161,280", "106,237,440", "2,264,924,160", "2,415,919,104", "output head (tied)"):
        assert number in text
    assert "softmax" in run("transformer-tiny", context=1000).text


def test_saved_models_and_mistakes(tmp_path, capsys):
    DLAConfig(memory="dynamic", **TINY).save_pretrained(tmp_path)
    assert main(["info", str(tmp_path), "--memory", "dynamic", "--context", "77", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["context"], list(figures["memories"])) == (77, ["dynamic"])
    assert main(["info", "mamba3-tiny"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err == "dla info: no such folder or preset: mamba3-tiny; did you mean 'mamba2-tiny'?\n"
