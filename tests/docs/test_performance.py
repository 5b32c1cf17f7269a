"""The figures in docs/performance.md are those of benchmarks/*.json: every row is made once more from the files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "performance.md").read_text().split())  # lines may break anywhere
MEMORIES = ("single", "log_linear", "dynamic")
STREAMS = ("correlated", "every", "drift", "captured")


def read(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def slashed(values: Iterable[float], digits: int = 0) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def by(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    return {row[key]: row for row in rows}


def figures() -> list[str]:
    found = by(read("figures")["figures"], "figure")
    value = {name: figure["value"] for name, figure in found.items()}
    growth = [value[f"time T=65536 / T=8192, {memory}"] for memory in ("single", "dynamic", "log_linear")]
    return [
        f"T = 16384 | {value['causal SDPA / dynamic, T=16384']:.0f} × as fast |",
        f"{value['transformers torch_chunk_gated_delta_rule / single (g, beta), T=16384']:.1f} × as fast |",
        f"{value['reference / chunked dynamic, T=4096']:.0f} × as fast |",
        f"| {slashed(growth, 1)} |",
        f"| {value['training memory (GB), H=4, 64x64, T=16384']:.2f} GB |",
        f"| {value['training memory (GB), H=48, one key head, 128x64, T=4096']:.2f} GB |",
        f"one of three does not: {growth[0]:.1f}",
    ]


def expected() -> list[str]:
    """The first table, of what to expect."""
    streams = by(read("ops")["streams"], "stream")
    ratios = [by(streams[name]["ratios"], "ratio") for name in STREAMS]
    low, high = (pick(r["dynamic / single"]["median"] for r in ratios) for pick in (min, max))
    other = sorted(r["dynamic / log_linear"]["median"] for r in ratios)
    sdpa = sorted(r["sdpa / dynamic"]["median"] for r in ratios)
    tokens = [by(streams[name]["decode"]["tokens"], "call") for name in STREAMS]
    decode = sorted(t["dynamic"]["median us"] / t["single"]["median us"] for t in tokens)
    levels = sorted(t["dynamic"]["median us"] / t["log_linear"]["median us"] for t in tokens)
    bytes_ = sorted(streams[name]["decode"]["dynamic bytes / Log-Linear's mean"] for name in STREAMS)
    half = sorted(streams[name]["decode"]["in bfloat16"] for name in STREAMS)
    whole = by(read("models")["rows"], "model")
    times = [whole["dynamic"]["seconds"] / whole[name]["seconds"] for name in ("single", "log_linear", "transformers")]
    cache = [whole["dynamic"]["cache bytes"] / whole[name]["cache bytes"] for name in ("single", "log_linear")]
    return [
        f"{low:.1f} to {high:.1f} × as long | {other[0]:.1f} to {other[-1]:.1f} × as long |",
        f"{sdpa[0]:.0f} to {sdpa[-1]:.0f} × as fast",
        f"{decode[0]:.1f} to {decode[-1]:.1f} × as long | {levels[0]:.1f} to {levels[-1]:.1f} × as long |",
        f"{bytes_[0]:.2f} to {bytes_[-1]:.2f} × the bytes of its live levels | {half[0]:.2f} to {half[-1]:.2f} × with",
        f"{times[0]:.2f} × as long | {times[1]:.2f} × as long | {times[2]:.2f} × as long",
        f"{cache[0]:.1f} × the bytes | {cache[1]:.2f} × the bytes",
    ]


def prefill() -> list[str]:
    streams = by(read("ops")["streams"], "stream")
    calls = [by(streams[name]["prefill"], "call") for name in STREAMS]
    ratios = [by(streams[name]["ratios"], "ratio") for name in STREAMS]
    times = [f"{slashed(c[memory]['ms'] for memory in MEMORIES)} ms" for c in calls]
    torch = [
        f"{r['chunked dynamic / dynamic']['median']:.0f} × ({r['chunked single / single']['median']:.0f} ×)"
        for r in ratios
    ]
    sdpa = [r["sdpa / dynamic"]["median"] for r in ratios]
    delta = [by(stream["prefill"], "call") for stream in read("ops_delta")["streams"]]
    return [
        row("one state / Log-Linear / dynamic", *times),
        row("decisions alone, part of the last", *(f"{c['decide']['ms']:.0f} ms" for c in calls)),
        row("torch's causal softmax attention over dynamic", *(f"{x:.0f} ×" for x in sdpa)),
        row("the torch backend over the C++ one, dynamic (one state)", *torch),
        row("W: dense states that a read touches, of 30", *(f"{streams[name]['W']:.1f}" for name in STREAMS)),
        row("share of tokens that open a state", *(f"{streams[name]['boundary_rate']:.2f}" for name in STREAMS)),
        *(f"{slashed(c[memory]['ms'] for memory in MEMORIES)} ms" for c in delta),
    ]


def mixer() -> list[str]:
    ms = {row["mixer"]: row["ms"] for row in read("mixer")["mixers"]}
    theirs = f"transformers {ms['transformers, chunks of 256']:.0f} ms ({ms['transformers, chunks of 64']:.0f} with"
    return [theirs, "one state {:.0f}, Log-Linear {:.0f}, dynamic {:.0f}".format(*(ms[memory] for memory in MEMORIES))]


def decode() -> list[str]:
    streams = by(read("ops")["streams"], "stream")
    tokens = [by(streams[name]["decode"]["tokens"], "call") for name in STREAMS]
    own = read("decoding")
    contexts = [
        row(
            str(found["context"]),
            *(f"{found[f'{memory} ms']:.1f} ms, {found[f'{memory} bytes'] / 1e6:.1f} MB" for memory in MEMORIES),
        )
        for found in own["rows"]
    ]
    layers = [
        row(f"{r['preset']}, {r['memory']}", *(f"{r[key]:.0f}" for key in ("torch", "program", "kernels")))
        for r in read("layer_step")["rows"]
    ]
    medians = [f"{slashed(t[memory]['median us'] for memory in MEMORIES)} µs" for t in tokens]
    return [
        row("one state / Log-Linear / dynamic, median", *medians),
        row("softmax attention over as many keys", *(f"{t['sdpa']['median us'] / 1e3:.1f} ms" for t in tokens)),
        f"over {own['tokens']} consecutive tokens",
        *contexts,
        *layers,
    ]


def models() -> list[str]:
    names = {
        "transformers' Mamba-2 (chunk_size 64)": "transformers",
        "one state": "single",
        "Log-Linear": "log_linear",
        "DLA, 30 states": "dynamic",
    }
    found = by(read("models")["rows"], "model")
    return [
        row(
            label,
            f"{r['prefill seconds']:.1f} s",
            f"{r['ms/token']:.0f} ms",
            f"{r['seconds']:.1f} s",
            f"{r['peak extra bytes'] / 1e9:.1f} GB",
            f"{r['cache bytes'] / 1e6:.0f} MB",
        )
        for label, r in ((label, found[name]) for label, name in names.items())
    ]


def training() -> list[str]:
    medians = [
        row(r["memory"], *(f"{r[key]:.2f}" for key in ("forward", "backward", "step"))) for r in read("step")["medians"]
    ]
    ops = [
        row(
            r["memory"],
            f"{r['forward ms']:.0f} ms",
            f"{r['with backward ms']:.0f} ms",
            f"{r['ratio']:.1f}",
            f"{r['torch backend over this']:.0f} ×",
        )
        for r in by(read("ops")["streams"], "stream")["correlated"]["training"]
    ]
    loop = by(read("loop")["figures"], "figure")
    own = f"{loop['dla train / bare loop']['value']:.2f} of the tokens"
    return [*medians, *ops, own]


def memory() -> list[str]:
    streams = by(read("ops")["streams"], "stream")
    held = [streams[name]["decode"] for name in STREAMS]
    bytes_ = [by(h["tokens"], "call")["dynamic"]["bytes"] / 1e6 for h in held]
    levels = "dynamic bytes / Log-Linear's mean"
    shares = [f"{h[levels]:.2f}; {h['in bfloat16']:.2f}" for h in held]
    return [
        row("bytes of the dynamic state", *(f"{b:.1f} MB" for b in bytes_)),
        row("over the mean of Log-Linear's live levels; in bfloat16", *shares),
    ]


def evaluation() -> list[str]:
    single, dynamic = read("evaluation")["rows"], read("evaluation_dynamic")["rows"]
    return [f"{single[0]['ratio']:.1f} ×", f"{single[1]['ratio']:.1f} ×", f"{dynamic[0]['ratio']:.1f} ×"]


PARTS = (figures, expected, prefill, mixer, decode, models, training, memory, evaluation)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_figures_are_those_of_the_files(part: Any) -> None:
    missing = [line for line in part() if line not in PAGE]
    assert not missing, "\n".join(missing)


def test_every_file_is_named() -> None:
    """What makes which file is said of all of them."""
    files = sorted(path.name for path in (ROOT / "benchmarks").glob("*.json"))
    assert files and not [name for name in files if f"benchmarks/{name}" not in PAGE]
