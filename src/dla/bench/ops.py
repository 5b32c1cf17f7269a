"""`dla bench ops`: prefill and decoding of the three memories beside softmax attention, on streams of several kinds.

All calls of a stream take turns in one run, so that whatever else the machine does falls on all of them; what is shown
is medians, and ratios with the spread of their rounds (the quartiles). A matrix product and a copy measured in the same
turns say how far a figure is from what the machine can do.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.bench.common import Figures, machine, say
from dla.bench.timing import Times, interleaved, medians, ratio
from dla.choices import MEMORIES
from dla.inspect.figures import describe
from dla.inspect.streams import Shape, Stream, captured, synthetic, with_steps
from dla.ops import backends, segment
from dla.report import table
from dla.report.found import Found

RATIOS = (
    ("dynamic", "single"),
    ("dynamic", "log_linear"),
    ("log_linear", "single"),
    ("sdpa", "dynamic"),
    ("chunked dynamic", "dynamic"),
    ("chunked single", "single"),
    ("scan", "decide"),
)
SLOW = ("chunked dynamic", "chunked single", "scan")  # take part in few rounds
CHUNK = 64  # tokens, as in ops/cpu/chunk.h
MATMUL = 1024  # rows and columns of the product that stands for the machine


def run(
    *,
    streams: Sequence[str],
    rounds: int,
    chunked: int = 1,
    decoded: int = 512,
    trained: int = 3,
    beta: bool = False,
    model: str | None = None,
    text: Path | None = None,
    out: Path | None = None,
    **sizes: int,
) -> Found:
    """Measure every stream; with ``out``, a file for the figures, a picture goes beside it. sizes: of a ``Shape``.

    chunked: rounds in which the chunked backend and the scan take part too, which are slow.
    decoded: tokens of each stream that are decoded, spread evenly over its second half.
    trained: rounds with gradients, of the first stream alone. beta: with delta steps, and keys of unit length.
    """
    found: list[Figures] = []
    shape = Shape(**sizes)
    for name in streams:
        made = captured(model, text, shape.length) if name == "captured" else synthetic(name, shape)
        made = made if made.beta is not None or not beta else with_steps(made)
        found.append({"stream": name, **measure(made, shape, rounds, chunked, decoded)})
        if trained and name == streams[0]:
            found[-1]["training"] = training(made, shape, trained, chunked)
        say(f"{name} measured")
    report = {"machine": machine(), "shape": vars(shape), "rounds": rounds, "streams": found}
    notes = []
    if out is not None:
        from dla.bench.ops_picture import draw

        picture = out.with_suffix(".png")
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(draw(report))
        notes = [f"figures in {out}, a picture in {picture}"]
    return Found("\n\n".join(map(as_text, found)), report, out, notes)


@torch.no_grad()
def measure(s: Stream, shape: Shape, rounds: int, chunked: int, decoded: int) -> Figures:
    made = segment(s.k, s.v, s.g, s.beta, capacity=shape.capacity)
    figures = describe(made, s.k.shape[3], s.v.shape[3])
    calls = prefills(s, shape)
    slow = {name: calls.pop(name) for name in SLOW}
    times = interleaved(calls, rounds)
    if chunked:  # against what they are held to, measured in the same turns
        own = {name: calls[name] for name in ("dynamic", "single", "decide")}
        apart = interleaved({**own, **slow}, chunked)
        for name in own:
            apart[f"{name} beside"] = apart.pop(name)
        times |= apart
    return {
        "tokens": s.k.shape[1],
        "boundary_rate": figures["boundary_rate"],
        "W": figures["W"],
        "prefill": [prefill_row(name, x, figures["W"], s) for name, x in times.items()],
        "ratios": [compare(times, *pair) for pair in RATIOS if pair[0] in times],
        "decode": decode(s, shape, decoded),
    }


def prefills(s: Stream, shape: Shape) -> dict[str, Callable[[], object]]:
    q, k, v = softmax_inputs(s)
    square = torch.randn(MATMUL, MATMUL)
    source, target = s.v.clone(), torch.empty_like(s.v)
    decide = partial(segment, s.k, s.v, s.g, s.beta, capacity=shape.capacity)

    def by_token(call: Callable[[], object]) -> object:
        """A call whose decisions are made token by token, whatever would be faster."""
        rows = backends.TABLE["decide"]
        backends.TABLE["decide"] = tuple(row for row in rows if row.kind != "by chunks")
        try:
            return call()
        finally:
            backends.TABLE["decide"] = rows

    return {
        **{memory: partial(s.attend, memory, shape.capacity) for memory in MEMORIES},
        "decide": decide,
        "sdpa": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
        "matmul": lambda: square @ square,
        "copy": lambda: target.copy_(source),
        "chunked dynamic": partial(by_token, partial(s.attend, "dynamic", shape.capacity, backend="chunked")),
        "chunked single": partial(s.attend, "single", backend="chunked"),
        "scan": partial(by_token, decide),
    }


def softmax_inputs(s: Stream) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, H, T, dk] for torch's attention, which is fast with one width alone."""
    H, dk, dv = s.v.shape[2], s.k.shape[3], s.v.shape[3]
    q, k, v = (x.transpose(1, 2) for x in (s.q, s.k, s.v))
    q, k = (x.expand(-1, H, -1, -1) if x.shape[1] == 1 else x.repeat_interleave(H // x.shape[1], 1) for x in (q, k))
    return q, k, F.pad(v, (0, dk - dv)) if dv < dk else v


def compare(times: Times, above: str, below: str) -> Figures:
    """The ratio of two calls: its median over the rounds, and the quartiles."""
    beside = f"{below} beside" if above in SLOW else below
    return {"ratio": f"{above} / {below}", **ratio(times[above], times[beside])}


def prefill_row(name: str, seconds: list[float], W: float, s: Stream) -> Figures:
    median = statistics.median(seconds)
    (B, T, H, dv), dk = s.v.shape, s.k.shape[3]
    # multiplications that the memory cannot do without: a read of every state and the write, in units of dk dv
    # (of Log-Linear the levels from CHUNK tokens on, of which half are live: shorter ones are read as tokens)
    units = {"single": 2.0, "log_linear": 1 + max(1.0, (T.bit_length() - CHUNK.bit_length() + 1) / 2), "dynamic": 1 + W}
    flops: float | None = None
    if name.split()[-1] in units and "beside" not in name:
        flops = 2 * units[name.split()[-1]] * B * T * H * dk * dv / median / 1e9
    elif name == "sdpa":
        flops = 2 * B * H * T * T / 2 * (dk + dv) / median / 1e9
    elif name == "matmul":
        flops = 2 * MATMUL**3 / median / 1e9
    bandwidth = 2 * s.v.nbytes / median / 1e9 if name == "copy" else None
    return {"call": name, "ms": 1e3 * median, "tokens/s": B * T / median, "GFLOP/s": flops, "GB/s": bandwidth}


# Decoding.


@torch.no_grad()
def decode(s: Stream, shape: Shape, tokens: int) -> Figures:
    """One token after another at places spread over the second half of the stream: time, bytes, W."""
    T, H, dk = s.v.shape[1], s.v.shape[2], s.k.shape[3]
    places = 16
    each, starts = max(1, tokens // places), [T // 2 + i * (T // 2) // places for i in range(places)]
    seconds: Times = {name: [] for name in (*MEMORIES, "sdpa", "read once")}
    held: dict[str, list[int]] = {name: [] for name in MEMORIES}
    touched: list[float] = []
    halved: list[int] = []  # bytes of the dynamic state in bfloat16
    states: dict[str, Any] = dict.fromkeys(MEMORIES)
    at = 0
    for start in starts:
        read = s.cut(at, start)
        for name in MEMORIES:
            carried = {"initial_state": states[name], "output_final_state": True}
            _, states[name] = read.attend(name, shape.capacity, **carried)
        at = min(start + each, T)
        _, k, v = (x.contiguous() for x in softmax_inputs(s.cut(0, start)))
        for t in range(start, at):
            one = s.cut(t, t + 1)
            for name in MEMORIES:
                step = partial(one.attend, name, shape.capacity, initial_state=states[name], inplace=True)
                seconds[name].append(_timed(step))
                held[name].append(live_bytes(states[name]))
            touched.append(dense_states(states["dynamic"]))
            bytes_ = torch.empty(held["dynamic"][-1] // 4)
            seconds["read once"].append(_timed(bytes_.sum))
            if t < start + 4:
                q, _, _ = softmax_inputs(one)
                seconds["sdpa"].append(_timed(partial(F.scaled_dot_product_attention, q, k, v)))
        halved.append(states["dynamic"].clone().stored_in(torch.bfloat16).nbytes)
    rows: list[Figures] = []
    for name, x in seconds.items():
        median, bytes_held = statistics.median(x), statistics.mean(held[name]) if name in held else None
        bandwidth = None if bytes_held is None else bytes_held / median / 1e9
        rows.append({"call": name, "us": 1e6 * statistics.mean(x), "median us": 1e6 * median, "bytes": bytes_held,
                     "GB/s": bandwidth, "W": statistics.mean(touched) if name == "dynamic" else None})  # fmt: skip
    matrix = s.v.shape[0] * H * dk * s.v.shape[3] * 4
    levels = statistics.mean(t.bit_count() for t in range(T // 2 + 1, T + 1)) * matrix
    own = statistics.mean(held["dynamic"])
    return {"tokens": rows, "dynamic bytes / Log-Linear's mean": own / levels,
            "in bfloat16": statistics.mean(halved) / levels, "decoded": each * places}  # fmt: skip


def dense_states(state: Any) -> float:
    """W of a dynamic state: a read's share of dense matrices, the mean over its heads."""
    _, _, dk, dv = state.shape
    rows: Tensor = (state.counts * (dk + dv)).clamp_max(dk * dv).sum(-1) / (dk * dv)
    return float(rows.mean())


def live_bytes(state: Any) -> int:
    """Of Log-Linear the levels that are live, of which there are as many as its length has bits; else all."""
    if hasattr(state, "levels"):
        matrix = state.levels[0, 0, 0].numel() * 4 * state.levels.shape[1]
        return sum(int(n).bit_count() for n in state.length.tolist()) * matrix
    return int(state.nbytes)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# With gradients.


def training(s: Stream, shape: Shape, rounds: int, chunked: int) -> list[Figures]:
    """Forward, and forward with backward, of every memory; in ``chunked`` rounds also by the torch backend."""
    leaves = replace(s, **{name: x.detach().clone().requires_grad_() for name, x in vars(s).items() if _real(x)})
    d_o = torch.randn(s.v.shape)

    def both(memory: str, **options: Any) -> object:
        wanted = [x for name, x in vars(leaves).items() if _real(x) and not (memory == "single" and name == "lam")]
        with torch.enable_grad():
            return torch.autograd.grad(leaves.attend(memory, shape.capacity, **options)[0], wanted, d_o)

    calls: dict[str, Callable[[], object]] = {}
    for memory in MEMORIES:
        calls[memory] = partial(s.attend, memory, shape.capacity)
        calls[f"{memory} with backward"] = partial(both, memory)
    with torch.no_grad():
        times = interleaved(calls, rounds)
        slow = {memory: partial(both, memory, backend="chunked") for memory in MEMORIES if chunked}
        beside = medians(interleaved(slow, chunked))
    middle = medians(times)
    rows = []
    for memory in MEMORIES:
        whole = middle[f"{memory} with backward"]
        row: Figures = {"memory": memory, "forward ms": 1e3 * middle[memory], "with backward ms": 1e3 * whole}
        over = ratio(times[f"{memory} with backward"], times[memory])
        row |= {"ratio": over.pop("median"), **over}
        if chunked:
            row["torch backend over this"] = beside[memory] / whole
        rows.append(row)
    return rows


def _real(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def as_text(found: Figures) -> str:
    """The figures of a stream as tables."""
    decode = found["decode"]
    parts = [
        f"{found['stream']}: {found['tokens']} tokens, boundary rate {found['boundary_rate']:.3f}, W {found['W']:.1f}",
        table(found["prefill"]),
        table(found["ratios"]),
        "one token, over the second half of the stream",
        table(decode["tokens"]),
        "; ".join(f"{name} {decode[name]:.2f}" for name in ("dynamic bytes / Log-Linear's mean", "in bfloat16")),
        *(["with gradients", table(found["training"])] if "training" in found else []),
    ]
    return "\n\n".join(parts)
