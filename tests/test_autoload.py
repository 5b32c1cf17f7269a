"""What the hook costs by which transformers finds our models; tests/models/test_load_anywhere.py: that it does."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(code: str, *arguments: object) -> str:
    """What a new process prints; the hook is asked for by hand: the test does not depend on the installation."""
    lines = ["import sys; sys.path.insert(0, sys.argv[1])", "import dla_autoload", code]
    command = [sys.executable, "-c", "\n".join(lines), str(ROOT / "src"), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_others_load_nothing_of_ours():
    code = """
from transformers import AutoConfig
assert "llama" in AutoConfig.for_model("llama").model_type
print("dla.models" in sys.modules, "dla" in sys.modules)
"""
    assert python(code).split() == ["False", "False"]


def test_at_its_start_python_loads_nothing():
    assert python("print([m for m in ('dla', 'torch', 'transformers', 'typing') if m in sys.modules])") == "[]\n"


def test_the_installed_package_has_the_hook():
    """Python itself imports it at its start."""
    code = "import sys; print('dla_autoload' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "True\n", "install the package again: make install"
