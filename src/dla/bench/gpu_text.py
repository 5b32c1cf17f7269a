"""What `dla bench gpu` prints: the machine, what was checked and how far off it was, times, at the end a verdict."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

from dla.bench.common import Figures
from dla.bench.gpu_checks import Checked, What, number
from dla.bench.gpu_training import shown
from dla.report import table

TRAINING = """Training, medians; x: times what the memory with one state takes; MB: the most that is held beside inputs
Forward is under decisions that were made, all is with them; what the soft gate's scores see is part of its forward

"""
ORDER = get_args(What)
TENSORS = ("o", "q", "k", "v", "lam", "g", "beta", "route")  # o: the outputs; the others' gradients


def proven(checks: Sequence[Checked]) -> bool:
    """Whether something was checked, and held."""
    return all(x.holds for x in checks) and any(not x.refused for x in checks)


def counted(checks: Sequence[Checked]) -> str:
    """How many checks hold."""
    right, wrong, refused = amounts(checks)
    return f"{right} checks hold, {wrong} do not, {refused} are refused"


def amounts(checks: Sequence[Checked]) -> tuple[int, int, int]:
    """How many are right, wrong and refused."""
    wrong, refused = sum(not x.holds for x in checks), sum(bool(x.refused) for x in checks)
    return len(checks) - wrong - refused, wrong, refused


def verdict(found: Figures, checks: Sequence[Checked]) -> str:
    """The last line."""
    gpu = found["machine"].get("gpu")
    where = f"on {gpu}" if gpu else "in Triton's interpreter"
    word = "the kernels are right" if proven(checks) else "NOTHING IS PROVEN"
    if not all(x.holds for x in checks):
        word = "KERNELS ARE WRONG"
    elif found.get("complaints") and proven(checks):
        word += ", BUT SOME TAKE TOO MUCH OF A GPU"
    return f"verdict {where}: {word} ({counted(checks)})"


def as_text(found: Figures, checks: Sequence[Checked], more: Sequence[str] = ()) -> str:
    """One text to paste. more: what comes before the verdict."""
    parts = [", ".join(f"{name} {value}" for name, value in found["machine"].items())]
    if checks:
        parts.append("Checks against the reference in float64; errors as parts of the largest number expected\n\n"
                     + table(list(stages(checks))))  # fmt: skip
    if trained := list(gradients(checks)):
        parts.append("Gradients: the largest error of the outputs o and of each input's gradient\n\n" + table(trained))
    if wrong := [x.row() for x in checks if not x.holds]:
        parts.append("What does not hold\n\n" + table(wrong))
    if reasons := dict.fromkeys(f"{x.stage}: {x.refused}" for x in checks if x.refused):
        parts.append("Refused\n\n" + "\n".join(f"  {reason}" for reason in reasons))
    if times := found.get("times"):
        parts.append("Calls without gradients, medians\n\n" + table(times))
    if training := found.get("training"):
        parts.append(TRAINING + table(list(shown(training))))
    if chosen := found.get("tuned"):
        parts.append("Faster than the table\n\n" + "\n".join(f"  {name}: {own}" for name, own in chosen.items()))
    return "\n\n".join([*parts, *more, verdict(found, checks)])


def stages(checks: Iterable[Checked]) -> Iterator[Figures]:
    """A row of each stage and dtype: how many checks hold, and the worst of them."""
    for (stage, dtype), group in sorted(grouped(checks, lambda x: (x.stage, x.dtype)), key=in_order):
        counts = dict(zip(("right", "wrong", "refused"), amounts(group), strict=True))
        done = [x for x in group if x.error is not None]
        worst = max(done, key=lambda x: x.error or 0.0, default=Checked(group[0].stage, group[0].case))
        error, allowed = number(worst.error), number(worst.bound) if done else None
        yield {"stage": stage, "dtype": dtype, **counts, "worst error": error, "allowed": allowed}


def in_order(group: tuple[tuple[str, str], Any]) -> int:
    """Stages as a call goes through them, in the order in which dtypes came."""
    return ORDER.index(group[0][0])


def gradients(checks: Iterable[Checked]) -> Iterator[Figures]:
    """A row of each kind of memory and dtype: the worst error of every tensor."""
    of_training = [x for x in checks if x.stage == "gradients" and x.tensors]
    for (kind, dtype), group in grouped(of_training, lambda x: (x.case.kind, x.dtype)):
        found: Figures = {"memory": kind, "dtype": dtype}
        for name in TENSORS:
            found[name] = number(max((x.tensors[name] for x in group if name in x.tensors), default=None))
        yield {**found, "allowed": number(group[0].bound)}


def grouped(checks: Iterable[Checked], key: Callable[[Checked], tuple[str, str]]) -> list[tuple[Any, list[Checked]]]:
    """Those with the same key together, in the order in which keys come first."""
    found: dict[tuple[str, str], list[Checked]] = {}
    for x in checks:
        found.setdefault(key(x), []).append(x)
    return list(found.items())
