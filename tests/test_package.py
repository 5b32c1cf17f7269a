import subprocess
import sys
import tomllib
from pathlib import Path

import dla

ROOT = Path(__file__).parents[1]


def test_version_is_the_one_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dla.__version__ == project["version"]


def test_everything_announced_is_there():
    assert all(hasattr(dla, name) for name in dla.__all__)
    assert (Path(dla.__file__).parent / "py.typed").exists()


def test_import_alone_is_at_once():
    """torch comes when something is used: until then the command line answers, and ends well on Ctrl-C."""
    code = "import sys, dla, dla.cli; print('torch' in sys.modules, dla.ops.segment is dla.segment)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_import_is_light():
    """Nothing heavy beside torch, and little time of its own."""
    code = (
        "import sys, time, torch\n"
        "before, start = set(sys.modules), time.perf_counter()\n"
        "import dla\n"
        "dla.segment, dla.backends\n"
        "print(time.perf_counter() - start)\n"
        "heavy = {'transformers', 'matplotlib', 'triton', 'fla', 'einops'} & (set(sys.modules) - before)\n"
        "print(sorted(heavy))\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    ]
    assert runs[0][1] == "[]"
    # The better of two, with room for a busy machine: alone it takes far less than the 0.3 s allowed.
    assert min(float(seconds) for seconds, _ in runs) < 0.3
