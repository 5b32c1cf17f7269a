"""Feeds: every token and target by hand, any number of ranks, and going on from any position."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dla.models.loss import IGNORED
from dla.text import ByteTokenizer
from dla.training.data.feed import BatchShape, DataError, Micro, ShardFeed, evaluation_batches, prefetched, reading
from dla.training.data.order import Mixture
from dla.training.data.shard_writer import build
from dla.training.data.shards import Shards
from dla.training.data.stream import StreamFeed
from dla.training.recipe import Source

LENGTH = 16


def texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(1, 41, count)]


CORPORA = [texts(60, 0), texts(25, 1)]


@pytest.fixture
def shards(tmp_path: Path) -> list[Shards]:
    return [
        build(corpus, tmp_path / str(i), ByteTokenizer(), tokenizer_name="bytes", shard_tokens=100)
        for i, corpus in enumerate(CORPORA)
    ]


def flat(documents: list[str]) -> tuple[list[int], list[int]]:
    """The tokens of all documents and the number of the document of each."""
    tokens: list[int] = []
    owner: list[int] = []
    for number, text in enumerate(documents):
        tokens += [*text.encode(), 0]
        owner += [number] * (len(text) + 1)
    return tokens, owner


def expected_row(documents: list[str], index: int, packed: bool) -> tuple[list[int], list[int], list[int]]:
    """ids, targets and positions of a sequence, token by token."""
    tokens, owner = flat(documents)
    ids, targets, positions = [], [], []
    for p in range(index * LENGTH, (index + 1) * LENGTH):
        ids.append(tokens[p])
        same = owner[p] == owner[p + 1]
        targets.append(tokens[p + 1] if same or not packed else IGNORED)
        begins = p == index * LENGTH or (packed and owner[p] != owner[p - 1])
        positions.append(0 if begins else positions[-1] + 1)
    return ids, targets, positions


def positions_of(micro: Micro) -> Tensor:
    if micro.positions is not None:
        return micro.positions
    return torch.arange(micro.ids.shape[1]).expand_as(micro.ids)


def joined(micros: list[Micro]) -> list[tuple[list[int], list[int], list[int]]]:
    return [
        (ids, targets, positions)
        for micro in micros
        for ids, targets, positions in zip(
            micro.ids.tolist(), micro.targets.tolist(), positions_of(micro).tolist(), strict=True
        )
    ]


def shard_feed(shards: list[Shards], **options: Any) -> ShardFeed:
    return ShardFeed(shards, [1.0, 2.0], shape_of(**options), 3)


def shape_of(**options: Any) -> BatchShape:
    return BatchShape(**{"length": LENGTH, "documents": "packed", "sequences": 6, **options})


@pytest.mark.parametrize("documents", ["packed", "concatenated"])
def test_every_token_and_target(shards: list[Shards], documents: str) -> None:
    sizes = [(len(flat(corpus)[0]) - 1) // LENGTH for corpus in CORPORA]
    sources, indices = Mixture(sizes, [1.0, 2.0], 3).lookup(0, 360)
    feed = shard_feed(shards, documents=documents)
    seen = set()
    for step, (micros, position) in enumerate(islice(feed.batches(), 60)):
        assert position == {"step": step + 1}
        assert micros[0].ids.dtype == micros[0].targets.dtype == torch.int64
        for row, got in enumerate(joined(micros)):
            source, index = int(sources[step * 6 + row]), int(indices[step * 6 + row])
            seen.add((source, index))
            assert got == expected_row(CORPORA[source], index, documents == "packed")
    assert len(seen) == sum(sizes)


def test_the_end_token_is_predicted_and_predicts_nothing(tmp_path: Path) -> None:
    one = build(["abc", "defg", "hijklmn"], tmp_path / "x", ByteTokenizer(), tokenizer_name="bytes")
    feed = ShardFeed([one], [1.0], BatchShape(16, "packed", 1), 0)
    ((micro,), _) = next(feed.batches())
    assert bytes(micro.ids[0].tolist()) == b"abc\0defg\0hijklmn"
    x = IGNORED
    assert micro.targets[0].tolist() == [*b"bc\0", x, *b"efg\0", x, *b"ijklmn\0"]
    assert micro.positions is not None
    assert micro.positions[0].tolist() == [*range(4), *range(5), *range(7)]


def test_positions_only_where_a_document_begins_inside(tmp_path: Path) -> None:
    one = build(["a" * 15, "b" * 100], tmp_path / "x", ByteTokenizer(), tokenizer_name="bytes")
    feed = ShardFeed([one], [1.0], BatchShape(16, "packed", 7, micro=1), 0)
    micros, _ = next(feed.batches())
    assert [micro.positions for micro in micros] == [None] * 7
    (first,) = [micro for micro in micros if micro.ids[0, 0] == ord("a")]
    assert first.targets[0, -1] == IGNORED  # the document begins with the next row
    assert sum(int((micro.targets == IGNORED).sum()) for micro in micros) == 1


@pytest.mark.parametrize("micro, sizes", [(0, [6]), (4, [4, 2]), (1, [1] * 6), (9, [6])])
def test_micro_batches(shards: list[Shards], micro: int, sizes: list[int]) -> None:
    whole, _ = next(shard_feed(shards).batches())
    micros, _ = next(shard_feed(shards, micro=micro).batches())
    assert [len(m.ids) for m in micros] == sizes
    assert joined(micros) == joined(whole)


class Rows:
    """A dataset that cannot tell where it is."""

    opened = 0

    def __init__(self, rows: list[str]) -> None:
        self.rows = rows
        Rows.opened += 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"text": row} for row in self.rows)


class KnowingRows(Rows):
    """A dataset that can, as those of the datasets library: a state counts for every later pass too."""

    at = first = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for at in range(self.first, len(self.rows)):
            self.at = at + 1
            yield {"text": self.rows[at]}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = self.at = state["at"]


def stream_feed(kind: type[Rows] = Rows, **options: Any) -> StreamFeed:
    def open_source(source: Source) -> Rows:
        return kind(["", *CORPORA[int(source.path)], ""])

    return StreamFeed([Source("0"), Source("1")], [1.0, 2.0], ByteTokenizer(), shape_of(**options), 3, open_source)


@pytest.fixture(params=["shards", "rows", "knowing rows"])
def make_feed(
    request: pytest.FixtureRequest, shards: list[Shards], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    monkeypatch.setattr("dla.training.data.stream.BATCH_DOCUMENTS", 7)
    if request.param == "shards":
        return lambda **options: shard_feed(shards, **options)
    return lambda **options: stream_feed(KnowingRows if request.param == "knowing rows" else Rows, **options)


def test_ranks_together_are_one_rank(make_feed: Callable[..., Any]) -> None:
    alone = make_feed().batches()
    ranks = {world: [make_feed(rank=r, world=world, micro=1).batches() for r in range(world)] for world in (2, 3, 6)}
    for _ in range(12):
        whole = joined(next(alone)[0])
        for feeds in ranks.values():
            assert [row for feed in feeds for row in joined(next(feed)[0])] == whole


def test_going_on_from_any_position(make_feed: Callable[..., Any]) -> None:
    steps = list(islice(make_feed().batches(), 45))
    for at in [1, 2, 3, 7, 20, 30, 41]:
        position = json.loads(json.dumps(steps[at - 1][1]))
        again = list(islice(make_feed(rank=1, world=2).batches(position), 4))
        for (micros, after), (expected, expected_after) in zip(again, steps[at:], strict=False):
            assert joined(micros) == joined(expected)[3:]
            assert after == expected_after


@pytest.mark.parametrize("documents", ["packed", "concatenated"])
def test_a_stream_by_hand(documents: str) -> None:
    """Rows come in the data's order, again and again, and a document may go on over the end of an epoch."""
    endless = [corpus * 20 for corpus in CORPORA]
    sources, turns = stream_feed().draws.lookup(0, 6 * 40)
    got = [row for micros, _ in islice(stream_feed(documents=documents).batches(), 40) for row in joined(micros)]
    for row, source, turn in zip(got, sources.tolist(), turns.tolist(), strict=True):
        assert row == expected_row(endless[source], turn, documents == "packed")


