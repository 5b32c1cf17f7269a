"""The table of docs/study.md on both readings of the score, from what study/boundaries.py measured.

    python study/scores_table.py

Means over three seeds, slots in order of time.
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parent / "results"
MARKS = {"books": [("text", "paragraph")], "library": [("text", "function"), ("documents", "document")]}


def rows(corpus: str) -> dict[str, list[dict[str, Any]]]:
    """The runs of each row, without those with slots by recency."""
    found = defaultdict(list)
    for run in json.loads((RESULTS / f"scores_{corpus}" / "boundaries.json").read_text()):
        if "recency" not in run["label"]:
            found[run["label"].removesuffix(" slot_order=chronological")].append(run)
    return found


def table(corpus: str) -> str:
    marks = MARKS[corpus]
    heads = ["", "loss", "boundary rate", "live states", "W", *(f"AUC, {mark} starts" for _, mark in marks)]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for label, runs in rows(corpus).items():
        aucs = [[run[part]["auc"][mark]["own"] for run in runs] for part, mark in marks]
        lines.append(
            [
                label.replace(" score=", ", ").replace(" tau=", " score, τ = "),
                f"{mean(run['validation loss'][0] for run in runs):.3f}",
                f"{mean(run['text']['boundary_rate'] for run in runs):.2f}",
                f"{mean(run['memory']['live_states'] for run in runs):.1f}",
                f"{mean(run['memory']['W'] for run in runs):.1f}",
                *(f"{mean(a['mean'] for a in auc):.2f} ({mean(a['best'] for a in auc):.2f})" for auc in aucs),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for corpus in MARKS:
        print(f"{corpus}\n\n{table(corpus)}\n")
