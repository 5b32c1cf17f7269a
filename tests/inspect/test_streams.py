import time

import pytest
import torch

from dla.inspect.figures import describe
from dla.inspect.streams import MEAN_SEGMENT, NOISE, correlated
from dla.ops import segment

SMALL = {"length": 200, "heads": 4, "dk": 6, "dv": 5}
FIELDS = ("q", "k", "v", "lam", "g", "beta", "changes")


def test_shapes_dtype_and_ranges():
    s = correlated(0, batch=3, key_heads=2, lam_width=7, beta=True, dtype=torch.float64, **SMALL)
    assert s.q.shape == s.k.shape == (3, 200, 2, 6)
    assert s.v.shape == (3, 200, 4, 5)
    assert s.lam.shape == (3, 200, 4, 7)
    assert s.g.shape == s.beta.shape == (3, 200, 4)
    assert s.changes.shape == (3, 200) and s.changes[:, 0].all()
    assert {getattr(s, name).dtype for name in FIELDS[:-1]} == {torch.float64}
    assert (s.g < 0).all() and (s.lam > 0).all() and (s.beta > 0).all() and (s.beta < 1).all()
    torch.testing.assert_close(s.k.norm(dim=-1), torch.ones(3, 200, 2).double(), rtol=1e-6, atol=0)


def test_keys_have_a_head_each_unless_told_otherwise_and_beta_is_left_out():
    s = correlated(0, **SMALL)
    assert s.k.shape == (1, 200, 4, 6) and s.beta is None


@pytest.mark.parametrize("beta", [False, True])
def test_the_same_seed_gives_the_same_stream_whatever_the_threads(beta):
    def draw(seed):
        s = correlated(seed, beta=beta, **SMALL)
        return {name: getattr(s, name) for name in FIELDS if getattr(s, name) is not None}

    before = torch.get_num_threads()
    first = draw(7)
    try:
        torch.set_num_threads(2)
        second = draw(7)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = draw(8)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_dtypes_round_the_same_stream():
    wide, narrow = correlated(3, dtype=torch.float32, **SMALL), correlated(3, dtype=torch.bfloat16, **SMALL)
    assert torch.equal(wide.v.bfloat16(), narrow.v)
    assert torch.equal(wide.changes, narrow.changes)


def test_it_is_the_stream_that_was_fixed():
    s = correlated(1, length=40_000, heads=2, key_heads=1, dk=16, dv=16, lam_width=2)
    rate = s.changes[0, 1:].double().mean().item()
    assert rate == pytest.approx(1 / MEAN_SEGMENT, rel=0.1)
    owner = s.changes[0].cumsum(0) - 1
    sizes = owner.bincount()
    means = torch.zeros(len(sizes), 2, 16).index_add_(0, owner, s.v[0]) / sizes[:, None, None]
    within = (s.v[0] - means[owner]).square().sum() / (len(owner) - len(sizes)) / (2 * 16)
    assert within.sqrt().item() == pytest.approx(NOISE, rel=0.02)
    assert means[sizes > 8].var().item() == pytest.approx(1, rel=0.1)
    assert s.q.std().item() == pytest.approx(1, rel=0.02)
    raw = torch.expm1(-s.g.double()).log()  # undo −softplus
    assert raw.mean().item() == pytest.approx(-4, abs=0.05) and raw.std().item() == pytest.approx(1, rel=0.05)


@pytest.mark.slow
def test_it_is_fast_at_full_size():
    start = time.perf_counter()
    s = correlated(0, length=65_536, heads=48, key_heads=1, dk=128, dv=64, lam_width=30)
    assert s.v.shape == (1, 65_536, 48, 64)
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"dk": 0}, "dk must be at least 1, got 0"),
        ({"key_heads": 3}, r"key_heads must divide heads \(4\), got 3"),
    ],
)
def test_bad_sizes_are_refused_by_name(change, says):
    with pytest.raises(ValueError, match=says):
        correlated(0, **(SMALL | change))


@pytest.fixture(scope="module")
def segmentation():
    s = correlated(0, batch=2, length=96, heads=2, dk=4, dv=4, lam_width=1)
    return segment(s.k, s.v, s.g, capacity=5)


def test_describe_by_hand(segmentation):
    figures = describe(segmentation, 4, 4, samples=3)
    final = [e - s for b in range(2) for h in range(2) for s, e in segmentation.spans(b, h)]
    assert figures["boundary_rate"] == pytest.approx(segmentation.boundary.float().mean().item())
    assert figures["states"] == len(final) / 4
    assert figures["tokens_min"] == min(final) and figures["tokens_max"] == max(final)
    assert figures["tokens_median"] == torch.tensor(final).double().quantile(0.5).item()
    touched = []
    for t in (31, 63, 95):
        for b in range(2):
            for h in range(2):
                counts = [e - s for s, e in segmentation.spans(b, h, t)]
                assert sum(counts) == t + 1
                touched.append(sum(min(8 * n, 16) / 16 for n in counts))
    assert figures["W"] == pytest.approx(sum(touched) / len(touched))


def test_describe_is_bounded_by_the_states(segmentation):
    assert 0 < describe(segmentation, 2, 2)["W"] <= 5
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        describe(segmentation, 2, 2, samples=0)


def test_more_samples_than_tokens():
    s = correlated(0, length=3, heads=1, dk=4, dv=4, lam_width=1)
    assert describe(segment(s.k, s.v, s.g), 4, 4, samples=8)["W"] > 0
