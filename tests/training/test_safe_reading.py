"""Checkpoints that somebody else made: nothing in them runs, and what does not belong there is refused by name."""

import copy
import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from dla.cli import main
from dla.training.checkpoint import Checkpoints, _state, load_weights
from dla.training.checkpoint_metadata import read_metadata
from dla.training.distributed import World
from dla.training.pickle_data import parse
from dla.training.record import RefusedError, check
from tests.training.checkpoints import (
    STEP,
    Call,
    assert_refused,
    change_metadata,
    fit,
    replace_entry,
    resume,
    saved_run,
    trainer_of,
)
from tests.training.common import losses, saved_steps, train, trained, write_settings

WEIGHT = "model.model.norm.weight"
OPTION = "optimizer.param_groups.model.norm.weight.eps"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return saved_run(tmp_path)


# What earlier versions wrote.


@pytest.mark.parametrize("name", ["one_rank", "two_ranks"])
def test_checkpoints_of_earlier_versions_are_read(tmp_path: Path, name: str) -> None:
    """Every weight, moment and option, against what torch's own reading gave when they were written."""
    run = saved_run(tmp_path, name)
    expected = json.loads((run / "expected.json").read_text())
    trainer = trainer_of(run)
    checkpoints = Checkpoints(run / "checkpoints", World(), keep=2)
    record = checkpoints.newest()
    assert record is not None and record["step"] == 2
    checkpoints.load(record, trainer.model, trainer.optimizer)
    found = {}
    for part, values in _state(trainer.model, trainer.optimizer).items():
        for key, x in values.items():
            if isinstance(x, torch.Tensor):
                x = hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
            found[f"{part}.{key}"] = list(x) if isinstance(x, tuple) else x
    assert len(expected) > 200 and found == expected


@pytest.mark.parametrize("name", ["one_rank", "two_ranks"])
def test_checkpoints_of_earlier_versions_are_exported(tmp_path: Path, name: str) -> None:
    from dla.models import DLAForCausalLM

    run = saved_run(tmp_path, name)
    assert main(["train", "export", str(run)]) == 0
    other = trainer_of(run).model
    load_weights(run / "checkpoints" / STEP, other)
    model = DLAForCausalLM.from_pretrained(run / "model")
    for (key, x), (_, y) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(x, y), key


# What would run.


def make_file(path: str) -> None:
    Path(path).touch()


def dotted(module: str, name: str, argument: str) -> bytes:
    """A call of what is found under a name with dots in it, in a module that is known."""
    parts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name, argument)]
    return b"\x80\x04" + parts[0] + parts[1] + b"\x93" + parts[2] + b"\x85R."


ATTACKS: dict[str, Callable[[str], bytes]] = {
    "os.system": lambda mark: pickle.dumps(Call(os.system, f"touch {mark}")),
    "os.system, protocol 0": lambda mark: pickle.dumps(Call(os.system, f"touch {mark}"), protocol=0),
    "os.system, protocol 2": lambda mark: pickle.dumps(Call(os.system, f"touch {mark}"), protocol=2),
    "eval": lambda mark: pickle.dumps(Call(eval, f"open({mark!r}, 'w')")),
    "a function of one's own": lambda mark: pickle.dumps(Call(make_file, mark)),
    "a module of DCP's module": lambda mark: dotted(dcp_metadata.__name__, "os.mkdir", mark),
    "a callable of DCP": lambda mark: pickle.dumps(Call(dcp_to_torch_save, str(Path(mark).parent), mark)),
    "torch.save": lambda mark: pickle.dumps(Call(torch.save, 1, mark)),
    "inside": lambda mark: pickle.dumps({"a": [(1, Call(os.system, f"touch {mark}"))]}),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_metadata_that_would_run(run: Path, attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "checkpoints" / STEP
    good, mark = (checkpoint / ".metadata").read_bytes(), checkpoint / "ran"
    data = ATTACKS[attack](str(mark))
    pickle.loads(data)
    assert mark.exists(), "the attack is none"
    mark.rmdir() if mark.is_dir() else mark.unlink()
    (checkpoint / ".metadata").write_bytes(data)
    fit(checkpoint)
    assert_refused(run, ".metadata: ", capsys)
    assert not mark.exists()

    metadata = pickle.loads(good)  # the same in a part that is not even needed
    metadata.planner_data = Call(os.system, f"touch {mark}")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    fit(checkpoint)
    assert_refused(run, "it names posix.system, which is no part of such a file", capsys)
    assert not mark.exists()


def test_training_does_not_go_on_from_metadata_that_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run, mark = write_settings(tmp_path, "single"), tmp_path / "run", tmp_path / "ran"
    trained(recipe, run, "--schedule.steps", 4, "--checkpoint.export", "false")
    checkpoint = run / "checkpoints" / "step-00000004"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Call(os.system, f"touch {mark}")))
    fit(checkpoint)
    capsys.readouterr()
    before = losses(run)
    assert train(recipe, run) == 2
    error = capsys.readouterr().err
    assert error == (
        f"dla train: {checkpoint} is refused: .metadata: it names posix.system, which is no part of such a file\n"
    )
    assert not mark.exists() and saved_steps(run) == [4] and losses(run) == before


