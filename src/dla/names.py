"""Names that someone typed against those there are."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like the given one; there must be one at least."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The known name that was probably meant, as the end of a message; "" if none is really near."""
    near = difflib.get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def check_known(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse given names that are not known: "where: 'lrr' is not known; the nearest is 'lr'"."""
    known = list(known)
    for name in given:
        if name not in known:
            raise ValueError(f"{where}: {name!r} is not known; the nearest is {nearest(name, known)!r}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a ``value`` that is not one of ``choices``."""
    choices = tuple(choices)
    if value not in choices:
        accepted, near = ", ".join(map(repr, choices)), did_you_mean(value, choices)
        raise ValueError(f"{name} must be one of {accepted}, got {value!r}{near}")
