"""Mutations of safetensors files: the header, what its metadata says, and tensors that are others altogether."""

import json
import math
import struct
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.mutate import Mutation, change_json, dump_json, insert, random_bytes

Header = dict[str, Any]
DTYPES = (
    "BOOL",
    "U8",
    "I8",
    "F16",
    "BF16",
    "I32",
    "F32",
    "I64",
    "F64",
    "U16",
    "U32",
    "U64",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "F4",
    "F6_E2M3",
    "C64",
    "X",
)
SIZES = (0, 1, 2, 3, 64, 2**20, 2**31, 2**40, 2**62, 2**63, -1, 0.5, None, "4")
NUMPY = {"BOOL": np.bool_, "I32": np.int32, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64}
EDGES = (0, 1, -1, 2, 7, 2**31, 2**48, 2**62, -(2**63), math.nan, math.inf, 1e300)


def split(data: bytes) -> tuple[Header, bytes] | None:
    """The header of a file and the bytes of its tensors; None if it is none."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
    except (struct.error, ValueError, OverflowError):
        return None
    return (header, data[8 + length :]) if isinstance(header, dict) else None


def join(header: Header | str, content: bytes) -> bytes:
    text = (header if isinstance(header, str) else dump_json(header)).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content


def settled(data: bytes) -> bytes:
    """The file with the entries of its metadata in order, which safetensors writes in any."""
    parts = split(data)
    assert parts is not None
    header, content = parts
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    return join(header, content)


def header_value(data: bytes, draw: Random) -> bytes:
    """Anything in the header, as in any JSON."""
    if (parts := split(data)) is None:
        return random_bytes(data, draw)
    return join(change_json(json.dumps(parts[0]), draw), parts[1])


def header_field(data: bytes, draw: Random) -> bytes:
    """A dtype, a size of a shape, or an offset of one tensor; or the header's own length."""
    if (parts := split(data)) is None or not (names := _tensors(parts[0])):
        return random_bytes(data, draw)
    header, content = parts
    about = header[draw.choice(names)]
    what = draw.choice(("dtype", "shape", "sizes", "data_offsets", "length"))
    if what == "length":
        return struct.pack("<Q", draw.choice((0, 1, 7, 8, len(data), 2**32, 2**63, 2**64 - 1))) + data[8:]
    if what == "dtype":
        about["dtype"] = draw.choice(DTYPES)
    elif what == "sizes":  # as many numbers in another shape, which fits the offsets
        about["shape"] = draw.choice((about["shape"][::-1], [math.prod(about["shape"])], [*about["shape"], 1]))
    elif about[what]:
        about[what][draw.randrange(len(about[what]))] = draw.choice((*SIZES, len(content)))
    return join(header, content)


def metadata(data: bytes, draw: Random) -> bytes:
    """An entry of the metadata, or something in the JSON that it holds."""
    parts = split(data)
    if parts is None or not isinstance(about := parts[0].get("__metadata__"), dict) or not about:
        return header_value(data, draw)
    name = draw.choice(list(about))
    text = str(about[name])
    about[name] = draw.choice((change_json(text, draw), "", "-1", "9" * 5000, "null", text * 2, "[" * 100_000))
    return join(*parts)


def other_tensor(data: bytes, draw: Random) -> bytes:
    """A tensor is of another dtype or shape, or missing, or there under another name, in a file that is whole."""
    parts = split(data)
    if parts is None or not (names := _tensors(parts[0])):
        return insert(data, draw)
    held = {name: _array(parts[0][name], parts[1]) for name in names}
    if any(array is None for array in held.values()):
        return header_value(data, draw)
    name = draw.choice(names)
    array = held.pop(name)
    assert array is not None
    what = draw.choice(("missing", "renamed", "dtype", "shape", "empty"))
    if what == "renamed":
        held[draw.choice((f"{name}x", draw.choice(names), "9." + name, ""))] = array
    elif what == "dtype":
        with np.errstate(all="ignore"):
            held[name] = array.astype(draw.choice(list(NUMPY.values())))
    elif what == "shape":
        held[name] = draw.choice((array.reshape(-1), array[None], array[:1], array[..., :1], np.repeat(array, 2, -1)))
    elif what == "empty":
        held[name] = np.empty(0, array.dtype)
    return _file(parts[0], held, {name: _empty_shape(array, draw)} if what == "empty" else {})


def edge_numbers(data: bytes, draw: Random) -> bytes:
    """Numbers of a tensor are at the edge of what they can be."""
    parts = split(data)
    if parts is None or not (names := _tensors(parts[0])):
        return insert(data, draw)
    name = draw.choice(names)
    array = _array(parts[0][name], parts[1])
    if array is None or not array.size:
        return random_bytes(data, draw)
    flat = array.copy().reshape(-1)
    with np.errstate(all="ignore"):
        edges = np.array(EDGES if flat.dtype.kind == "f" else [int(x) for x in EDGES[:9]]).astype(flat.dtype)
        for _ in range(draw.randint(1, flat.size if draw.random() < 0.2 else 2)):
            flat[draw.randrange(flat.size)] = draw.choice(
                (draw.choice(edges), -flat[0] if flat.dtype != bool else True)
            )
    begin, end = parts[0][name]["data_offsets"]
    return join(parts[0], parts[1][:begin] + flat.tobytes() + parts[1][end:])


def _tensors(header: Header) -> list[str]:
    return [name for name, about in header.items() if name != "__metadata__" and isinstance(about, dict)]


def _array(about: dict[str, Any], content: bytes) -> np.ndarray | None:
    """A tensor of a file; None if it is not there or of a dtype that numpy does not have."""
    try:
        begin, end = about["data_offsets"]
        return np.frombuffer(content[begin:end], NUMPY[about["dtype"]]).reshape(about["shape"])
    except (KeyError, TypeError, ValueError):
        return None


def _empty_shape(array: np.ndarray, draw: Random) -> list[int]:
    """A shape with a 0 in it: no bytes at all, however large its other sizes are."""
    shape = [draw.choice((n, n, 2**31, 2**40)) for n in (array.shape or (1,))]
    shape[draw.randrange(len(shape))] = 0
    return shape


def _file(old: Header, tensors: dict[str, np.ndarray | None], shapes: dict[str, list[int]]) -> bytes:
    """A whole file of tensors; ``shapes``: what the header says of empty ones instead."""
    names = {np.dtype(kind): name for name, kind in NUMPY.items()}
    header: Header = {"__metadata__": old["__metadata__"]} if "__metadata__" in old else {}
    content = b""
    for name, array in tensors.items():
        assert array is not None
        data = np.ascontiguousarray(array).tobytes()
        about = {"dtype": names[array.dtype], "shape": shapes.get(name, list(array.shape))}
        header[name] = {**about, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    return join(header, content)


SAFETENSORS: dict[str, Mutation] = {
    "header": header_value,
    "field": header_field,
    "metadata": metadata,
    "tensor": other_tensor,
    "edges": edge_numbers,
}
