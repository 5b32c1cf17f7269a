"""Rows from the Hugging Face hub, with a quick and clear answer when it cannot be reached."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from textwrap import shorten
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

TIMEOUT = 3.0  # seconds that a connection to the hub may take


class Unavailable(Exception):  # noqa: N818 (it is an answer as much as an error)
    """A dataset that is neither in the folder of data nor to be had from the hub; the message is one line."""


def _one_line(error: BaseException) -> str:
    return shorten(str(error), 200, placeholder="…") or type(error).__name__


@cache
def unreachable() -> str:
    """Why the hub cannot be reached, "" if it can; asked once a process, for a few seconds at most."""
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return f"{name} is set"
    proxies = getproxies()
    url = urlparse(proxies.get("https") or proxies.get("all") or constants.ENDPOINT)
    host, port = url.hostname or "huggingface.co", url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout=TIMEOUT).close()
    except OSError as error:
        return f"{host}: {_one_line(error)}"
    return ""


@contextmanager
def _offline(enabled: bool) -> Iterator[None]:
    """Let the libraries use their caches alone: with no network they would repeat each request for minutes."""
    import datasets  # type: ignore[import-untyped]
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if enabled:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def hub_rows(path: str, name: str | None = None) -> Any:
    """All splits of a dataset of the hub, or of its cache on this machine; Unavailable says why there are none."""
    import datasets

    reason = unreachable()
    with _offline(bool(reason)):
        try:
            return datasets.load_dataset(path, name)
        # The libraries raise their own, OSError, ValueError, RuntimeError… for what is all the same to the caller.
        except Exception as error:
            why = f"the hub cannot be reached: {reason}" if reason else f"{path} cannot be loaded: {_one_line(error)}"
            raise Unavailable(why) from error
