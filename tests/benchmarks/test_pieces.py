"""Reading at once, in pieces and one by one, on a model that is felt to have a memory."""

import pytest

from benchmarks.pieces import MEMORIES, measure


@pytest.mark.parametrize("memory", MEMORIES)
def test_they_agree_and_the_context_is_felt(memory: str) -> None:
    found = measure("gdn-tiny", memory, "float32", length=24, piece=7)
    assert 0 < float(str(found["pieces"])) < 1e-4
    assert 0 < float(str(found["one by one"])) < 1e-4
    assert float(str(found["without the first half"])) > 1e-2
