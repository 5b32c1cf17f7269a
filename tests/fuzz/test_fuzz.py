"""`make fuzz` in short, and that it notices what it is there for."""

from pathlib import Path

import pytest

from tests.fuzz import planted
from tests.fuzz.run import GOOD, Result, Settings, counts, fuzz, repeat

FILES = 300


def _told(results: list[Result]) -> str:
    return "\n".join(f"{x.outcome}: {x.format} {x.file} ({x.mutation}): {x.message[:500]}" for x in results)


def test_no_mutated_file_does_harm(tmp_path: Path) -> None:
    """Every file loads, or is refused in one line. `make fuzz` does the same with many more files."""
    results = fuzz(Settings(files=FILES, workers=1, out=tmp_path))
    wrong = [result for result in results if result.outcome not in GOOD]
    assert not wrong, _told(wrong)
    assert {result.outcome for result in results} == set(GOOD)
    assert len({result.format for result in results}) == 14


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, dict[str, Result]]:
    out = tmp_path_factory.mktemp("faults")
    settings = Settings(files=len(planted.FAULTS), workers=1, limit=2, out=out, formats="tests.fuzz.planted")
    return settings, {result.format: result for result in fuzz(settings)}


@pytest.mark.parametrize("name", planted.FAULTS)
def test_every_planted_fault_is_noticed(name: str, faults: tuple[Settings, dict[str, Result]]) -> None:
    result = faults[1][name]
    assert result.outcome == planted.FAULTS[name][0], result.message
    assert bool(result.kept) == (result.outcome not in GOOD)
    if result.kept:
        kept = Path(result.kept)
        assert (kept / "files" / "file.txt").read_bytes() != planted.SAMPLE
        assert (kept / "why.txt").read_text().startswith(result.outcome)


def test_a_crash_says_where_it_was(faults: tuple[Settings, dict[str, Result]]) -> None:
    crash, hang = faults[1]["null-pointer"], faults[1]["loop"]
    assert crash.message.startswith("ended by SIGSEGV") and "string_at" in crash.message
    assert hang.message.startswith("no answer in 2 s") and "_hang" in hang.message
    assert all(result.mutation and result.file == "file.txt" for result in (crash, hang))


def test_a_failure_can_be_repeated(faults: tuple[Settings, dict[str, Result]]) -> None:
    settings, found = faults
    for name in ("null-pointer", "key"):
        answer = repeat(settings, Path(found[name].kept))
        assert answer["outcome"] == found[name].outcome


def test_counts() -> None:
    results = [Result("a", 0, "loaded", "cut"), Result("a", 1, "refused", "cut"), Result("b", 0, "hang")]
    rows = counts(results, "format")
    assert [(row["format"], row["files"], row["hang"]) for row in rows] == [("a", 2, 0), ("b", 1, 1), ("all", 3, 1)]
    assert [row["mutation"] for row in counts(results, "mutation")] == ["?", "cut", "all"]
