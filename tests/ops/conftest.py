"""Fixtures of the operator tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dla.ops.cpu import library


@pytest.fixture(params=["compiled", "torch"])
def any_scan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Decisions by the compiled scan, and by the torch one that stands in where it was not built."""
    if request.param == "torch":
        monkeypatch.setenv("DLA_NO_COMPILED", "1")
    library.forget()
    if request.param == "compiled" and library.missing() is not None:
        pytest.skip("the compiled scan was not built")
    yield request.param
    library.forget()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen tokens a chunk, one chunk at a time: short streams then cross chunks, groups and checkpoints."""
    monkeypatch.setattr("dla.ops.chunked.attend.chunk_length", lambda *args, **options: 16)
    monkeypatch.setattr("dla.ops.chunked.engine.GROUP_BYTES", 1)


@pytest.fixture(params=["one chunk a group", "many chunks a group"])
def any_groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen tokens a chunk, alone or many together: sequences then end inside groups and between them."""
    monkeypatch.setattr("dla.ops.chunked.attend.chunk_length", lambda *args, **options: 16)
    monkeypatch.setattr("dla.ops.chunked.engine.GROUP_BYTES", 1 if request.param.startswith("one") else 1 << 30)
