"""The picture of `dla bench ops`: what a prefill and a decoded token take, beside one state."""

from typing import Any

from dla.plotting import COLOURS, FONT, INK, new_figure, png, tidy

PREFILL = ("single", "log_linear", "dynamic", "sdpa")
NAMES = {"single": "one state", "log_linear": "Log-Linear", "dynamic": "dynamic", "sdpa": "softmax"}


def draw(report: dict[str, Any]) -> bytes:
    """PNG: a row of bars for each stream, on a logarithmic axis; left the prefill, right a token."""
    streams = report["streams"]
    figure = new_figure(1.1 + 0.75 * len(streams))
    axes = figure.subplots(1, 2)
    shape = report["shape"]
    figure.suptitle(
        f"{shape['length']} tokens, {shape['heads']} heads of {shape['dk']} x {shape['dv']}, K = {shape['capacity']}, "
        f"{report['machine']['threads']} threads",
        fontsize=FONT + 1,
        color=INK,
    )
    for ax, part, unit in zip(axes, ("prefill", "decode"), ("ms", "us"), strict=True):
        for i, stream in enumerate(streams):
            rows = stream["decode"]["tokens"] if part == "decode" else stream["prefill"]
            times = {row["call"]: row[unit] for row in rows}
            for j, name in enumerate(PREFILL):
                y = -(i + 0.2 * j)
                ax.barh(y, times[name], height=0.18, color=COLOURS[j], label=NAMES[name] if i == 0 else None)
                ax.text(
                    times[name] * 1.08,
                    y,
                    f"{times[name]:,.0f}" if times[name] >= 100 else f"{times[name]:.1f}",
                    va="center",
                    fontsize=FONT - 2,
                    color=INK,
                )
        ax.set_xscale("log")
        ax.set_xlim(right=ax.get_xlim()[1] * 3)
        ax.set_yticks([-(i + 0.3) for i in range(len(streams))], [stream["stream"] for stream in streams])
        ax.set_xlabel(
            {"prefill": "a prefill, milliseconds", "decode": "a decoded token, microseconds"}[part], fontsize=FONT
        )
        tidy(ax)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, fontsize=FONT - 1, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0.93), ncols=4
    )
    figure.subplots_adjust(left=0.11, right=0.98, top=1 - 0.6 / figure.get_figheight(), wspace=0.28,
                           bottom=0.5 / figure.get_figheight())  # fmt: skip
    return png(figure)
