"""What pyproject.toml cannot say.

- optional C++ kernels, loaded with ctypes (no Python.h, no torch to build it);
- dla_autoload.pth beside the package, by which transformers finds our models (see src/dla_autoload.py).
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

FOLDER = Path("src/dla/ops/cpu")
SOURCES = sorted(map(str, FOLDER.glob("*.cpp")))
FLAGS = ["-O3", "-std=c++17", "-pthread", "-fno-math-errno"]  # no -march=native: a wheel must run on other machines

extensions = []
if SOURCES:
    extensions.append(
        Extension(
            "dla.ops.cpu._kernels",
            SOURCES,
            depends=sorted(map(str, FOLDER.glob("*.h"))),
            language="c++",
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,  # without a compiler the package installs all the same and runs on torch alone
        )
    )

AUTOLOAD = "dla_autoload.pth"


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


setup(ext_modules=extensions, cmdclass={"build_py": BuildWithAutoload, "editable_wheel": EditableWithAutoload})
