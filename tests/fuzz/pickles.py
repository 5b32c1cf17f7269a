"""Mutations of pickles, and of torch's files, which are zip archives with a pickle in them.

Some of them carry a payload: a pickle that calls something when it is read by Python's own unpickler. Every payload
mentions the canary, for which the worker listens.
"""

import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from random import Random

from tests.fuzz.mutate import CANARY, Mutation, insert, random_bytes, word

WRITE = f"open({CANARY!r}, 'w')"
# (module, name, argument): what a payload calls. The dotted names reach through modules that a list of allowed
# modules may well contain.
CALLS = (
    ("os", "system", f"touch {CANARY}"),
    ("posix", "system", f"touch {CANARY}"),
    ("builtins", "exec", WRITE),
    ("builtins", "eval", WRITE),
    ("subprocess", "getoutput", f"touch {CANARY}"),
    ("torch.distributed.checkpoint.metadata", "os.system", f"touch {CANARY}"),
    ("torch.serialization", "os.system", f"touch {CANARY}"),
    ("torch._utils", "sys.modules", CANARY),
    ("collections", "_sys.exit", CANARY),
    ("torch.utils.model_zoo", "load_url", f"file:///{CANARY}"),
    ("torch.hub", "load", CANARY),
    ("runpy", "run_path", CANARY),
    ("torch", "load", CANARY),
    ("numpy", "load", CANARY),
    ("torch.jit", "load", CANARY),
)


def text(x: str) -> bytes:
    """The opcode of a text."""
    data = x.encode()
    return pickle.SHORT_BINUNICODE + bytes([len(data)]) + data


def call(draw: Random) -> bytes:
    """Opcodes that call something, and leave its answer on the stack."""
    module, name, argument = draw.choice(CALLS)
    if "." in name or draw.random() < 0.5:
        found = text(module) + text(name) + pickle.STACK_GLOBAL
    else:
        found = pickle.GLOBAL + f"{module}\n{name}\n".encode()
    return found + text(argument) + pickle.TUPLE1 + pickle.REDUCE


def payload(data: bytes, draw: Random) -> bytes:
    """A call before everything else, or instead of it, or in the place of something else."""
    start = data[:2] if data[:1] == pickle.PROTO else b""
    start = pickle.PROTO + b"\x04" if len(start) < 2 or start[1] < 4 else start
    alone = start + call(draw) + pickle.STOP
    before = start + call(draw) + pickle.POP + data[2:]
    spots = [at for name, at in _opcodes(data) if name in ("NONE", "EMPTY_TUPLE", "NEWFALSE", "BININT1", "EMPTY_DICT")]
    if not spots:
        return draw.choice((alone, before))
    at = draw.choice(spots)
    size = 2 if data[at : at + 1] == pickle.BININT1 else 1
    return draw.choice((alone, before, data[:at] + call(draw) + data[at + size :]))


def opcodes(data: bytes, draw: Random) -> bytes:
    """An opcode is missing, there twice, or another."""
    found = [at for _, at in _opcodes(data)]
    if len(found) < 3:
        return random_bytes(data, draw)
    i = draw.randrange(1, len(found) - 1)
    a, b = found[i], found[i + 1]
    other = draw.choice(pickletools.opcodes).code.encode("latin-1")
    return draw.choice((data[:a] + data[b:], data[:b] + data[a:b] + data[b:], data[:a] + other + data[a + 1 :]))


def names(data: bytes, draw: Random) -> bytes:
    """A text of the pickle (a module, a class, a key) is another one."""
    spots = [at for name, at in _opcodes(data) if name == "SHORT_BINUNICODE"]
    if not spots:
        return opcodes(data, draw)
    at = draw.choice(spots)
    end = at + 2 + data[at + 1]
    module, name, _ = draw.choice(CALLS)
    own = data[at + 2 : end].decode("utf-8", "replace")
    return data[:at] + text(draw.choice((module, name, "", own + "x", own[::-1], "__class__"))[:200]) + data[end:]


def numbers(data: bytes, draw: Random) -> bytes:
    """A number of the pickle is at the edge of what it can be."""
    sizes = {"BININT1": 1, "BININT2": 2, "BININT": 4}
    spots = [(at, sizes[name]) for name, at in _opcodes(data) if name in sizes]
    if not spots:
        return word(data, draw)
    at, size = draw.choice(spots)
    x = draw.choice((0, 1, -1, 3, 2**31, 2**48, 2**62, -(2**62)))
    return data[:at] + pickle.LONG1 + b"\x08" + struct.pack("<q", x) + data[at + 1 + size :]


def _opcodes(data: bytes) -> list[tuple[str, int]]:
    """(name, place) of the opcodes, as far as they can be told."""
    found = []
    try:
        for opcode, _, at in pickletools.genops(data):
            found.append((opcode.name, at or 0))
    except Exception:  # of a pickle that was damaged before
        return found
    return found


PICKLE: dict[str, Mutation] = {"payload": payload, "opcodes": opcodes, "names": names, "numbers": numbers}


def _in_torch_file(mutation: Mutation) -> Mutation:
    """The mutation in the pickle of a file that torch saved: all other parts of it stay whole."""

    def changed(data: bytes, draw: Random) -> bytes:
        try:
            return rewrite(data, "data.pkl", lambda inner: mutation(inner, draw))
        except Exception:  # of a file that was damaged before
            return random_bytes(data, draw)

    return changed


def rewrite(data: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """A zip archive, as torch writes them, with one part changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for part in old.infolist():
            inner = old.read(part)
            new.writestr(part.filename, change(inner) if part.filename.endswith(name) else inner)
    return out.getvalue()


def bare(data: bytes, draw: Random) -> bytes:
    """A pickle without an archive, as torch wrote long ago, with a payload."""
    return draw.choice((pickle.PROTO + b"\x02", pickle.PROTO + b"\x04")) + call(draw) + pickle.STOP


TORCH: dict[str, Mutation] = {**{name: _in_torch_file(x) for name, x in PICKLE.items()}, "bare": bare, "junk": insert}
