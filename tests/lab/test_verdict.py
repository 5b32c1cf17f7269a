"""The words under the demo's table follow its figures, whoever wins."""

import pytest

from dla.lab.kept import Kept
from dla.lab.verdict import LEVELS, PAPER, RECOMMENDED, SINGLE, WIDE, closing

HELD = {SINGLE: 4096.0, LEVELS: 12000.0, PAPER: 58000.0, RECOMMENDED: 60000.0, WIDE: 60000.0}
SOME = Kept(states=16.0, alone=0.75, right_alone=0.9, right_shared=0.4)


def words(single=0.3, levels=0.3, paper=0.3, recommended=0.9, wide=0.5, kept=SOME):
    accuracy = {SINGLE: single, LEVELS: levels, PAPER: paper, RECOMMENDED: recommended, WIDE: wide}
    return " ".join(closing(accuracy, HELD, {RECOMMENDED: kept, PAPER: kept}))


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({}, "changes little"),
        ({"paper": 0.8}, "helped in this run"),
        ({"single": 0.8}, "did not help"),
        ({}, "does better: 0.90"),
        ({"recommended": 0.3}, "does no better"),
        ({"recommended": 0.1}, "does worse"),
        ({"wide": 0.5}, "reaches 0.50 in as many steps"),
        ({"wide": 0.85}, "width buys the same"),
        ({"wide": 1.0, "recommended": 0.6}, "the bytes count"),
        ({}, "90% are recalled, of the latter 40%"),
    ],
)
def test_the_words_follow_the_figures(figures, said):
    assert said in words(**figures)


def test_nothing_is_said_of_groups_that_are_empty():
    assert "are recalled" not in words(kept=Kept(16.0, 1.0, 0.9, None))
