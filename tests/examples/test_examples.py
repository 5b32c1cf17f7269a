"""The scripts of examples/ run as they are, and say what they are there to say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAID = {
    "the_operator.py": [
        "tokens in each state of head 0: [100, 100, 100, 100, 100, 100]",
        "after one more token: 601 tokens",
    ],
    "own_merge_rule.py": ["sizes of states by our rule", "and a gradient of norm"],
    "one_context_many_questions.py": ["read 8192 tokens", "b'return ' -> b'"],
    "convert_and_train.py": ["largest difference of the logits before training", "step 19: loss"],
    "what_the_memory_kept.py": ["of the tokens opened a state", "layer 3, head 0, oldest state first"],
}


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAID)


@pytest.mark.parametrize("name", SAID)
def test_example(name):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr
    assert all(text in found.stdout for text in SAID[name]), found.stdout
