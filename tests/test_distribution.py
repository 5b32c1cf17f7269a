"""What is built for others: the sdist, the wheels made of it and of the tree, and what is in them."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import dla

ROOT = Path(__file__).parents[1]
NAME = f"dynamic_linear_attention-{dla.__version__}"
INFO = f"{NAME}.dist-info"
LIBRARY = "dla/ops/cpu/_kernels.so"
NEEDED = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"]  # beside src/
# Whatever of src/ is not code of the package: left behind by tools and earlier builds.
LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
STRAY = ["tests/test_stray.py", "src/dla/__pycache__/stray.cpython-311.pyc", "src/dla/stray.txt", "out/stray.json",
         "src/dla/ops/cpu/_kernels.cpython-311-x86_64-linux-gnu.so"]  # fmt: skip
NO_COMPILER = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
BUILD = """
import sys
sys.modules["torch"] = None  # whoever builds has none
import setuptools.build_meta as backend
print(getattr(backend, f"build_{sys.argv[1]}")(sys.argv[2]))
"""


def build(kind: str, tree: Path, out: Path, **environment: str) -> Path:
    """The sdist or wheel of a tree."""
    out.mkdir()
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    done = subprocess.run(command, cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel; its list of checksums says the same again."""
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if name != f"{INFO}/RECORD"}


def sources() -> dict[str, bytes]:
    """Every file under src/ that belongs to the package, by its name in a wheel."""
    ignored = ("__pycache__", ".egg-info", ".so")
    found = [path for path in (ROOT / "src").rglob("*") if path.is_file() and not any(x in str(path) for x in ignored)]
    return {path.relative_to(ROOT / "src").as_posix(): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The checkout as somebody has it who worked in it, stray files and all."""
    path = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", path / "src", ignore=LEFT_BEHIND)
    for name in (*NEEDED, "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, path)
    for name in STRAY:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("stray")
    return path


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist") / "dist")


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as file:
        file.extractall(path, filter="data")
    return path / NAME


@pytest.fixture(scope="module")
def plain(unpacked, tmp_path_factory) -> Path:
    """The wheel of the sdist where there is no compiler."""
    return build("wheel", unpacked, tmp_path_factory.mktemp("plain") / "dist", **NO_COMPILER)


@pytest.mark.slow
def test_the_sdist_has_what_a_build_needs_and_no_more(sdist, unpacked):
    assert sdist.name == f"{NAME}.tar.gz"
    found = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    made = {name for name in found if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert found - made == set(NEEDED) | {f"src/{name}" for name in sources()}


@pytest.mark.slow
def test_a_wheel_without_kernels_is_for_all_machines(plain):
    assert plain.name == f"{NAME}-py3-none-any.whl"
    found = contents(plain)
    assert {name: found[name] for name in found if not name.startswith(INFO)} == sources()
    for name in ("dla/py.typed", "dla_autoload.pth", "dla/ops/cpu/simd.h", "dla/lab/grids/demo.toml"):
        assert name in found
    named = {name.removeprefix(f"{INFO}/") for name in found if name.startswith(INFO)}
    assert named == {"METADATA", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    assert found[f"{INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_the_wheel_of_the_tree_is_the_wheel_of_the_sdist(tree, plain, tmp_path):
    assert contents(build("wheel", tree, tmp_path / "dist", **NO_COMPILER)) == contents(plain)


@pytest.mark.slow
def test_metadata(plain):
    about = email.message_from_bytes(contents(plain)[f"{INFO}/METADATA"])
    assert about["Version"] == dla.__version__ and about["License-Expression"] == "Apache-2.0"
    assert about["Description-Content-Type"] == "text/markdown"
    assert set(about.get_all("Provides-Extra")) == {"models", "train", "eval", "plot", "gpu", "docs", "dev"}


@pytest.mark.slow
def test_links_of_the_readme_lead_to_files_of_this_version(plain):
    """PyPI shows the README alone: a link to a file beside it would lead nowhere."""
    text = contents(plain)[f"{INFO}/METADATA"].decode()
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", text)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text())) > 10
    for image, link in links:
        start = f"{repository}/{'raw' if image else 'blob'}/v{dla.__version__}/"
        assert link.startswith(start), link
        assert (ROOT / link.removeprefix(start).partition("#")[0]).is_file(), link


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_a_wheel_with_kernels_is_for_any_python(unpacked, plain, tmp_path):
    """The sdist's sources suffice to compile them, and what is installed finds them."""
    wheel = build("wheel", unpacked, tmp_path / "dist")
    assert re.fullmatch(rf"{re.escape(NAME)}-py3-none-(?!any)\w+\.whl", wheel.name)
    found = contents(wheel)
    assert found.pop(LIBRARY).startswith(b"\x7fELF") or sys.platform != "linux"
    tags = f"{INFO}/WHEEL"
    assert found | {tags: b""} == contents(plain) | {tags: b""}
    assert used(wheel, tmp_path / "installed") == [str(tmp_path / "installed/dla/__init__.py"), "None"]


@pytest.mark.slow
def test_what_is_installed_without_a_compiler_runs(plain, tmp_path):
    where, why = used(plain, tmp_path / "installed")
    assert where == str(tmp_path / "installed/dla/__init__.py") and "no C++ compiler" in why


def used(wheel: Path, folder: Path) -> list[str]:
    """Install a wheel into a folder and call the operator there: which package ran, and why its kernels did not."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(folder), str(wheel)], check=True)
    code = """
import torch, dla
from dla.ops.cpu.library import missing
x = torch.randn(3, 1, 9, 2, 4)
out, _ = dla.dynamic_linear_attention(*x, torch.rand(1, 9, 2, 5), capacity=5)
assert out.shape == (1, 9, 2, 4) and out.isfinite().all()
print(dla.__file__, missing(), sep="\\n")
"""
    environment = {**os.environ, "PYTHONPATH": str(folder), "DLA_NO_COMPILED": "0"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
