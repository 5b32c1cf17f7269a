"""Routed levels, the control: what they are without routing, and that routing is what it says."""

import pytest
import torch

from dla.lab.controls import CONTROLS, RoutedLevels, levels, use_routed_levels
from dla.layers.call import Call
from dla.models import DLAConfig, DLAForCausalLM
from tests.ops.common import assert_close


def make(backbone, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "head_k_dim": 4, "head_v_dim": 8, "intermediate_size": 16}
    sizes |= {"vocab_size": 11, "num_hidden_layers": 2, "initializer_range": 0.3, "max_position_embeddings": 32}
    return DLAForCausalLM(DLAConfig(backbone=backbone, **{"memory": "log_linear"} | sizes | options)).double()


@pytest.mark.parametrize("backbone", ["linear", "mamba2", "gated_deltanet"])
def test_without_routing_they_are_log_linear(backbone):
    model, ids = make(backbone), torch.randint(0, 11, (2, 21))
    expected = model(ids, use_cache=False).logits
    use_routed_levels(model)
    found = model(ids, use_cache=False).logits
    assert (found - expected).abs().max() > 1e-3
    for layer in model.model.layers:
        assert isinstance(layer.mixer.memory, RoutedLevels)
        layer.mixer.memory.sharpness.data.fill_(-torch.inf)  # softplus: no routing
    assert_close(model(ids, use_cache=False).logits, expected, 1e-9)


def test_levels():
    assert levels(4, torch.device("cpu")).tolist() == [[(t ^ s).bit_length() for s in range(4)] for t in range(4)]


def test_routing_by_hand():
    """One head of one layer: the weight of a level is exp(rho (cos(q, sum of its keys) - 1))."""
    from dla.layers import Operands, Packing

    torch.manual_seed(0)
    T, d = 6, 3
    memory = RoutedLevels(4, 1, 4).double()
    x = torch.randn(1, T, 4, dtype=torch.float64)
    q, k, v = torch.randn(3, 1, T, 1, d, dtype=torch.float64)
    found = memory(x, Operands(q, k, v), Call(Packing(1, T)))
    lam, rho = memory.slots(x)[0, :, 0], torch.nn.functional.softplus(memory.sharpness).item()
    for t in range(T):
        expected = torch.zeros(d, dtype=torch.float64)
        for level in range(4):
            inside = [s for s in range(t + 1) if (t ^ s).bit_length() == level]
            if inside:
                centre = k[0, inside, 0].sum(0)
                fit = torch.nn.functional.cosine_similarity(q[0, t, 0], centre, dim=0)
                state = sum(torch.outer(k[0, s, 0], v[0, s, 0]) for s in inside)
                expected += lam[t, level] * torch.exp(rho * (fit - 1)) * (q[0, t, 0] @ state)
        assert_close(found[0, t, 0], expected, 1e-10)


def test_no_cache():
    model = make("linear")
    use_routed_levels(model)
    with pytest.raises(ValueError, match="no cache"):
        model.eval()(torch.zeros(1, 3, dtype=torch.long), use_cache=True)


def test_another_memory_is_refused():
    with pytest.raises(ValueError, match="models with DynamicMemory; memory is 'log_linear'"):
        CONTROLS["probe"](make("linear"))
    with pytest.raises(ValueError, match="models with LogLinearMemory; memory is 'dynamic'"):
        use_routed_levels(make("linear", memory="dynamic"))
