"""The record of a checkpoint: every field is checked by name, and the files that it lists are all that is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dla.cli import main
from dla.training.checkpoint import Checkpoints
from dla.training.distributed import World
from dla.training.record import CorruptError, RefusedError, check
from tests.training.checkpoints import STEP, assert_refused, change_record, resume, saved_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return saved_run(tmp_path)


def test_files_that_the_record_does_not_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "checkpoints" / STEP
    change_record(checkpoint, lambda record: record["files"].pop("__0_0.distcp"))
    assert_refused(run, "relative_path must be a file of the record, got '__0_0.distcp'", capsys)
    change_record(checkpoint, lambda record: record["files"].clear())
    assert_refused(run, ".metadata: it is not among the files of the record", capsys)


def test_links_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "checkpoints" / STEP / "__0_0.distcp"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert_refused(run, "__0_0.distcp is a link, accepted are the files themselves", capsys)


def _about(**change: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["files"][".metadata"].update(change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record.update(step="2"), "step must be an integer >= 0, got '2'"),
        (lambda record: record.update(step=True), "step must be an integer >= 0, got True"),
        (lambda record: record.update(step=4), "step must be that of the folder's name, step-00000002, got 4"),
        (lambda record: record.pop("step"), "step is missing"),
        (lambda record: record.update(position=None), "position must be an object {…}, got None"),
        (lambda record: record.update(position={}), "position.step is missing"),
        (lambda record: record["position"].update(step=3), "position.step must be step, 2, got 3"),
        (lambda record: record.update(identity=[]), "identity must be an object {…}, got []"),
        (lambda record: record.update(random={}), "random must be a list of objects {…}, got {}"),
        (lambda record: record.update(random=[1]), "random[0] must be an object {…}, got 1"),
        (lambda record: record.update(random=[{"cpu": 1}]), "random[0].cpu must be a random state in base64, got 1"),
        (lambda record: record.update(random=[{"cpu": "?"}]), "random[0].cpu must be a random state in base64, got"),
        (lambda record: record.update(files=[]), "files must be an object {…}, got []"),
        (lambda record: record["files"].update(x=1), "files.x must be an object {…}, got 1"),
        (_about(bytes="1"), "files..metadata.bytes must be an integer >= 0, got '1'"),
        (_about(sha256=None), "files..metadata.sha256 must be a SHA-256 of 64 digits 0-9 a-f, got None"),
        *(
            (lambda record, name=name: record["files"].update({name: {"bytes": 0, "sha256": "0" * 64}}),
             "files must be names of files in the folder itself, got ")
            for name in ("../x", "/etc/passwd", "..", ".", "", "a\\b", "a\0", "record.json", "C:x")
        ),
    ],
)  # fmt: skip
def test_records_of_another_kind(
    run: Path, change: Callable[[dict[str, Any]], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run / "checkpoints" / STEP
    change_record(checkpoint, change)
    with pytest.raises(CorruptError) as corrupt:
        check(checkpoint)
    assert f"{checkpoint} is not a whole checkpoint: record.json: {said}" in str(corrupt.value)
    assert main(["train", "export", str(run), "--step", "2"]) == 2
    assert capsys.readouterr().err == f"dla train export: {corrupt.value}\n"


def test_records_that_are_no_json(run: Path) -> None:
    checkpoint = run / "checkpoints" / STEP
    for content in (b"", b"[" * 200_000, b"\xff", b"1" * 10_000, b"[1]", b"null"):
        (checkpoint / "record.json").write_bytes(content)
        with pytest.raises(CorruptError) as corrupt:
            check(checkpoint)
        assert "record.json" in str(corrupt.value) and "\n" not in str(corrupt.value)


def test_random_states_that_fit_no_generator(run: Path) -> None:
    change_record(run / "checkpoints" / STEP, lambda record: record.update(random=[{"cpu": "AAAA"}]))
    with pytest.raises(RefusedError, match=r"record\.json: random\[0\]"):
        resume(run)


def test_folders_with_other_names_are_left_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step-²²²²²²²²", "step-abcdefgh", "step-5", "step-000000002", "step-"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / "step-00000009").touch()
    assert Checkpoints(run / "checkpoints", World(), keep=2).steps() == [2]
    assert main(["train", "export", str(run), "--step", "5"]) == 2
    assert "there are those of 2\n" in capsys.readouterr().err
    assert main(["train", "export", str(run)]) == 0
