"""What pyproject.toml cannot say.

- optional C++ kernels, loaded with ctypes (no Python.h, no torch to build it): one wheel for every version of Python;
- dla_autoload.pth beside the package, by which transformers finds our models (see src/dla_autoload.py);
- the version, which stands in the package, and the README with links that work elsewhere, such as on PyPI.
"""

import re
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

FOLDER = Path("src/dla/ops/cpu")
LIBRARY = "_kernels.so"  # as in src/dla/ops/cpu/library.py
# No -march=native: a wheel must run on other machines. No debug information, which would be most of the library.
FLAGS = ["-O3", "-g0", "-std=c++17", "-pthread", "-fno-math-errno"]
AUTOLOAD = "dla_autoload.pth"

KERNELS = Extension(
    "dla.ops.cpu._kernels",
    sorted(map(str, FOLDER.glob("*.cpp"))),
    depends=sorted(map(str, FOLDER.glob("*.h"))),
    language="c++",
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    optional=True,  # without a compiler the package installs all the same and runs on torch alone
)


class BuildLibrary(build_ext):
    """Names the library without the version of Python that was there when it was built."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_name(LIBRARY))


class WheelForAnyPython(bdist_wheel):
    """Tags the wheel with the platform alone, and with none if there was no compiler."""

    def get_tag(self) -> tuple[str, str, str]:
        built = any(Path(self.bdist_dir).rglob(LIBRARY))
        return "py3", "none", super().get_tag()[2] if built else "any"


class BuildWithAutoload(build_py):
    """Puts the .pth file where the packages go."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file(f"src/{AUTOLOAD}", Path(self.build_lib) / AUTOLOAD)


class EditableWithAutoload(editable_wheel):
    """The same for an installation that refers to this checkout."""

    def _run_build_commands(self, dist_name, unpacked_wheel, *others):  # type: ignore[no-untyped-def]
        made = super()._run_build_commands(dist_name, unpacked_wheel, *others)
        self.copy_file(f"src/{AUTOLOAD}", Path(unpacked_wheel) / AUTOLOAD)
        return made


def version() -> str:
    """The one of the package, read and not imported: there is no torch here."""
    return re.search(r'^__version__ = "(.+)"$', Path("src/dla/__init__.py").read_text(), re.MULTILINE)[1]


def readme() -> str:
    """The README; its links to files of the repository lead to this version's files there."""
    repository = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Repository"]

    def absolute(link: re.Match[str]) -> str:
        image, text, path = link.groups()
        return f"{image}[{text}]({repository}/{'raw' if image else 'blob'}/v{version()}/{path})"

    text = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)\[([^]]+)\]\((?!\w+:|#)([^)\s]+)\)", absolute, text)


setup(
    version=version(),
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[KERNELS],
    cmdclass={
        "bdist_wheel": WheelForAnyPython,
        "build_ext": BuildLibrary,
        "build_py": BuildWithAutoload,
        "editable_wheel": EditableWithAutoload,
    },
)
