"""Pickles as data: they are read as the description that they are, and nothing in them is called or imported.

A pickle is a program for a small stack machine that may import any function and call it. Here its names stay names
(``Named``), and an object stays what it would have been made from (``Made``); who reads the result decides what to make
of it. The operations are those of plain containers, integers, texts and objects, as protocols 2 to 5 write them.
"""

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dla.report import shown


class Named(NamedTuple):
    """A class or function, by name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)  # told apart by identity: they may be keys, whatever they hold
class Made:
    """An object: what would have been called, with which arguments, and the state that it would have been given."""

    what: Named
    arguments: object
    state: Any = None

    def __repr__(self) -> str:
        return f"<{self.what}>"


def parse(data: bytes, known: Callable[[Named], bool]) -> object:
    """The content of a pickle in which all names are ``known``.

    Raises:
        ValueError: it is damaged, or holds something else.
    """
    machine = _Machine(known)
    try:
        for operation, argument in _operations(data):
            if operation.name not in _OPERATIONS:
                raise ValueError(f"there is a {operation.name} in it, which plain data does not need")
            _OPERATIONS[operation.name](machine, argument)
        return machine.stack.pop()
    except (IndexError, KeyError, MemoryError, OverflowError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None


def _operations(data: bytes) -> Iterator[tuple[pickletools.OpcodeInfo, Any]]:
    """What the pickle's program is made of. What the parser says of damaged bytes repeats them, all of them."""
    try:
        for operation, argument, _ in pickletools.genops(data):
            yield operation, argument
    except ValueError as error:
        raise ValueError(f"it is damaged: {shown(str(error))}") from None


class _Machine:
    """The stack, its marks, and the memory of what was there before."""

    def __init__(self, known: Callable[[Named], bool]) -> None:
        self.known = known
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self, _: None) -> None:
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        """Take what lies above the last mark."""
        return self.take(len(self.stack) - self.marks.pop())

    def take(self, count: int) -> list[Any]:
        if not 0 <= count <= len(self.stack):
            raise IndexError
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def extend(self, values: list[Any]) -> None:
        _plain(self.stack[-1], list).extend(values)

    def update(self, values: list[Any]) -> None:
        target = _plain(self.stack[-1], dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | Made):  # the hash of a deep tuple would overflow the stack
                raise ValueError(f"a key is {shown(key)}, accepted are texts and objects")
            target[key] = value

    def name(self, module: object, name: object) -> None:
        named = Named(_plain(module, str), _plain(name, str))
        if not self.known(named):
            raise ValueError(f"it names {named}, which is no part of such a file")
        self.push(named)

    def make(self, _: None) -> None:
        what, arguments = self.take(2)
        self.push(Made(_plain(what, Named), _plain(arguments, tuple)))

    def build(self, _: None) -> None:
        (state,) = self.take(1)
        made = _plain(self.stack[-1], Made)
        if made.state is not None:
            raise ValueError(f"{made!r} is given a state twice")
        made.state = state

    def remember(self, at: int) -> None:
        self.memo[at] = self.stack[-1]


def _plain(value: Any, kind: type) -> Any:
    """The value, if it is just of this type."""
    if type(value) is not kind:
        raise ValueError(f"it is damaged: there is {shown(value)} in the place of a {kind.__name__}")
    return value


Operation = Callable[[_Machine, Any], None]
_OPERATIONS: dict[str, Operation] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, argument: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"), _Machine.push),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.take(3))),
    "APPEND": lambda machine, _: machine.extend(machine.take(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.update(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.since_mark()),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, at: machine.push(machine.memo[at])),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.remember),
    "MEMOIZE": lambda machine, _: machine.remember(len(machine.memo)),
    "GLOBAL": lambda machine, names: machine.name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(*machine.take(2)),
    "REDUCE": _Machine.make,
    "NEWOBJ": _Machine.make,
    "BUILD": _Machine.build,
}
