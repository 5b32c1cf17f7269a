"""Pickles as data: they are read as the description that they are, and nothing in them is called or imported.

A pickle is a program for a small stack machine that may import any function and call it. Python's own machine runs it
here, but with the operations alone that plain containers, integers, texts and objects need, as protocols 2 to 5 write
them. Names stay names (``Named``), and an object stays what it would have been made from (``Made``); who reads the
result decides what to make of it.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dla.report import shown

# operations that put something on the stack or together, and do nothing else; the last two by ``find_class``
NAMES = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 SHORT_BINUNICODE BINUNICODE
    EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS BINGET LONG_BINGET BINPUT LONG_BINPUT
    MEMOIZE GLOBAL STACK_GLOBAL"""
PLAIN = [vars(pickle)[name][0] for name in NAMES.split()]


class Named(NamedTuple):
    """A class or function, by name."""

    module: str
    name: str


@dataclass(eq=False)  # told apart by identity: they may be keys, whatever they hold
class Made:
    """An object: what would have been called, with which arguments, and the state that it would have been given."""

    what: Named
    arguments: object
    state: Any = None

    def __repr__(self) -> str:
        return f"<{'.'.join(self.what)}>"


def parse(data: bytes, known: Callable[[Named], bool]) -> object:
    """The content of a pickle in which all names are ``known``.

    Raises:
        ValueError: it is damaged, or holds something else.
    """
    try:
        content: object = _Machine(data, known).load()
    except ValueError:
        raise
    except Exception as error:  # whatever damaged bytes may lead to
        raise ValueError(f"it is damaged ({type(error).__name__})") from None
    return content


def _plain(value: Any, kind: type) -> Any:
    """The value, if it is just of this type."""
    if type(value) is not kind:
        raise ValueError(f"it is damaged: there is {shown(value)} in the place of a {kind.__name__}")
    return value


class _Operations(dict[int, Callable[[Any], None]]):
    """By their codes; any other is refused by its name."""

    def __missing__(self, code: int) -> Any:
        name = next((each.name for each in pickletools.opcodes if each.code == chr(code)), hex(code))
        raise ValueError(f"there is a {name} in it, which plain data does not need")


class _Machine(pickle._Unpickler):
    """Python's machine, which keeps descriptions in place of objects."""

    stack: list[Any]

    def __init__(self, data: bytes, known: Callable[[Named], bool]) -> None:
        super().__init__(io.BytesIO(data))
        self.known = known

    def find_class(self, module: str, name: str) -> Named:
        named = Named(module, name)
        if not self.known(named):
            raise ValueError(f"it names {module}.{name}, which is no part of such a file")
        return named

    def make(self) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        self.stack.append(Made(_plain(what, Named), _plain(arguments, tuple)))

    def build(self) -> None:
        state, made = self.stack.pop(), _plain(self.stack[-1], Made)
        if made.state is not None:
            raise ValueError(f"{made!r} is given a state twice")
        made.state = state

    def update(self, values: list[Any]) -> None:
        target = _plain(self.stack[-1], dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | Made):  # the hash of a deep tuple would overflow the stack
                raise ValueError(f"a key is {shown(key)}, accepted are texts and objects")
            target[key] = value

    dispatch = _Operations({code: pickle._Unpickler.dispatch[code] for code in PLAIN})
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = make
    dispatch[pickle.BUILD[0]] = build
    dispatch[pickle.SETITEM[0]] = lambda self: self.update([self.stack.pop(-2), self.stack.pop()])
    dispatch[pickle.SETITEMS[0]] = lambda self: self.update(self.pop_mark())
