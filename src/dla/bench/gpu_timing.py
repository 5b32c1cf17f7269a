"""Times of stages and operators on a GPU, beside softmax attention and other people's kernels; the choice of tiles."""

import importlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.bench.common import Figures, say
from dla.bench.gpu_cases import OPERATORS, deciding
from dla.bench.timing import now
from dla.inspect.streams import correlated
from dla.ops import backends, segment
from dla.ops.gpu.configs import TRIED, Config, using
from dla.ops.gpu.launch import launches
from dla.ops.gpu.shapes import LayerShape

Call = Callable[[], object]
Clock = Callable[[], float]
LONG = 5.0  # seconds that all rounds of a call may take
PROMPT = 2048  # tokens that were read before the one that is decoded
BETTER = 0.97  # of the time: what a choice must reach to be taken for faster
WIDE = ("lam", "g", "beta")  # never halves


def calls(shape: LayerShape, device: str) -> dict[str, Call]:
    """Everything that is timed at a shape, by name: prefill, its two stages, a decoding step, and others' kernels."""
    x = operands(shape, device)
    plain = {name: each for name, each in x.items() if name != "lam"}
    made: dict[str, Call] = {}
    for memory, run in OPERATORS.items():
        given = plain if memory == "single" else x
        options: dict[str, Any] = {"capacity": shape.capacity} if memory == "dynamic" else {}
        made[f"{memory}: prefill"] = partial(run, **given, **options)
        if memory == "dynamic":
            made["dynamic: decide"] = partial(segment, **deciding(x), **options)
            made["dynamic: attend"] = attending(run, given, options)
        made[f"{memory}: decode"] = decoding(run, given, options)
    return {**made, "sdpa": softmax(x), **others(x, shape)}


def operands(shape: LayerShape, device: str) -> dict[str, Tensor]:
    """A layer's inputs, by their names."""
    s = correlated(0, length=shape.length, heads=shape.heads, key_heads=shape.key_heads, dk=shape.dk, dv=shape.dv,
                   lam_width=shape.capacity, beta=shape.beta)  # fmt: skip
    names = ("q", "k", "v", "lam", "g", "beta")
    given = {name: x for name in names if (x := getattr(s, name)) is not None}
    return {name: each.to(device, torch.float32 if name in WIDE else shape.dtype) for name, each in given.items()}


def attending(run: Any, x: Mapping[str, Tensor], options: Any) -> Call:
    """The second stage: decisions are made once, before the first call."""
    kept: list[Any] = []

    def call() -> object:
        if not kept:
            kept.append(segment(**deciding(x), **options))
        return run(**x, **options, segmentation=kept[0])

    return call


def decoding(run: Any, x: Mapping[str, Tensor], options: Any) -> Call:
    """One token on the state that a prompt left, which is made before the first call."""
    kept: list[Any] = []
    token = {name: each[:, -1:].contiguous() for name, each in x.items()}

    def call() -> object:
        if not kept:
            prompt = {name: each[:, :PROMPT] for name, each in x.items()}
            kept.append(run(**prompt, **options, output_final_state=True)[1])
        return run(**token, **options, initial_state=kept[0], inplace=True)

    return call


def softmax(x: Mapping[str, Tensor]) -> partial[Tensor]:
    """Causal attention of the same heads, all of the keys' width: it is fast with one width alone."""
    q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
    heads, width = v.shape[1], k.shape[3]
    q, k = (each.repeat_interleave(heads // each.shape[1], 1) for each in (q, k))
    v = F.pad(v, (0, width - v.shape[3])) if v.shape[3] < width else v[..., :width]
    return partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)


def others(x: Mapping[str, Tensor], shape: LayerShape) -> dict[str, Call]:
    """fla's kernels of the same recurrences, if they are installed."""
    heads = {name: x[name].repeat_interleave(shape.heads // shape.key_heads, 2) for name in ("q", "k")}
    g, v = x["g"], x["v"]
    if shape.beta:
        named = {"gated_delta_rule": ("chunk_gated_delta_rule", {**heads, "v": v, "g": g, "beta": x["beta"]})}
    else:
        levels = (shape.length - 1).bit_length() + 1
        scales = x["lam"][..., :levels].contiguous()
        named = {
            "simple_gla": ("chunk_simple_gla", {**heads, "v": v, "g": g}),
            "log_linear_attn": ("chunk_log_linear_attn", {**x, "level_scales": scales}),
        }
        del named["log_linear_attn"][1]["lam"]
    made: dict[str, Call] = {}
    for module, (name, arguments) in named.items():
        try:
            made[f"fla: {module}"] = partial(getattr(importlib.import_module(f"fla.ops.{module}"), name), **arguments)
        except Exception as error:  # whatever keeps another package from being imported
            say(f"fla: {module} takes no part: {' '.join(str(error).split())[:100]}")
    return made


def seconds(call: Call, rounds: int, clock: Clock = now) -> float:
    """The median after a first call that does not count; fewer rounds of calls that take long."""
    call()
    times: list[float] = []
    while len(times) < rounds and sum(times) <= LONG:
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times)


def timed(name: str, call: Call, rounds: int, clock: Clock = now) -> Figures:
    """One row: the time, and who ran what; or why not."""
    try:
        with torch.no_grad():
            call()  # the first one makes what the others need
            with backends.record() as ran:
                call()
            taken = seconds(call, rounds, clock)
    except Exception as error:  # one that fails must not end the others; what it was is told
        return {"call": name, "ms": None, "by": f"failed: {failure(error)}"}
    return {"call": name, "ms": taken * 1e3, "by": who(ran)}


def failure(error: Exception) -> str:
    """In a few words."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def who(ran: Iterable[backends.Ran]) -> str:
    """Who ran each stage, without repetitions."""
    return ", ".join(dict.fromkeys(f"{x.stage}: {x.backend}" for x in ran))


def tuned(calls: Mapping[str, Call], measure: Callable[[Call], float]) -> dict[str, Config]:
    """What each kernel of these calls is to be launched with, where something is faster than the table's choice."""
    users: dict[str, list[Call]] = {}
    for call in calls.values():
        with launches() as seen:
            call()
        for name in dict.fromkeys(each.name for each in seen):
            users.setdefault(name, []).append(call)
    found: dict[str, Config] = {}
    for kernel in users.keys() & TRIED.keys():
        least = taken_with(kernel, {}, users[kernel], measure) * BETTER
        for choice in TRIED[kernel]:
            if (taken := taken_with(kernel, choice, users[kernel], measure)) < least:
                least, found[kernel] = taken, choice
        say(f"{kernel}: {found.get(kernel, 'as it is')}")
    return found


def taken_with(kernel: str, choice: Config, calls: Sequence[Call], measure: Callable[[Call], float]) -> float:
    """Seconds of all calls, a kernel being launched so."""
    with using(kernel, choice):
        return sum(map(measure, calls))
