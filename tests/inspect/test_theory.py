import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dla.inspect.theory import block_heterogeneity, deviation_bound, fenwick_blocks, fixed_blocks

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(blocks=lengths, width=st.integers(1, 6), seed=st.integers(0, 2**31), given_means=st.booleans())
def test_the_bound_bounds_the_deviation(blocks, width, seed, given_means):
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(sum(blocks), width, generator=generator, dtype=torch.float64)
    q = torch.randn(width, generator=generator, dtype=torch.float64)
    representatives = torch.randn(len(blocks), width, generator=generator, dtype=torch.float64)
    bound, deviation = deviation_bound(u, blocks, q, representatives if given_means else None)
    assert deviation <= bound * (1 + 1e-12) + 1e-12


@given(blocks=lengths, seed=st.integers(0, 2**31))
def test_both_sides_are_those_of_the_theorem(blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(sum(blocks), 3, generator=generator, dtype=torch.float64)
    q = torch.randn(3, generator=generator, dtype=torch.float64)
    representatives = torch.randn(len(blocks), 3, generator=generator, dtype=torch.float64)
    right, replaced = 0.0, 0.0
    for block, mean in zip(u.split(blocks), representatives, strict=True):
        right += len(block) ** 0.5 * sum((x - mean).norm() ** 2 for x in block) ** 0.5
        replaced += len(block) * (q @ mean)
    bound, deviation = deviation_bound(u, blocks, q, representatives)
    torch.testing.assert_close(bound, q.norm() * right)
    torch.testing.assert_close(deviation, ((u @ q).sum() - replaced).abs())


def test_it_is_tight_where_every_residual_is_one_vector_along_the_query():
    q = torch.tensor([3.0, 4.0], dtype=torch.float64)
    u = (2 * q).expand(5, 2)
    bound, deviation = deviation_bound(u, [5], q, torch.zeros(1, 2))
    torch.testing.assert_close(bound, deviation, rtol=1e-14, atol=0)
    assert deviation == 5 * 50


@given(blocks=lengths, seed=st.integers(0, 2**31))
def test_the_mean_deviates_nowhere(blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(sum(blocks), 4, generator=generator, dtype=torch.float64)
    _, deviation = deviation_bound(u, blocks, torch.ones(4))
    assert deviation < 1e-12


@given(n_a=st.integers(1, 40), n_b=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_corollary_two_constant_segments(n_a, n_b, seed):
    mu = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u = mu.repeat_interleave(torch.tensor([n_a, n_b]), 0)
    across = block_heterogeneity(u, [n_a + n_b])
    expected = n_a * n_b / (n_a + n_b) * (mu[0] - mu[1]).norm() ** 2
    torch.testing.assert_close(across, expected.reshape(1))
    assert expected > 0
    assert deviation_bound(u, [n_a, n_b], torch.ones(5))[0] == 0, "cut at the change, each block is constant"


def test_float32_and_tensor_lengths_are_accepted_and_no_gradient_is_kept():
    u = torch.randn(6, 2, requires_grad=True)
    a = deviation_bound(u, torch.tensor([4, 2]), torch.ones(2))
    b = deviation_bound(u, (4, 2), torch.ones(2))
    assert a == b
    assert a[0].dtype == torch.float64 and not a[0].requires_grad and a[0].ndim == 0


U, Q = torch.zeros(6, 2), torch.zeros(2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: deviation_bound(torch.zeros(6), [6], Q), r"u must be .*\[T, d\], got torch.float32 \[6\]"),
        (lambda: deviation_bound(U, [4, 3], Q), "blocks must sum to T = 6.*they sum to 7"),
        (lambda: deviation_bound(U, [6, 0], Q), "blocks must all be at least 1, got 0 at index 1"),
        (lambda: deviation_bound(U, [7, -1], Q), "blocks must all be at least 1, got -1 at index 1"),
        (lambda: deviation_bound(U, [3.5, 2.5], Q), "blocks must be whole numbers"),
        (lambda: deviation_bound(U, torch.tensor([6.0]), Q), "blocks must be .*integer"),
        (lambda: deviation_bound(U, torch.tensor([[6]]), Q), "blocks must be .*1-d"),
        (lambda: deviation_bound(U, [6], torch.zeros(3)), r"q must be .*\[2\].*got torch.float32 \[3\]"),
        (lambda: deviation_bound(U, [6], Q, torch.zeros(2, 2)), r"representatives must be .*\[1, 2\].*got .*\[2, 2\]"),
        (lambda: fixed_blocks(3, 4), "n_blocks must be at most length"),
        (lambda: fixed_blocks(3, 0), "n_blocks must be an integer >= 1, got 0"),
        (lambda: fenwick_blocks(0), "length must be an integer >= 1, got 0"),
    ],
)
def test_bad_input_is_refused_by_name(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@given(st.integers(1, 5000))
def test_fenwick_blocks_are_the_log_linear_levels(length):
    t = length - 1
    levels = [(t ^ s).bit_length() for s in range(length)]
    runs = [levels.count(level) for level in sorted(set(levels), reverse=True)]
    assert levels == sorted(levels, reverse=True)
    assert fenwick_blocks(length) == runs


@given(st.integers(1, 500), st.data())
def test_fixed_blocks_cover_and_differ_by_one_at_most(length, data):
    n_blocks = data.draw(st.integers(1, length))
    blocks = fixed_blocks(length, n_blocks)
    assert len(blocks) == n_blocks and sum(blocks) == length
    assert max(blocks) - min(blocks) <= 1
