"""Dynamic Linear Attention: linear attention with a bounded list of states as memory, cut where the content changes."""

from dla.inspect.theory import deviation_bound
from dla.ops import (
    Segmentation,
    dynamic_linear_attention,
    linear_attention,
    log_linear_attention,
    segment,
)
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
