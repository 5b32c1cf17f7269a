"""Mutations: by the seed alone, and files that still are what they were where they should be."""

import io
import json
import pickle
import tomllib
from collections.abc import Mapping
from random import Random

import pytest
import torch
from safetensors.torch import load, save

from tests.fuzz import mutate, pickles, tensors
from tests.fuzz.mutate import Mutation

CONTENT = {"name": "x", "sizes": [1, 2.5, None], "more": {"flag": True, "deep": [{"a": -1}]}}
TOML = b'name = "x"\nsizes = [1, 2.5]\n[more]\nflag = true\n[[more.deep]]\na = -1\n'
SAFETENSORS = save({"a": torch.arange(6).view(2, 3), "b": torch.ones(4)}, metadata={"settings": '{"capacity": 3}'})
PICKLE = pickle.dumps({"a": (1, 300, 70000, None, "text"), "b": Random}, protocol=4)
KINDS: dict[str, tuple[bytes, Mapping[str, Mutation]]] = {
    "bytes": (bytes(range(256)), mutate.BYTES),
    "binary": (bytes(range(256)), mutate.BINARY),
    "json": (json.dumps(CONTENT).encode(), mutate.JSON),
    "lines": ((json.dumps(CONTENT).encode() + b"\n") * 3, mutate.JSON_LINES),
    "toml": (TOML, mutate.TOML),
    "safetensors": (SAFETENSORS, tensors.SAFETENSORS),
    "pickle": (PICKLE, pickles.PICKLE),
}
EACH = [(kind, name) for kind, (_, own) in KINDS.items() for name in own]


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_a_mutation_changes_something_by_its_seed(kind: str, name: str) -> None:
    data, own = KINDS[kind]
    made = [own[name](data, Random(seed)) for seed in range(40)]
    assert made == [own[name](data, Random(seed)) for seed in range(40)]
    assert len(set(made) - {data}) > 5


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_a_mutation_takes_any_bytes(kind: str, name: str) -> None:
    for data in (b"", b"\0", b"x" * 7, KINDS[kind][0][:-3], b"{}", b"[]\n"):
        for seed in range(10):
            assert isinstance(KINDS[kind][1][name](data, Random(seed)), bytes)


def test_changed_trees_are_still_json_and_toml() -> None:
    for seed in range(200):
        changed = mutate.change_json(json.dumps(CONTENT), Random(seed))
        if "[" * 1000 not in changed:
            json.loads(changed)
    assert tomllib.loads(mutate.dump_toml(tomllib.loads(TOML.decode()))) == tomllib.loads(TOML.decode())


def test_other_tensors_are_in_whole_files() -> None:
    held = [load(tensors.other_tensor(SAFETENSORS, Random(seed))) for seed in range(30)]
    shapes = {tuple(x.shape) for tensors in held for x in tensors.values()}
    assert len(shapes) > 5
    assert any("a" not in tensors for tensors in held)


def test_payloads_are_pickles() -> None:
    """Read by Python's unpickler, most of them get as far as asking for what they call."""
    asked = set()

    class Unpickler(pickle._Unpickler):  # the one in Python, whose methods can be replaced
        def find_class(self, module: str, name: str) -> object:
            asked.add((module, name))
            return lambda *_: None

    for seed in range(200):
        Unpickler(io.BytesIO(b"\x80\x04" + pickles.call(Random(seed)) + b".")).load()
    assert asked == {(module, name) for module, name, _ in pickles.CALLS}
