"""JSON Lines through kills, full disks and damage."""

import subprocess
import sys

import pytest

from dla.report.jsonl import DAMAGED, Writer, parse, read


def values(path):
    return [line.value for line in read(path)]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "folder" / "lines.jsonl"
    assert values(path) == []
    for part in ([{"a": 1}, "ü"], [None, [3]]):
        with Writer(path) as lines:
            for value in part:
                lines.append(value)
    assert values(path) == [{"a": 1}, "ü", None, [3]]
    assert [line.number for line in read(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("end", "kept"),
    [(b'{"b": 2}\n', True), (b'{"b": 2}', True), (b'{"b": ', False), (b"\xff\xfe", False), (b"[" * 100_000, False)],
)
def test_the_end_is_mended_in_place(end, kept, tmp_path):
    """A whole last line is kept, newline or not; a cut one is cut off, and what comes next begins a line of its own."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + end)
    inode = path.stat().st_ino
    with Writer(path) as lines:
        lines.append({"c": 3})
    assert values(path) == [{"a": 1}, *([{"b": 2}] if kept else []), {"c": 3}]
    assert path.stat().st_ino == inode
    assert path.read_bytes().endswith(b'\n{"c": 3}\n')


def test_reading_changes_nothing(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": ')
    before = path.read_bytes()
    assert values(path) == [{"a": 1}, DAMAGED]
    assert [line.ended for line in read(path)] == [True, False]
    assert path.read_bytes() == before


def test_damaged_lines_are_told_apart():
    assert parse("null") is None and parse("nul") is DAMAGED
    assert parse(b"\xff") is DAMAGED and parse("[" * 100_000) is DAMAGED


FULL = """
import resource, signal, sys
from pathlib import Path
from dla.report.jsonl import Writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
limit = path.stat().st_size + 20
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
with Writer(path, durable=True) as lines:
    try:
        lines.append("x" * 1000)
    except OSError:
        print("full")
    lines.append(2)
"""


def test_a_full_disk_loses_nothing(tmp_path):
    """What did not fit is taken back, so that the file holds whole lines alone."""
    path = tmp_path / "lines.jsonl"
    with Writer(path) as lines:
        lines.append({"a": 1})
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "full\n"
    assert path.read_bytes() == b'{"a": 1}\n2\n'


KILLED = """
import sys
from pathlib import Path
from dla.report.jsonl import Writer
with Writer(Path(sys.argv[1])) as lines:
    for i in range(10**9):
        lines.append({"i": i, "more": "x" * 200})
"""


def test_kills_lose_at_most_the_last_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)])
        start = path.stat().st_size if path.exists() else 0
        while not path.exists() or path.stat().st_size < start + 50_000:
            assert process.poll() is None
        process.kill()
        process.wait()
        lines = list(read(path))
        assert all(line.whole for line in lines[:-1])
    counts = [line.value["i"] for line in lines if line.whole]
    second = counts.index(0, 1)
    assert counts == [*range(second), *range(len(counts) - second)]


def test_only_one_writer_at_the_end(tmp_path):
    """Two that append in turn do not write over each other."""
    path = tmp_path / "lines.jsonl"
    with Writer(path) as one, Writer(path) as other:
        one.append(1)
        other.append(2)
        one.append(3)
    assert values(path) == [1, 2, 3]
