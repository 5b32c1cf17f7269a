"""Who can run what, and why not."""

from collections.abc import Callable

from torch import Tensor

from dla.ops.rules import check_choice

CHOICES = ("auto", "reference", "chunked", "cpu", "triton")


def _always(q: Tensor) -> str | None:
    return None


def _not_built(q: Tensor) -> str | None:
    return "this version has no such kernels yet"


# backend -> why it cannot run these inputs, or None if it can
REASONS: dict[str, Callable[[Tensor], str | None]] = {
    "reference": _always,
    "chunked": _always,
    "cpu": _not_built,
    "triton": _not_built,
}


def choose(backend: str, q: Tensor) -> str:
    """The backend to use; asking for one that cannot run raises with the reason."""
    check_choice("backend", backend, CHOICES)
    if backend == "auto":
        return "chunked"
    reason = REASONS[backend](q)
    if reason is not None:
        able = [name for name, why in REASONS.items() if why(q) is None]
        raise ValueError(f"backend={backend!r} cannot run this: {reason}; backends that can: {', '.join(able)}")
    return backend
