"""The probe: with no option it is the dynamic memory; each option does what it says."""

import pytest
import torch

from dla.lab.controls import control
from dla.lab.probe import ProbedMemory
from dla.layers import Operands, Packing
from dla.layers.call import Call
from dla.layers.memory import DynamicMemory
from dla.models import DLAConfig, DLAForCausalLM
from tests.ops.common import assert_close

RULES = {"tau": 1.2, "capacity": 4, "merge": "density", "score": "token", "block": None}


def make(backbone, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "head_k_dim": 4, "head_v_dim": 8, "intermediate_size": 16}
    sizes |= {"vocab_size": 11, "num_hidden_layers": 2, "initializer_range": 0.3, "max_position_embeddings": 32}
    options = {"backbone": backbone, "memory": "dynamic", "capacity": 4, **sizes, **options}
    return DLAForCausalLM(DLAConfig(**options)).double()


@pytest.mark.parametrize("backbone", ["linear", "mamba2", "gated_deltanet"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"routed": True},
        {"routed": True, "slot_order": "recency", "merge": "similarity", "sharpness": "token"},
        {"capacity": None, "slot_rank": 2},
    ],
)
def test_with_no_option_it_is_the_memory(backbone, options):
    model, ids = make(backbone, **{"tau": 1.3, **options}), torch.randint(0, 11, (2, 21))
    expected = model(ids, use_cache=False).logits
    control(model, "probe")
    assert all(isinstance(layer.mixer.memory, ProbedMemory) for layer in model.model.layers)
    assert_close(model(ids, use_cache=False).logits, expected, 1e-6)


@pytest.mark.parametrize("option", [{"normalise": True}, {"keys": "step"}, {"keys": "faded"}])
def test_options_change_the_reads(option):
    model, ids = make("gated_deltanet", routed=True), torch.randint(0, 11, (2, 21))
    expected = model(ids, use_cache=False).logits
    control(model, {"name": "probe", **option})
    model.double()
    assert (model(ids, use_cache=False).logits - expected).abs().max() > 1e-4


def memory(probe, *, routed=True, heads=1):
    from dla.lab.probe import Probe

    torch.manual_seed(1)
    made = ProbedMemory(DynamicMemory(4, heads, width=4, routed=routed, **RULES), Probe(**probe), 4).double()
    x = torch.randn(1, 12, 4, dtype=torch.float64)
    q, k, v = torch.randn(3, 1, 12, heads, 3, dtype=torch.float64)
    return made, x, Operands(q, k, v)


def by_hand(made, x, operands, fit):
    """Outputs [T, dv] of the first head; ``fit`` gives the exponent of a state (start, end) at t."""
    q, k, v = (z[0, :, 0] for z in (operands.q, operands.k, operands.v))
    found, lam = made.decide(operands), made.slots(x)[0, :, 0]
    outputs = []
    for t in range(len(q)):
        spans = found.spans(0, 0, t)
        exponents = torch.stack([fit(found, t, *span) for span in spans])
        weights = exponents.softmax(0) if made.probe.normalise else exponents.exp()
        states = [k[a:b].T @ v[a:b] for a, b in spans]
        outputs.append(sum(lam[t, i] * weights[i] * (q[t] @ S) for i, S in enumerate(states)))
    return torch.stack(outputs)


def cosine(operands, t, a, b):
    centre = operands.k[0, a:b, 0].sum(0)
    return torch.nn.functional.cosine_similarity(operands.q[0, t, 0], centre, dim=0)


@pytest.mark.parametrize("normalise", [False, True])
def test_features_by_hand(normalise):
    made, x, operands = memory({"features": "count+density+age", "normalise": normalise})
    made.factors.data = torch.tensor([[-0.7, 0.4, 0.3]], dtype=torch.float64)
    rho = torch.nn.functional.softplus(made.sharpness).item()

    def fit(found, t, a, b):
        density = found.score[0, a:b, 0].mean()
        seen = torch.stack([torch.tensor(float(b - a)).log(), density, torch.tensor(float(t + 2 - b)).log()])
        return rho * (cosine(operands, t, a, b) - 1) + (made.factors[0] * seen.double()).sum()

    output = made(x, operands, Call(Packing(1, 12)))
    assert_close(output[0, :, 0], by_hand(made, x, operands, fit), 1e-6)


