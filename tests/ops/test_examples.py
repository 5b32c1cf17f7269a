"""The examples in the docstrings are true."""

import doctest

import pytest

from dla.ops import attention, segmentation


@pytest.mark.parametrize("module", [attention, segmentation], ids=lambda module: module.__name__)
def test_examples(module):
    found = doctest.testmod(module)
    assert found.attempted >= 3 and found.failed == 0


def test_every_operator_has_one():
    for name in ("dynamic_linear_attention", "log_linear_attention", "linear_attention", "segment"):
        assert ">>>" in getattr(attention, name).__doc__
