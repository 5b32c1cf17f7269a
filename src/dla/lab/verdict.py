"""What the table of `dla demo` says, in words that follow from its figures whoever wins."""

from collections.abc import Mapping

from dla.lab.kept import Kept
from dla.report.words import bytes_text

# The rows of grids/demo.toml.
SINGLE, LEVELS, PAPER = "single state", "Log-Linear", "DLA, the paper's rules"
RECOMMENDED, WIDE = "DLA, recommended", "single state, as large"
SPREAD = 0.1  # differences below this are nothing between single runs: the study's seeds lie further apart


def closing(accuracy: Mapping[str, float], held: Mapping[str, float], found: Mapping[str, Kept]) -> list[str]:
    """Paragraphs; accuracies and state bytes by row, and what the two dynamic memories kept."""
    return [_boundaries(accuracy), _routing(accuracy, held), _merging(found), SEEDS]


SEEDS = (
    "This is one run of each, on seed 0. In docs/study.md, five seeds of a longer version of the task lie as far "
    "apart as 0.35 and 0.98 for the same model, and the single state of equal size reached 0.08 to 0.27 there, at "
    "its own best learning rate: which of the two is ahead depends on task, steps and seed."
)


def _boundaries(accuracy: Mapping[str, float]) -> str:
    ours, single, levels = accuracy[PAPER], accuracy[SINGLE], accuracy[LEVELS]
    others = f"one state {single:.2f}, Log-Linear {levels:.2f}"
    said = f"By the paper's own rules DLA answers {ours:.2f} of the questions, {others}"
    if _level(ours, max(single, levels)):
        return f"{said}: cutting by content alone changes little here."
    if ours > max(single, levels):
        return f"{said}: cutting by content helped in this run."
    return f"{said}: cutting by content alone did not help in this run."


def _routing(accuracy: Mapping[str, float], held: Mapping[str, float]) -> str:
    ours, paper, wide = accuracy[RECOMMENDED], accuracy[PAPER], accuracy[WIDE]
    gain = "does no better" if _level(ours, paper) else "does better" if ours > paper else "does worse"
    said = (
        f"When queries choose among the same states by their keys (recommended) it {gain}: {ours:.2f}, for "
        f"{bytes_text(held[RECOMMENDED])} of memory where one state has {bytes_text(held[SINGLE])}."
    )
    said += " One state with longer keys and as many bytes"
    if _level(ours, wide):
        return f"{said} does as well ({wide:.2f}): on this task width buys the same."
    if wide > ours:
        return f"{said} does better still ({wide:.2f}): here the bytes count, not the states."
    return f"{said} reaches {wide:.2f} in as many steps."


def _merging(found: Mapping[str, Kept]) -> str:
    one = found[RECOMMENDED]
    said = (
        f"What was kept: when a key is asked for, a head holds {one.states:.0f} states; {one.alone:.0%} of the values "
        "stand alone in a state of some head, the others were merged with neighbours everywhere."
    )
    if one.right_alone is None or one.right_shared is None:
        return said
    return f"{said} Of the former {one.right_alone:.0%} are recalled, of the latter {one.right_shared:.0%}."


def _level(a: float, b: float) -> bool:
    return abs(a - b) < SPREAD
