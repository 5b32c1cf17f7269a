"""A saved state that no operator could have made is refused, by file and field; nothing of it reaches a kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dla.ops.cpu import library
from dla.ops.cpu import scan as compiled
from dla.ops.state import load_state

SAVED = Path(__file__).parent / "saved_states"


def content(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(SAVED / f"{name}.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118 (not a dict)


def first_wrong(x: Tensor, value: int) -> Tensor:
    x = x.clone()
    x.view(-1)[0] = value
    return x


Change = Callable[[Tensor], Tensor]
WRONG: list[tuple[str, str, str, Change]] = [
    # file, field, what is wrong with it
    ("dynamic", "size", "above the capacity", lambda x: torch.full_like(x, 9)),
    ("dynamic", "size", "of another dtype", lambda x: x.to(torch.int8)),
    ("dynamic", "size", "negative", lambda x: first_wrong(x, -1)),
    ("dynamic", "size", "of another shape", lambda x: x[:, :1].contiguous()),
    ("dynamic", "order", "out of range", lambda x: first_wrong(x, 99)),
    ("dynamic", "order", "negative", lambda x: first_wrong(x, -1)),
    ("dynamic", "order", "all zero", torch.zeros_like),
    ("dynamic", "order", "as floats", lambda x: x.float()),
    ("dynamic", "count", "negative", lambda x: first_wrong(x, -5)),
    ("dynamic", "count", "not the length", lambda x: x + (x > 0).long()),
    ("dynamic", "count", "of a dead state", lambda x: x[..., :2].contiguous()),
    ("dynamic", "count|length", "another length", lambda x: x),
    ("dynamic", "length", "negative", lambda x: -x),
    ("dynamic", "length", "of another batch", lambda x: x[:1].contiguous()),
    ("dynamic", "length", "as int32", lambda x: x.int()),
    ("dynamic", "info", "as float32", lambda x: x.float()),
    ("dynamic", "matrices", "flat", lambda x: x.flatten(3)),
    ("dynamic", "matrices", "in half precision", lambda x: x.half()),
    ("dynamic_routed", "key_sums", "of another width", lambda x: x[..., 1:].contiguous()),
    ("dynamic_routed", "key_sums", "of another dtype", lambda x: x.float()),
    ("tokens", "boundary", "not at the first token", torch.zeros_like),
    ("tokens", "boundary", "as numbers", lambda x: x.long()),
    ("tokens", "length", "past the places", lambda x: x + 1000),
    ("tokens", "length", "negative", lambda x: x - 1000),
    ("tokens", "values", "of another length", lambda x: x[:, :, 1:].contiguous()),
    ("tokens", "values", "of another dtype", lambda x: x.float()),
    ("tokens", "info", "of another shape", lambda x: x[..., None].contiguous()),
    ("tokens", "keys|values", "after the last token", lambda x: x),
    ("tokens_routed", "raw_keys", "of another width", lambda x: x[..., 1:].contiguous()),
    ("linear", "matrix", "flat", lambda x: x.flatten(2)),
    ("linear", "length", "as floats", lambda x: x.float()),
    ("linear", "length", "beyond all bounds", lambda x: torch.full_like(x, 2**60)),
    ("log_linear", "length", "with too many bits", lambda x: x + 32),
    ("log_linear", "levels", "where the length has no bit", torch.ones_like),
    ("log_linear", "levels", "of too few dimensions", lambda x: x[:, :, 0].contiguous()),
]


@pytest.mark.parametrize(("name", "field", "what", "change"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_field_is_named(name: str, field: str, what: str, change: Change, tmp_path: Path) -> None:
    tensors, label = content(name)
    if what == "another length":
        tensors["length"] = tensors["length"] + 1
    elif what == "after the last token":
        tensors["length"] = tensors["length"] - 1
    else:
        tensors[field] = change(tensors[field])
    path = tmp_path / "wrong.safetensors"
    save_file({key: x.contiguous() for key, x in tensors.items()}, path, metadata=label)
    with pytest.raises(ValueError, match=rf"wrong\.safetensors \(({field}|boundary) ") as refused:
        load_state(path)
    assert "must be" in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("kind", "Nothing", "kind must be one of"),
        ("settings", "{}", "settings"),
        ("settings", "[1]", "settings"),
        ("settings", "{", "Expecting"),
        ("settings", "[" * 100_000, "nested|recursion"),
        ("settings", json.dumps({"capacity": 1}), "capacity"),
        ("settings", json.dumps({"capacity": True}), "capacity"),
        ("settings", json.dumps({"capacity": "3"}), "capacity"),
        ("settings", json.dumps({"capacity": 5}), "capacity"),
        ("settings", json.dumps({"capacity": None}), "has boundary, info"),
        ("settings", json.dumps({"capacity": 3, "more": 1}), "settings"),
        ("format", "x", "format x"),
    ],
)
def test_a_wrong_label_is_refused(entry: str, value: str, message: str, tmp_path: Path) -> None:
    tensors, label = content("dynamic")
    save_file(tensors, tmp_path / "wrong.safetensors", metadata={**label, entry: value})
    with pytest.raises(ValueError, match=r"wrong\.safetensors .*" + message):
        load_state(tmp_path / "wrong.safetensors")


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 1500])
def test_a_truncated_file_is_refused(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes((SAVED / "dynamic.safetensors").read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"cut\.safetensors"):
        load_state(path)


def test_random_bytes_crash_nothing(tmp_path: Path) -> None:
    """Single bytes of every kind of state, changed at random: refused by a ValueError, or loaded."""
    draw = torch.Generator().manual_seed(0)
    path, refused, loaded = tmp_path / "changed.safetensors", 0, 0
    for name in ("linear", "log_linear", "dynamic", "dynamic_routed", "tokens", "tokens_routed"):
        original = (SAVED / f"{name}.safetensors").read_bytes()
        for _ in range(100):
            data = bytearray(original)
            for at in torch.randint(len(data), (2,), generator=draw).tolist():
                data[at] = int(torch.randint(256, (1,), generator=draw))
            path.write_bytes(data)
            try:
                load_state(path).dense()
                loaded += 1
            except ValueError as error:
                assert "changed.safetensors" in str(error)
                refused += 1
    assert refused > 100 and loaded > 50


HOSTILE: dict[str, tuple[dict[str, int], str]] = {
    "no heads": ({"heads": 0}, "sizes"),
    "key heads that do not divide": ({"key_heads": 3}, "sizes"),
    "a negative width": ({"dk": -1}, "sizes"),
    "a width beyond all bounds": ({"dk": 1 << 50, "dv": 1 << 50}, "sizes"),
    "a capacity of one": ({"capacity": 1}, "sizes"),
    "a negative block": ({"block": -1}, "sizes"),
    "more tokens than tensors": ({"tokens": 3}, "too few tensors"),
    "carried states beyond all bounds": ({"carried": 1 << 50}, "sizes"),
    "sequences without tensors": ({"sequences": 2}, "too few tensors"),
}


def numbers(**changes: int) -> dict[str, int]:
    return {"heads": 2, "key_heads": 1, "dk": 4, "dv": 4, "threads": 1} | changes


@pytest.mark.parametrize("hostile", HOSTILE)
def test_the_compiled_scan_refuses_hostile_sizes(hostile: str) -> None:
    if library.missing() is not None:
        pytest.skip("the compiled scan was not built")
    changes, reason = HOSTILE[hostile]
    with pytest.raises(ValueError, match=reason):
        compiled.run({}, numbers(**changes), 0.6, torch.float32)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"offset": 3}, "outside of its tokens"),
        ({"length": 5}, "outside of its tokens"),
        ({"length": -1}, "outside of its tokens"),
        ({"offset": -1}, "outside of its tokens"),
        ({"origin": 2**31 - 2}, "outside of its tokens"),
        ({"size0": 5}, "carried states"),
        ({"size0": -1}, "carried states"),
        ({"position0": -1}, "carried states"),
        ({}, None),
    ],
    ids=str,
)
def test_the_compiled_scan_refuses_hostile_tensors(wrong: dict[str, int], reason: str | None) -> None:
    if library.missing() is not None:
        pytest.skip("the compiled scan was not built")
    T, H, K = 4, 2, 3
    tensors = {name: torch.tensor([value]) for name, value in {"offset": 0, "length": T, "origin": 0}.items()}
    tensors |= {"k": torch.randn(T, H, 4), "v": torch.randn(T, H, 4), "score_io": torch.zeros(T, H)}
    tensors |= {"boundary_io": torch.zeros(T, H, dtype=torch.bool), "death": torch.zeros(T, H, dtype=torch.int32)}
    tensors |= {"current": torch.zeros(1, H, 4, 4), "size0": torch.full((1, H), 2), "position0": torch.tensor([4])}
    tensors |= {"count0": torch.full((1, H, K), 2), "info0": torch.zeros(1, H, K, dtype=torch.float64)}
    tensors |= {"initial_death": torch.zeros(1, H, K, dtype=torch.int32)}
    for name, value in wrong.items():
        tensors[name] = torch.full_like(tensors[name], value)
    sizes = numbers(tokens=T, sequences=1, key_heads=2, capacity=K, carried=K, decide=1)
    if reason is None:
        compiled.run(tensors, sizes, 0.6, torch.float32)
        assert tensors["initial_death"].tolist()[0][0][:1] == [2**31 - 1]
        return
    with pytest.raises(ValueError, match=reason):
        compiled.run(tensors, sizes, 0.6, torch.float32)
