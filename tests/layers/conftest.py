"""Fixtures of the layers' tests."""

from tests.ops.cpu.conftest import level

__all__ = ["level"]
