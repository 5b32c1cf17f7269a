"""Text as a task: what is asked, where, and from which part."""

import gzip
import json

import pytest
import torch

from dla.lab.tasks import NO_TARGET, make_task
from dla.lab.tasks.text import library_text


def test_the_next_byte_is_asked_for():
    batch = make_task("text", length=40).sample(3, 7)
    assert batch.ids.shape == (3, 40)
    assert torch.equal(batch.targets[:, :-1], batch.ids[:, 1:])
    assert bytes(batch.ids[0].tolist()) + bytes([int(batch.targets[0, -1])]) in library_text("train").tobytes()
    assert torch.equal(make_task("text", length=40).sample(3, 7).ids, batch.ids)
    assert not torch.equal(make_task("text", length=40).sample(3, 8).ids, batch.ids)
    assert (batch.source == -1).all()


def test_only_the_positions_asked_for():
    whole = make_task("text", length=40).sample(2, 7)
    part = make_task("text", length=40, since=8, until=20).sample(2, 7)
    assert torch.equal(whole.ids, part.ids)
    assert torch.equal(part.targets[:, 8:20], whole.targets[:, 8:20])
    assert (part.targets[:, :8] == NO_TARGET).all() and (part.targets[:, 20:] == NO_TARGET).all()


def test_the_parts_share_no_module():
    train, held = library_text("train"), library_text("validation")
    assert len(train) + len(held) == len(library_text())
    assert 0.02 < len(held) / len(library_text()) < 0.3
    sample = held[1000:1200].tobytes()
    assert sample in library_text().tobytes() and sample not in train.tobytes()


def test_books(tmp_path, monkeypatch):
    monkeypatch.delenv("DLA_DATA", raising=False)
    task = make_task("text", corpus="books", length=8, part="validation")
    with pytest.raises(ValueError, match="DLA_DATA"):
        task.sample(1, 0)
    (tmp_path / "books").mkdir()
    monkeypatch.setenv("DLA_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="there is no"):
        task.sample(1, 0)
    with gzip.open(tmp_path / "books" / "valid.jsonl.gz", "wt") as lines:
        for text in ("abcdefgh", "ijklmnop"):
            lines.write(json.dumps({"text": text}) + "\n")
    text = bytes(task.sample(1, 0).ids[0].tolist()).decode()
    assert text in "abcdefghijklmnop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": "web"}, "corpus must be one of"),
        ({"part": "test"}, "part must be one of"),
        ({"until": 300}, "until must be at most 256"),
        ({"since": 256}, "nothing would be asked"),
        ({"since": 9, "until": 9}, "nothing would be asked"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("text", **options)
