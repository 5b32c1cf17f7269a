"""The tests of interpreted/ in a process of their own: Triton must be told to interpret before it is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("interpreted")


FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
QUICK = [name for name in FILES if name != "test_training.py"]  # which has nothing quick
SLOW = [name for name in FILES if name != "test_operators.py"]  # which has nothing slow


def run(name: str, *marks: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name), *marks]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=FOLDER.parents[3])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", QUICK)
def test_interpreted(name: str) -> None:
    run(name, "-m", "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_interpreted_at_length(name: str) -> None:
    run(name, "-m", "slow")
