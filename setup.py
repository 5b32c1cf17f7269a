"""What pyproject.toml cannot say: optional C++ kernels, loaded with ctypes (no Python.h, no torch to build it)."""

from pathlib import Path

from setuptools import Extension, setup

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

setup(ext_modules=extensions)
