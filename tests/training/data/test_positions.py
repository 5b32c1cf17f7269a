"""Positions of streams, as a damaged checkpoint may hold them, and datasets that break on the way."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from tests.training.data.test_feed import KnowingRows, Rows, stream_feed


def stream_position() -> dict[str, Any]:
    *_, (_, position) = islice(stream_feed(KnowingRows).batches(), 3)
    found: dict[str, Any] = json.loads(json.dumps(position))
    return found


def _stream(**change: Any) -> Callable[[dict[str, Any]], object]:
    return lambda position: position["streams"][1].update(change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda position: position.update(step="3"), "position.step must be an integer >= 0, got '3'"),
        (lambda position: position.update(step=-1), "position.step must be an integer >= 0, got -1"),
        (lambda position: position.pop("step"), "position.step is missing"),
        (lambda position: position.pop("streams"), "position.streams is missing"),
        (lambda position: position.update(streams={}), "position.streams must be a list of objects {…}, got {}"),
        (lambda position: position["streams"].pop(), "position.streams must be a list of 2, one for each source"),
        (
            lambda position: position["streams"].append(position["streams"][0]),
            "position.streams must be a list of 2, one for each source",
        ),
        (lambda position: position.update(streams=[1, 2]), r"position.streams\[0\] must be an object {…}, got 1"),
        (_stream(epoch=None), r"streams\[1\].epoch must be an integer >= 0, got None"),
        (_stream(documents=1.5), r"streams\[1\].documents must be an integer >= 0, got 1.5"),
        (_stream(texts=True), r"streams\[1\].texts must be an integer >= 0, got True"),
        (_stream(tokens="abc"), r"streams\[1\].tokens must be a list of integers >= 0, got 'abc'"),
        (_stream(tokens=[1, "x"]), r"streams\[1\].tokens\[1\] must be an integer >= 0, got 'x'"),
        (
            _stream(tokens=[1, 256], starts=[]),
            r"streams\[1\].tokens must be tokens below 256, as the tokenizer",
        ),
        (
            _stream(tokens=[1, 2**70], starts=[]),
            r"streams\[1\].tokens must be tokens below 256, as the tokenizer",
        ),
        (_stream(starts=[0]), r"streams\[1\].starts must be rising numbers from 1 to below the \d+ tokens, got \[0\]"),
        (_stream(starts=[5, 5]), r"streams\[1\].starts must be rising numbers from 1 to below the \d+ tokens, got"),
        (_stream(starts=[10**6]), r"streams\[1\].starts must be rising numbers from 1 to below the \d+ tokens, got"),
        (_stream(dataset=7), r"streams\[1\].dataset must be an object {…} or None, got 7"),
    ],
)
def test_positions_that_are_none(change: Callable[[dict[str, Any]], object], said: str) -> None:
    feed, position = stream_feed(KnowingRows), stream_position()
    feed.check(position)
    change(position)
    with pytest.raises(ValueError, match=said):
        feed.check(position)


def test_a_dataset_that_does_not_take_its_position() -> None:
    position = stream_position()
    position["streams"][0]["dataset"] = {"another": 1}
    stream_feed(KnowingRows).check(position)
    with pytest.raises(ValueError, match=r"source 0, after \d+ .* take the position of the checkpoint: KeyError"):
        next(stream_feed(KnowingRows).batches(position))
    with pytest.raises(ValueError, match=r"source 0, after \d+ .* take the position of the checkpoint: Attr"):
        next(stream_feed(Rows).batches(position))


def test_a_dataset_that_breaks() -> None:
    class Broken(Rows):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield {"text": "one"}
            raise RuntimeError("no network\nat all")

    with pytest.raises(ValueError, match="after 1 documents, cannot be read: RuntimeError: no network at all"):
        next(stream_feed(Broken).batches())