def test_a_stream_counts_epochs_and_documents() -> None:
    *_, (_, position) = islice(stream_feed().batches(), 40)
    used = [16 * n for n in np.bincount(stream_feed().draws.lookup(0, 240)[0]).tolist()]
    for state, tokens, corpus in zip(position["streams"], used, CORPORA, strict=True):
        assert state["epoch"] == tokens // len(flat(corpus)[0])
        assert 0 < state["documents"] <= len(corpus) + 2


def test_a_dataset_with_a_state_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dla.training.data.stream.BATCH_DOCUMENTS", 2)
    *_, (_, position) = islice(stream_feed(KnowingRows).batches(), 3)
    starts = []

    class Watched(KnowingRows):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            starts.append(self.first)
            return super().__iter__()

    next(stream_feed(Watched).batches(position))
    assert starts == [state["documents"] for state in position["streams"]] and min(starts) > 2


def test_a_stream_without_text_is_refused() -> None:
    shape = BatchShape(4, "packed", 1)
    feed = StreamFeed([Source("empty")], [1.0], ByteTokenizer(), shape, 0, lambda source: [{"text": ""}])
    with pytest.raises(ValueError, match="the source empty has no documents"):
        next(feed.batches())


def test_a_stream_of_the_datasets_library(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for part in range(3):
        rows = CORPORA[0][part * 20 : part * 20 + 20]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))

    def feed() -> StreamFeed:
        sources = [Source(f"hf:json:{tmp_path}/*.jsonl")]
        return StreamFeed(sources, [1.0], ByteTokenizer(), shape_of(sequences=5), 0)

    steps = list(islice(feed().batches(), 36))  # over two epochs
    got = [row for micros, _ in steps for row in joined(micros)]
    assert got == [expected_row(CORPORA[0] * 4, i, True) for i in range(180)]
    assert steps[-1][1]["streams"][0]["epoch"] >= 2
    for at in [1, 9, 16, 17, 31]:
        position = json.loads(json.dumps(steps[at - 1][1]))
        again = list(islice(feed().batches(position), 4))
        assert [joined(micros) for micros, _ in again] == [joined(micros) for micros, _ in steps[at : at + 4]]


