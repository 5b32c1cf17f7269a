"""transformers finds our models without `import dla.models`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python(code: str, *arguments: object) -> str:
    """What a new process prints; the hook is asked for by hand: the test does not depend on the installation."""
    lines = ["import sys; sys.path.insert(0, sys.argv[1])", "import dla_autoload", code]
    command = [sys.executable, "-c", "\n".join(lines), str(ROOT / "src"), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from dla.models import DLAForCausalLM, preset

    path = tmp_path_factory.mktemp("model")
    DLAForCausalLM(preset("mamba2-tiny", memory="dynamic")).save_pretrained(path)
    return path


def test_a_saved_model_is_found(folder):
    code = """
from transformers import AutoConfig, AutoModelForCausalLM
assert "dla.models" not in sys.modules
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[2])).__name__, AutoConfig.from_pretrained(sys.argv[2]).memory)
"""
    assert python(code, folder).split() == ["DLAForCausalLM", "dynamic"]


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
