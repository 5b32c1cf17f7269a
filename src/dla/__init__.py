"""Dynamic Linear Attention: linear attention with a bounded list of states as memory, cut where the content changes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dla.inspect.theory import deviation_bound
    from dla.ops import Segmentation, dynamic_linear_attention, linear_attention, log_linear_attention, segment
    from dla.ops.backends import backends, record

__version__ = "0.1.0"

__all__ = [
    "dynamic_linear_attention",
    "log_linear_attention",
    "linear_attention",
    "segment",
    "Segmentation",
    "deviation_bound",
    "backends",
    "record",
    "__version__",
]

# torch takes a second to import, in which the command line could neither answer --version nor end well on Ctrl-C.
_HOMES = {"deviation_bound": "dla.inspect.theory", "backends": "dla.ops.backends", "record": "dla.ops.backends"}


def __getattr__(name: str) -> Any:
    """What the package offers, imported when it is asked for first."""
    if name not in __all__:
        if name in ("ops", "inspect"):
            return import_module(f"dla.{name}")
        raise AttributeError(f"module 'dla' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES.get(name, "dla.ops")), name)
    return found