@pytest.mark.parametrize("wrong, message", [
    ({"world": 4}, "sequences=6 cannot be divided by the 4 ranks"),
    ({"rank": 2, "world": 2}, "rank must be in 0 … 1, got 2"),
    ({"documents": "glued"}, "documents must be one of 'packed', 'concatenated', got 'glued'"),
    ({"micro": -1}, "micro must be an integer >= 0, got -1"),
    ({"length": 0}, "length must be an integer >= 1, got 0"),
    ({"length": 5000}, r"has \d+ tokens here, a sequence of length 5000 needs 5001"),
])  # fmt: skip
def test_refusals(shards: list[Shards], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_feed(shards, **wrong)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("sequences, micro", [(10, 0), (10, 2), (7, 3), (1, 2), (1000, 16)])
def test_evaluation(shards: list[Shards], world: int, sequences: int, micro: int) -> None:
    def rank_of(rank: int, world: int) -> list[Micro]:
        shape = shape_of(sequences=4 * world, micro=micro, rank=rank, world=world)  # of training, four a rank
        return list(evaluation_batches(shards, shape, sequences))

    ranks = [rank_of(rank, world) for rank in range(world)]
    assert len({len(micros) for micros in ranks}) == 1
    got = [row for micros in ranks for row in joined(micros) if any(t != IGNORED for t in row[1])]
    sizes = [(s.tokens - 1) // LENGTH for s in shards]
    every = [expected_row(CORPORA[source], i, True) for source, size in enumerate(sizes) for i in range(size)]
    places = sorted(every.index(row) for row in got)
    assert len(set(places)) == len(places) == min(sequences, sum(sizes))
    assert sorted(got) == sorted(joined(rank_of(0, 1)))
    if len(places) > 1:
        gaps = np.diff([*places, len(every)])
        assert gaps.max() - gaps.min() <= 1
    assert all(len(m.ids) <= (micro or 4) for micros in ranks for m in micros)


def threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


def test_prefetching_runs_ahead_in_order() -> None:
    made = []

    def items() -> Iterator[int]:
        for i in range(20):
            made.append(i)
            yield i

    ahead = prefetched(items(), depth=3)
    assert next(ahead) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3, 4]  # given, three waiting, one in hand
    assert list(ahead) == list(range(1, 20))
    assert threads() == 0


def test_prefetching_passes_errors_on() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    ahead = prefetched(items())
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="broken"):
        next(ahead)
    assert threads() == 0


def test_prefetching_can_be_closed(shards: list[Shards]) -> None:
    ahead = prefetched(shard_feed(shards).batches())
    plain = shard_feed(shards).batches()
    for _ in range(3):
        assert joined(next(ahead)[0]) == joined(next(plain)[0])
    assert threads() == 1
    ahead.close()
    assert threads() == 0


def test_what_is_wrong_with_the_data_is_told_from_what_is_not(shards: list[Shards]) -> None:
    def items(error: BaseException) -> Iterator[int]:
        yield 1
        raise error

    for error in (ValueError("a token"), OSError("a disk")):
        with pytest.raises(DataError, match=str(error)):
            list(reading(items(error)))
    with pytest.raises(KeyError):
        list(reading(items(KeyError("a mistake"))))
    ahead = reading(prefetched(shard_feed(shards).batches()))
    next(ahead)
    assert threads() == 1
    ahead.close()
    assert threads() == 0
