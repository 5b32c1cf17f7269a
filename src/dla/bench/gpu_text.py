"""What `dla bench gpu` prints: the machine, what was checked and how far off it was, times, at the end a verdict."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dla.bench.common import Figures
from dla.bench.gpu_checks import Checked, number
from dla.bench.gpu_training import shown
from dla.report import table

TENSORS = ("o", "q", "k", "v", "lam", "g", "beta", "route")  # o: the outputs; the others' gradients


def proven(checks: Sequence[Checked]) -> bool:
    """Whether something was checked, and held."""
    return all(x.holds for x in checks) and any(not x.refused for x in checks)


def counted(checks: Sequence[Checked]) -> str:
    """How many checks hold."""
    wrong, refused = [x for x in checks if not x.holds], sum(bool(x.refused) for x in checks)
    return f"{len(checks) - len(wrong) - refused} checks hold, {len(wrong)} do not, {refused} are refused"


def verdict(checks: Sequence[Checked], complaints: Sequence[str] = ()) -> str:
    """The last line."""
    word = "the kernels are right" if proven(checks) else "NOTHING IS PROVEN"
    if not all(x.holds for x in checks):
        word = "KERNELS ARE WRONG"
    elif complaints and proven(checks):
        word += ", BUT SOME TAKE TOO MUCH OF A GPU"
    return f"verdict: {word} ({counted(checks)})"


def as_text(found: Figures, checks: Sequence[Checked], more: Sequence[str] = ()) -> str:
    """One text to paste. more: what comes before the verdict."""
    parts = [", ".join(f"{name} {value}" for name, value in found["machine"].items())]
    if checks:
        parts.append("Checks against the reference in float64; errors as parts of the largest number expected\n\n"
                     + table(list(stages(checks))))  # fmt: skip
    if trained := list(gradients(checks)):
        parts.append("Training: the largest error of the outputs o and of each input's gradient\n\n" + table(trained))
    if wrong := [x.row() for x in checks if not x.holds]:
        parts.append("What does not hold\n\n" + table(wrong))
    if reasons := dict.fromkeys(f"{x.stage}: {x.refused}" for x in checks if x.refused):
        parts.append("Refused\n\n" + "\n".join(f"  {reason}" for reason in reasons))
    if times := found.get("times"):
        parts.append("Calls without gradients, medians\n\n" + table(times))
    if training := found.get("training"):
        head = "Training, medians; x: times the memory with one state; MB: the peak beside the inputs\n\n"
        parts.append(head + table(list(shown(training))))
    if chosen := found.get("tuned"):
        parts.append("Faster than the table\n\n" + "\n".join(f"  {name}: {own}" for name, own in chosen.items()))
    return "\n\n".join([*parts, *more, verdict(checks, found.get("complaints", ()))])


def stages(checks: Iterable[Checked]) -> Iterator[Figures]:
    """A row of each stage and dtype: how many checks hold, and the worst of them."""
    for (stage, dtype), group in grouped(checks, lambda x: (x.stage, x.dtype)):
        done = [x for x in group if not x.refused]
        right = sum(x.holds for x in done)
        counts = {"hold": right, "do not": len(done) - right, "refused": len(group) - len(done)}
        worst = max(done, key=lambda x: x.error or 0.0, default=Checked(group[0].stage, group[0].case))
        yield {"stage": stage, "dtype": dtype, **counts, "worst": number(worst.error), "allowed": number(worst.bound)}


def gradients(checks: Iterable[Checked]) -> Iterator[Figures]:
    """A row of each kind of memory and dtype: the worst error of every tensor."""
    of_training = [x for x in checks if x.stage == "gradients" and not x.refused]
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
