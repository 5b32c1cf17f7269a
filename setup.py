"""What pyproject.toml cannot say: an optional C++ kernel, loaded with ctypes (no Python.h, no torch to build it)."""

from pathlib import Path

from setuptools import Extension, setup

SOURCE = Path("src/dla/ops/cpu/scan.cpp")
FLAGS = ["-O3", "-std=c++17", "-pthread", "-fno-math-errno"]  # no -march=native: a wheel must run on other machines

extensions = []
if SOURCE.exists():
    extensions.append(
        Extension(
            "dla.ops.cpu._scan",
            [str(SOURCE)],
            language="c++",
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,  # without a compiler the package installs all the same and runs on torch alone
        )
    )

setup(ext_modules=extensions)
