import time

import pytest
import torch

from dla.models import DLAConfig
from dla.models.info import mixing_flops
from dla.training import speed
from dla.training.speed import forward_flops, gpu_flops, peak_flops

LENGTH = 24
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_key_heads": 2,
    "head_k_dim": 4,
    "head_v_dim": 8,
    "max_position_embeddings": 256,  # nine levels
    "capacity": 5,
}
# Weights of a layer's linear maps, W of lam apart. Mamba-2: z and x (16 each), B and C (8 each), dt (2) of 16, a
# convolution over x, B and C, and the projection back; gated DeltaNet: q and k, v and gate, decay and step, back.
MLP = 3 * 16 * 24
LAYER = {
    "mamba2": 16 * (2 * 16 + 2 * 8 + 2) + 4 * (16 + 2 * 8) + 16 * 16 + MLP,
    "gated_deltanet": 16 * (2 * 8 + 2 * 16 + 2 * 2) + 4 * (2 * 8 + 16) + 16 * 16 + MLP,
}
LAM = {"single": 0, "log_linear": 2 * 9 * 16, "dynamic": 2 * 5 * 16}
FENWICK = sum(bin(t).count("1") + 1 for t in range(LENGTH)) / LENGTH
SLOTS = sum(min(t + 1, 5) for t in range(LENGTH)) / LENGTH


def units(backbone, memory, n):
    """In multiplications and additions of a whole state: write, read, joining or merging, score."""
    if backbone == "mamba2":
        return {"single": 2 + 2, "log_linear": 2 + 2 * n + 1, "dynamic": 2 + 2 * n + 1 + 2}[memory]
    return {"single": 6, "log_linear": 6 * n + 1, "dynamic": 6 * n + 1}[memory]


@pytest.mark.parametrize("backbone", ["mamba2", "gated_deltanet"])
@pytest.mark.parametrize(("memory", "n"), [("single", 1), ("log_linear", FENWICK), ("dynamic", SLOTS)])
def test_flops_by_hand(backbone, memory, n):
    config = DLAConfig(backbone=backbone, memory=memory, **SIZES)
    maps = 2 * (2 * (LAYER[backbone] + LAM[memory]) + 50 * 16)
    mixing = 2 * (2 * 4 * 8) * units(backbone, memory, n)
    assert forward_flops(config, LENGTH) == pytest.approx(maps + mixing)


@pytest.mark.parametrize("backbone", ["mamba2", "gated_deltanet"])
def test_measured_live_states_take_the_place_of_the_bound(backbone):
    config = DLAConfig(backbone=backbone, memory="dynamic", **SIZES)
    maps = 2 * (2 * (LAYER[backbone] + LAM["dynamic"]) + 50 * 16)
    mixing = (2 * 4 * 8) * (units(backbone, "dynamic", 1.5) + units(backbone, "dynamic", 3.25))
    assert forward_flops(config, LENGTH, [1.5, 3.25]) == pytest.approx(maps + mixing)
    assert forward_flops(config, 10 * LENGTH, [1.5, 3.25]) == forward_flops(config, LENGTH, [1.5, 3.25])


def test_softmax_layers_of_a_hybrid_and_a_memory_without_capacity():
    pattern = ["mamba2:dynamic", "softmax"]
    hybrid = DLAConfig(backbone="mamba2", layers=pattern, num_attention_heads=2, attention_head_dim=6, **SIZES)
    attention = 4 * 2 * 6 * (LENGTH + 1) / 2
    assert mixing_flops(hybrid, LENGTH, [2.0]) == 2 * 4 * 8 * units("mamba2", "dynamic", 2.0) + attention
    unbounded = DLAConfig(backbone="mamba2", memory="dynamic", **{**SIZES, "capacity": None})
    tokens = 2 * 2 * 2 * (4 + 8) * (LENGTH + 1) / 2
    assert mixing_flops(unbounded, LENGTH) == mixing_flops(unbounded, LENGTH, [2.0, 2.0]) == tokens


@pytest.mark.parametrize("given", [[], [1.0], [1.0, 1.0, 1.0]])
def test_live_states_are_one_a_dynamic_layer(given):
    with pytest.raises(ValueError, match="2 dynamic layers"):
        forward_flops(DLAConfig(memory="dynamic", **SIZES), LENGTH, given)


def test_counting_and_measuring_leave_the_random_numbers_alone():
    before = torch.get_rng_state()
    forward_flops(DLAConfig(memory="dynamic", **SIZES), LENGTH)
    speed._measured.cache_clear()
    peak_flops("cpu", torch.float32, 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 494e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA H200", 989e12, 494e12),
        ("NVIDIA A10", 125e12, 62.5e12),
        ("NVIDIA L4", 121e12, 60e12),
        ("NVIDIA L40S", 362e12, 181e12),
        ("NVIDIA GeForce RTX 4090", 165e12, 82.6e12),
        ("NVIDIA RTX A6000", 155e12, 77.4e12),
        ("NVIDIA B200", 2250e12, None),
        ("NVIDIA A10G", None, None),
        ("NVIDIA L40", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("Tesla T4", None, None),
    ],
)
def test_gpus_by_name(name, half, single, monkeypatch):
    assert gpu_flops(name, torch.bfloat16) == gpu_flops(name, torch.float16) == half
    assert gpu_flops(name, torch.float32) == single
    assert gpu_flops(name, torch.float64) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16, 8) == (None if half is None else 8 * half)


def test_a_cpu_is_measured_once():
    speed._measured.cache_clear()
    start = time.perf_counter()
    one = peak_flops("cpu", torch.float32, 1)
    assert time.perf_counter() - start < 2  # half a second, on a machine that is not busy
    a = torch.ones(512, 512)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    assert one is not None
    assert 0.1 < one / (2 * 512**3 / min(times)) < 10
    assert peak_flops("cpu", torch.float32, 4) == 4 * one
    assert peak_flops("meta", torch.float32, 1) is None
