"""The kernels of decisions compiled ahead of time: nothing spills, and shared memory suffices anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAST_SHARED = 99 * 1024  # bytes a program, of GPUs for desktops


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_what_kernels_need(capability: int) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.gpu.ahead", str(capability), "128", "64"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    needs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [x["kernel"] for x in needs] == ["candidates", "carry", "settle", "merges"]
    for x in needs:
        assert x["spilled"] == 0 and x["shared"] <= LEAST_SHARED, x
