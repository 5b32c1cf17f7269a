"""Sequences as a forest; what is read with it is tested in tests/evaluation/test_adapter.py."""

from hypothesis import given
from hypothesis import strategies as st

from dla.models.forest import Node, measure, plan


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12),
    st.integers(0, 4),
    st.integers(1, 9),
)
def test_a_plan_holds_the_sequences(sequences: list[list[int]], fork: int, longest: int) -> None:
    ends = plan(sequences, fork, longest)
    for sequence, end in zip(sequences, ends, strict=True):
        path: list[Node] = list(end.path())[::-1]
        assert [x for node in path for x in node.tokens[node.start : node.end]] == sequence
        assert all(1 <= node.end - node.start <= longest for node in path)
    roots = measure(ends)
    assert sum(root.size for root in roots) <= sum(map(len, sequences))
    if fork == 0:  # every prefix once
        prefixes = {tuple(x[:n]) for x in sequences for n in range(1, len(x) + 1)}
        assert sum(root.size for root in roots) == len(prefixes)
