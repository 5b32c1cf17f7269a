"""Leaving out negligible states: the error is what it says, and stays below its bound."""

import pytest
import torch

from dla.inspect.skipping import contributions, skipping
from dla.layers.memory import DynamicMemory
from dla.models import DLAConfig, DLAForCausalLM
from dla.ops import dynamic_linear_attention
from tests.ops.common import assert_close


def make(backbone="gated_deltanet", **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "head_k_dim": 4, "head_v_dim": 8, "intermediate_size": 16}
    sizes |= {"vocab_size": 11, "num_hidden_layers": 2, "initializer_range": 0.3, "max_position_embeddings": 32}
    return DLAForCausalLM(DLAConfig(**{"backbone": backbone, "memory": "dynamic", "capacity": 6, **sizes, **options}))


@pytest.mark.parametrize(
    "options", [{}, {"routed": True}, {"routed": True, "slot_order": "recency", "sharpness": "token"}]
)
@pytest.mark.parametrize("backbone", ["linear", "gated_deltanet", "mamba2"])
def test_the_contributions_are_the_output(backbone, options):
    model = make(backbone, **options).double().eval()
    seen = []

    def look(memory, args):
        x, made = args[:2]
        if memory.sharpness_map is not None:
            memory.sharpness_map.normal_()
        lam, route = memory.slots(x), memory.route(x)
        call = {**vars(made), "lam": lam, **memory.rules, "slot_order": memory.slot_order, "route": route}
        o, state = dynamic_linear_attention(**call, output_final_state=True)
        last = None if route is None else route.expand(lam.shape[:3])[:, -1]
        parts, limits, live = contributions(state, made.q[:, -1], lam[:, -1], last, memory.slot_order, made.scale)
        assert_close(parts.sum(2), o[:, -1], 1e-6)
        assert (parts.norm(dim=-1) <= limits * (1 + 1e-6) + 1e-12).all()
        assert torch.equal(live.sum(-1), state.size)
        seen.append(memory)

    for memory in model.modules():
        if isinstance(memory, DynamicMemory):
            memory.register_forward_pre_hook(look)
    with torch.no_grad():
        model(torch.randint(0, 11, (3, 20)), use_cache=False)
    assert len(seen) == 2


def test_more_is_left_out_with_more_tolerance():
    model = make(routed=True).eval()
    for layer in model.model.layers:
        layer.mixer.memory.sharpness.data.fill_(8.0)
    none, some, more, most = skipping(model, torch.randint(0, 11, (3, 24)), [0.0, 0.05, 0.3, 0.9])
    assert none.read == none.live and none.error == none.bound == 0
    assert none.live > some.read > more.read > most.read > 0
    assert 0 < some.error < more.error < most.error
    assert all(x.error <= x.bound for x in (some, more, most))


def test_a_model_without_a_dynamic_memory():
    with pytest.raises(ValueError, match="no dynamic memory"):
        skipping(make(memory="single", capacity=None), torch.zeros(1, 4, dtype=torch.long), [0.1])
