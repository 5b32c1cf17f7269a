"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dla.ops.cpu import library


@pytest.fixture(params=["avx512", "avx2", "portable"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of the instruction sets that this machine has."""
    before = library.level()
    if library.level(request.param) != request.param:
        library.level(before)
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    library.level(before)
