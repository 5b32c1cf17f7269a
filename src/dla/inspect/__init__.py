"""What the memory did: views of a segmentation, and a page about a text."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dla.inspect.webpage import page

__all__ = ["page"]


def __getattr__(name: str) -> Any:
    """``page``, imported when it is asked for: it needs the models, and so transformers."""
    if name != "page":
        raise AttributeError(f"module 'dla.inspect' has no attribute {name!r}")
    from dla.inspect.webpage import page

    return page
