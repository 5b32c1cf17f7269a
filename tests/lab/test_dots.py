"""Tables as pictures."""

import io

import numpy as np
import pytest

from dla.lab.dots import Panel, draw_dots, labels

pytest.importorskip("matplotlib")


def pixels(png):
    from matplotlib.image import imread

    return np.asarray(imread(io.BytesIO(png)))


def test_a_dot_lies_where_its_value_is():
    """The dark pixels of one seed's dot move along the axis with its value."""

    def place(value):
        with_dot = pixels(draw_dots(["a"], [Panel("t", {"a": {0: value}})], "accuracy"))
        without = pixels(draw_dots(["a"], [Panel("t", {})], "accuracy"))
        return np.nonzero((with_dot != without).any(-1))[1].mean()

    low, middle, high = place(0.2), place(0.5), place(0.8)
    assert low < middle < high
    assert high - middle == pytest.approx(middle - low, abs=1)


def test_rows_and_panels_make_room():
    one = pixels(draw_dots(["a"], [Panel("t", {"a": {0: 0.5, 1: 0.6}})], "accuracy"))
    many = pixels(draw_dots(list("abcdef"), [Panel("t", {"a": {0: 0.5}, "f": {0: 2.0, 1: 1.0}}, 0.1)] * 2, "loss"))
    assert many.shape[0] > one.shape[0] and many.shape[1] == one.shape[1]


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        (["GDN, single", "GDN, single, as large", "GDN, softmax"], ["single", "single, as large", "softmax"]),
        (["GDN, single", "GDN"], ["GDN, single", "GDN"]),
        (["single", "softmax"], ["single", "softmax"]),
        (["GDN, single"], ["GDN, single"]),
    ],
)
def test_what_all_rows_begin_with_is_left_out(rows, shown):
    figure = pixels(draw_dots(rows, [Panel("t", {})], "accuracy"))
    assert labels(rows) == shown
    assert (figure == pixels(draw_dots(shown, [Panel("t", {})], "accuracy"))).all()
