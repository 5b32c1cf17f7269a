"""Collected in a process that interprets Triton's kernels, and nowhere else (see ../test_interpreted.py)."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