def test_classes_of_torch_cannot_be_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain unpicklers set attributes of whatever object they have, classes that they were allowed among them."""
    module = dcp_metadata.__name__.encode()
    data = b"\x80\x02c" + module + b"\nStorageMeta\nN}X\x07\x00\x00\x00changedK\x01s\x86b."
    pickle.loads(data)
    assert dcp_metadata.StorageMeta.changed == 1  # type: ignore[attr-defined]
    del dcp_metadata.StorageMeta.changed  # type: ignore[attr-defined]
    (run / "checkpoints" / STEP / ".metadata").write_bytes(data)
    fit(run / "checkpoints" / STEP)
    assert_refused(run, "it is damaged: there is", capsys)
    assert not hasattr(dcp_metadata.StorageMeta, "changed")


def as_bytes(metadata: Any) -> None:
    """Call the tensor of an entry bytes, which torch's own planner reads with pickle whatever is expected there."""
    metadata.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
    index = next(i for i in metadata.storage_data if i.fqn == WEIGHT)
    metadata.storage_data[dcp_metadata.MetadataIndex(WEIGHT)] = metadata.storage_data.pop(index)


def test_bytes_in_place_of_a_tensor(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, mark = run / "checkpoints" / STEP, run / "ran"
    replace_entry(checkpoint, WEIGHT, Call(os.system, f"touch {mark}"))
    assert_refused(run, f"the entry '{WEIGHT}' holds no plain value or tensor", capsys)
    change_metadata(checkpoint, as_bytes)
    plain = {"model": trainer_of(run).model.state_dict()}
    dcp.load(plain, checkpoint_id=checkpoint, no_dist=True)
    assert mark.exists(), "the attack is none"
    mark.unlink()
    assert_refused(run, f"the entry '{WEIGHT}' must be a tensor, got bytes", capsys)
    assert not mark.exists()


def test_options_that_would_run(run: Path) -> None:
    mark = run / "ran"
    replace_entry(run / "checkpoints" / STEP, OPTION, Call(os.system, f"touch {mark}"))
    with pytest.raises(RefusedError, match=f"the entry '{OPTION}' holds no plain value or tensor"):
        resume(run)
    assert main(["train", "export", str(run)]) == 0  # which has no use for options
    assert not mark.exists()


def test_entries_beside_are_not_read(run: Path) -> None:
    """One more entry than the model has stays where it is."""
    checkpoint, mark = run / "checkpoints" / STEP, run / "ran"
    replace_entry(checkpoint, OPTION, Call(os.system, f"touch {mark}"))

    def change(metadata: Any) -> None:
        index = next(i for i in metadata.storage_data if i.fqn == OPTION)
        metadata.state_dict_metadata["model.more"] = metadata.state_dict_metadata[OPTION]
        metadata.storage_data[dcp_metadata.MetadataIndex("model.more")] = copy.copy(metadata.storage_data[index])

    change_metadata(checkpoint, change)
    load_weights(checkpoint, trainer_of(run).model)
    assert not mark.exists()


# What does not belong there.


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(3), "must be a tensor of [4], got one of [3]"),
        (torch.zeros(4).to_sparse(), "must be a tensor of [4]"),
        ({"a": torch.zeros(4)}, "must be a tensor of [4], got {"),
        ("text", "must be a tensor of [4], got 'text'"),
    ],
)
def test_tensors_that_are_none(run: Path, value: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    replace_entry(run / "checkpoints" / STEP, WEIGHT, value)
    assert_refused(run, f"the entry '{WEIGHT}' {said}", capsys)


@pytest.mark.parametrize("raw", [b"", b"PK\x03\x04", b"x" * 500, b"\x80\x02}."])
def test_entries_that_torch_did_not_write(run: Path, raw: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    replace_entry(run / "checkpoints" / STEP, WEIGHT, None, raw)
    assert_refused(run, f"the entry '{WEIGHT}' ", capsys)


@pytest.mark.parametrize(
    ("option", "value"),
    [("eps", "much"), ("eps", None), ("betas", (0.9,)), ("betas", (0.9, "x")), ("maximize", 1.5), ("foreach", "yes")],
)
def test_options_of_another_kind(run: Path, option: str, value: Any) -> None:
    name = OPTION.replace("eps", option)
    replace_entry(run / "checkpoints" / STEP, name, value)
    with pytest.raises(RefusedError, match=f"the entry '{name}' must be a value such as .*, got"):
        resume(run)


def _info(metadata: Any, name: str = WEIGHT) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(_info(metadata), name, value)


def _entry(change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda metadata: change(metadata.state_dict_metadata[WEIGHT])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            _set("relative_path", "../step-00000002/__0_0.distcp"),
            "relative_path must be a file of the record, got '../",
        ),
        (_set("relative_path", "/etc/passwd"), "relative_path must be a file of the record, got '/etc/passwd'"),
        (_set("relative_path", "record.json"), "relative_path must be a file of the record, got 'record.json'"),
        (_set("relative_path", 5), "relative_path must be a file of the record, got 5"),
        (_set("offset", -1), "offset must be an integer >= 0, got -1"),
        (_set("offset", 10**12), "it ends at byte 1000000001"),
        (_set("length", 1.5), "there is a BINFLOAT in it"),
        (_set("length", True), "length must be an integer >= 0, got True"),
        (_set("transform_descriptors", ["zip"]), "transform_descriptors must be none, got ['zip']"),
        (_entry(lambda entry: entry.chunks.clear()), "are not all of its [4]"),
        (_entry(lambda entry: entry.chunks.append(entry.chunks[0])), "are not all of its [4]"),
        (_entry(lambda entry: setattr(entry.chunks[0], "sizes", torch.Size([3]))), "are not all of its [4]"),
        (_entry(lambda entry: setattr(entry.chunks[0], "sizes", torch.Size([2, 2]))), "are not all of its [4]"),
        (_entry(lambda entry: setattr(entry, "size", torch.Size([]))), "are not all of its []"),
        (_entry(lambda entry: setattr(entry, "size", (4,))), "must be a torch.Size, got (4,)"),
        (_entry(lambda entry: setattr(entry, "chunks", 3)), "must be a list, got 3"),
        (_entry(lambda entry: setattr(entry, "properties", None)), "must be those of a tensor"),
        (_entry(lambda entry: delattr(entry, "chunks")), "chunks of the entry"),
        (lambda m: m.state_dict_metadata.pop(WEIGHT), f"Missing key in checkpoint state_dict: {WEIGHT}"),
        (lambda m: m.state_dict_metadata.update({WEIGHT: {}}), "must be an object TensorStorageMetadata, got {}"),
        (lambda m: setattr(m, "state_dict_metadata", []), "state_dict_metadata must be a dictionary, got []"),
        (lambda m: setattr(m, "storage_data", None), "storage_data must be a dictionary, got None"),
        (lambda m: m.storage_data.clear(), "has no place in storage_data"),
        (lambda m: m.storage_data.update(x=1), "a key of storage_data must be an object MetadataIndex, got 'x'"),
    ],
)
def test_metadata_of_another_kind(
    run: Path, change: Callable[[Any], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_metadata(run / "checkpoints" / STEP, change)
    assert_refused(run, said, capsys)


def test_metadata_that_is_deep_large_or_cut(run: Path) -> None:
    checkpoint = run / "checkpoints" / STEP
    good = (checkpoint / ".metadata").read_bytes()
    record = check(checkpoint)
    known = {
        "deep keys": b"\x80\x02}(" + b")" + b"\x85" * 3_000_000 + b"K\x01u.",
        "a large memory": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "a long text": b"\x80\x02X\xff\xff\xff\x7fabc.",
        "an extension": b"\x80\x02\x82\x01.",
        "a reference": b"\x80\x02N\x51.",
        "nothing": b"",
        "itself": b"\x80\x02]q\x00h\x00a.",
        **{f"cut at {n}": good[:n] for n in range(1, len(good), 997)},
    }
    for kind, data in known.items():
        (checkpoint / ".metadata").write_bytes(data)
        with pytest.raises(RefusedError) as refused:
            read_metadata(checkpoint, record)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 500, kind


def test_flipped_bits_give_one_line_or_the_same_structure(run: Path) -> None:
    checkpoint = run / "checkpoints" / STEP
    good, record = (checkpoint / ".metadata").read_bytes(), check(run / "checkpoints" / STEP)
    draw = torch.Generator().manual_seed(0)
    for _ in range(150):
        data = bytearray(good)
        at = int(torch.randint(len(data), (1,), generator=draw))
        data[at] ^= 1 << int(torch.randint(8, (1,), generator=draw))
        (checkpoint / ".metadata").write_bytes(data)
        try:
            read_metadata(checkpoint, record)
        except RefusedError as error:
            assert "\n" not in str(error)


def test_pickles_as_data() -> None:
    value = {"a": [1, -5, 70_000, 2**40, None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), "é" * 300]}
    for protocol in (2, 3, 4, 5):
        assert parse(pickle.dumps(value, protocol=protocol), lambda named: False) == value
    shared = ["x"]
    again = parse(pickle.dumps([shared, shared]), lambda named: False)
    assert isinstance(again, list) and again[0] is again[1]
    for data in (b"\x80\x02K\x01\x85K\x02R.", b"\x80\x02" + b"N" + b"e.", b"\x80\x02(K\x01u.", struct.pack("B", 0)):
        with pytest.raises(ValueError):
            parse(data, lambda named: True)
    with pytest.raises(ValueError, match="there is a FLOAT in it") as damaged:  # a number of many letters
        parse(b"\x80\x02F" + b"x" * 5000 + b"\n.", lambda named: True)
    assert len(str(damaged.value)) < 200