def test_own_erasure_by_hand():
    """Every state is the delta rule over its own tokens; merged states add up; all of them decay."""
    made, x, operands = memory({"erase": "own"}, routed=False)
    torch.manual_seed(2)
    k = torch.nn.functional.normalize(operands.k, dim=-1)
    g, beta = -torch.rand(1, 12, 1, dtype=torch.float64), torch.rand(1, 12, 1, dtype=torch.float64)
    operands = Operands(operands.q, k, operands.v, g, beta)
    found, lam = made.decide(operands), made.slots(x)[0, :, 0]
    boundary, merged = found.boundary[0, :, 0], found.merged[0, :, 0]
    assert 1 < boundary.sum() < 12 and (merged >= 0).any()
    states, outputs = [], []
    for t in range(12):
        key, value, step = k[0, t, 0], operands.v[0, t, 0], beta[0, t, 0]
        if not boundary[t]:
            states[-1] = states[-1] - step * torch.outer(key, key @ states[-1])
        states = [g[0, t, 0].exp() * S for S in states]
        if merged[t] >= 0:
            i = int(merged[t])
            states[i : i + 2] = [states[i] + states[i + 1]]
        if boundary[t]:
            states.append(torch.zeros(3, 3, dtype=torch.float64))
        states[-1] = states[-1] + step * torch.outer(key, value)
        outputs.append(sum(lam[t, i] * (operands.q[0, t, 0] @ S) for i, S in enumerate(states)))
    output = made(x, operands, Call(Packing(1, 12)))
    assert_close(output[0, :, 0], torch.stack(outputs), 1e-9)


def test_tau_follows_the_rate():
    made, x, operands = memory({"rate": 0.25}, heads=2)
    for _ in range(200):
        made(x, operands, Call(Packing(1, 12)))
    made.eval()
    trained = made.tau.clone()
    rate = made.decide(operands).boundary.double().mean((0, 1))
    assert ((rate - 0.25).abs() < 0.1).all()
    made(x, operands, Call(Packing(1, 12)))
    assert torch.equal(made.tau, trained)


@pytest.mark.parametrize("backbone", ["linear", "gated_deltanet"])
@pytest.mark.parametrize("routed", [False, True])
def test_the_soft_gate_is_the_memorys(backbone, routed):
    model, ids = make(backbone, routed=routed, tau=1.3, temperature=0.2).train(), torch.randint(0, 11, (2, 21))
    expected = model(ids, use_cache=False).logits
    model.set_temperature(None)
    assert (model(ids, use_cache=False).logits - expected).abs().max() > 1e-4
    control(model, {"name": "probe", "learned_tau": True})
    model.double().set_temperature(0.2)
    assert_close(model(ids, use_cache=False).logits, expected, 1e-6)


def test_tau_is_learned_through_the_soft_gate():
    """Its gradient is that of finite differences while the decisions stay."""
    made, x, operands = memory({"learned_tau": True}, heads=2)
    made.temperature = 0.3

    def loss():
        out = made(x, operands, Call(Packing(1, 12)))
        return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()

    (gradient,) = torch.autograd.grad(loss(), made.tau)
    for head in range(2):
        found = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                made.tau[head] += step
                found.append(loss().item())
                made.tau[head] -= step
        assert gradient[head].item() == pytest.approx((found[0] - found[1]) / 2e-6, rel=1e-4)
        assert gradient[head].abs() > 1e-4
    made.eval()
    assert torch.autograd.grad(loss(), made.tau, allow_unused=True) == (None,)


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="nearest is 'rate'"):
        control(make("linear"), {"name": "probe", "rte": 2})
    with pytest.raises(ValueError, match="nearest is 'density'"):
        control(make("linear"), {"name": "probe", "features": "densty"})
    with pytest.raises(ValueError, match="control must be one of"):
        control(make("linear"), "prob")
