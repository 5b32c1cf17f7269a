"""The picture of `dla bench ops`: what a prefill and a decoded token take, beside one state."""

from typing import Any

from dla.report.plots import COLOURS, FONT, drawing, png
from dla.report.words import count_text

NAMES = {"single": "one state", "log_linear": "Log-Linear", "dynamic": "dynamic", "sdpa": "softmax"}


def draw(report: dict[str, Any]) -> bytes:
    """PNG: a row of bars for each stream, on a logarithmic axis; left the prefill, right a token."""
    streams, shape = report["streams"], report["shape"]
    with drawing(1.1 + 0.75 * len(streams)) as figure:
        axes = figure.subplots(1, 2)
        figure.suptitle(
            f"{shape['length']} tokens, {shape['heads']} heads of {shape['dk']} x {shape['dv']}, "
            f"K = {shape['capacity']}, {report['machine']['threads']} threads",
            fontsize=FONT + 1,
        )
        _bars(axes[0], [stream["prefill"] for stream in streams], "ms")
        _bars(axes[1], [stream["decode"]["tokens"] for stream in streams], "us")
        axes[0].set_xlabel("a prefill, milliseconds")
        axes[1].set_xlabel("a decoded token, microseconds")
        for ax in axes:
            ax.set_yticks([-(i + 0.3) for i in range(len(streams))], [stream["stream"] for stream in streams])
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        return png(figure)


def _bars(ax: Any, streams: list[list[dict[str, Any]]], unit: str) -> None:
    for i, rows in enumerate(streams):
        times = {row["call"]: row[unit] for row in rows}
        for j, name in enumerate(NAMES):
            y, time = -(i + 0.2 * j), times[name]
            ax.barh(y, time, height=0.18, color=COLOURS[j], label=NAMES[name] if i == 0 else None)
            ax.text(time * 1.08, y, f"{time:,.0f}" if time >= 100 else f"{time:.1f}", va="center", fontsize=FONT - 2)
    ax.set_xscale("log")
    ax.set_xlim(right=ax.get_xlim()[1] * 3)
    ax.xaxis.set_major_formatter(lambda x, _: count_text(x, 1000))
