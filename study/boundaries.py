"""Do boundaries stand where the text begins something new? AUCs of the scores of trained models.

    dla lab run study/scores_books.toml --save-models       (with DLA_DATA; and scores_library.toml without)
    python study/boundaries.py out/lab/scores_books out/lab/scores_library > study/results/boundaries.json

For every trained model of a grid, on text that it was not trained on: how often the score of a byte that begins a
paragraph, a function or class, or a document is larger than that of another byte (0.5: it cannot tell). The mean over
layers and heads, and the best of them. Besides the score that the model has: both formulas without RMSNorm, which see
how large a token is as well, on the same keys, values and boundaries.
"""

import argparse
import json
import re
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dla.inspect.observe import watch
from dla.lab.tasks.text import HELD_OUT, Text
from dla.models import DLAForCausalLM
from dla.models.load import load_model

LENGTH, WINDOWS, DOCUMENT_LEAD = 512, 48, 256


def windows(corpus: str) -> Tensor:
    """[windows, LENGTH] bytes of validation text."""
    return Text(corpus=corpus, part="validation", length=LENGTH).sample(WINDOWS, 7).ids


def documents() -> Tensor:
    """[pairs, LENGTH] the end of a module of the library and the beginning of another, which begins in the middle."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith(("_", "site")))
    held = [text for text in (path.read_bytes() for path in files[::HELD_OUT]) if len(text) > LENGTH]
    pairs = zip(held, [*held[1:], held[0]], strict=True)
    return torch.tensor([list(a[-DOCUMENT_LEAD:] + b[: LENGTH - DOCUMENT_LEAD]) for a, b in pairs])


def starts(ids: Tensor, pattern: bytes) -> Tensor:
    """[B, T] bool: bytes at which a match of the pattern's group begins."""
    found = torch.zeros(ids.shape, dtype=torch.bool)
    for row, line in zip(found, ids.tolist(), strict=True):
        row[[match.start(1) for match in re.finditer(pattern, bytes(line))]] = True
    found[:, :16] = False  # a window's own beginning
    return found


def unnormalised(made: Any, boundary: Tensor) -> dict[str, Tensor]:
    """[B, T, H] |token - state| / |state| and |state with the token - state| / |state|, along given boundaries."""
    heads = made.v.shape[2]
    k = made.k.repeat_interleave(heads // made.k.shape[2], 2).double()
    token = torch.einsum("bthd,bthe->bthde", k, made.v.double())
    if made.beta is not None:
        token = token * made.beta[..., None, None]
    state, found = torch.zeros_like(token[:, 0]), {"token": [], "state": []}
    for t in range(token.shape[1]):
        size = state.norm(dim=(-1, -2)).clamp_min(1e-12)
        found["token"].append((token[:, t] - state).norm(dim=(-1, -2)) / size)
        found["state"].append(token[:, t].norm(dim=(-1, -2)) / size)
        if made.beta is not None:
            key = k[:, t]
            erased = made.beta[:, t, :, None, None] * torch.einsum("bhd,bhf,bhfe->bhde", key, key, state)
            state = state - erased
        if made.g is not None:
            state = state * made.g[:, t].double().exp()[..., None, None]
        state = torch.where(boundary[:, t][..., None, None], 0.0, state) + token[:, t]
    return {name: torch.stack(rows, 1) for name, rows in found.items()}


def auc(score: Tensor, positive: Tensor) -> list[float]:
    """Of every head: score [B, T, H], positive [B, T]; ties count half."""
    flat, wanted = score.flatten(0, 1).double(), positive.flatten()
    found = []
    for head in flat.T:
        values, place = torch.unique(head, return_inverse=True)
        here = torch.bincount(place[wanted], minlength=len(values)).double()
        there = torch.bincount(place[~wanted], minlength=len(values)).double()
        below = there.cumsum(0) - there
        found.append(float((here * (below + there / 2)).sum() / (here.sum() * there.sum())))
    return found


@torch.no_grad()
def of_model(model: DLAForCausalLM, ids: Tensor, marks: dict[str, Tensor]) -> dict[str, Any]:
    """AUCs by mark and score, over all layers and heads."""
    found: dict[str, dict[str, list[float]]] = {mark: {} for mark in marks}
    rates: list[float] = []

    def look(memory: Any, x: Tensor, made: Any, call: Any) -> None:
        decided = memory.decide(made)
        rates.append(float(decided.boundary.double().mean()))
        raw = unnormalised(made, decided.boundary)
        scores = {"own": decided.score, **{f"{name}, no RMSNorm": raw[name] for name in raw}}
        for mark, positive in marks.items():
            for name, score in scores.items():
                found[mark].setdefault(name, []).extend(auc(score, positive))

    with watch(model, look):
        model(ids, use_cache=False, logits_to_keep=1)
    means = {
        mark: {name: {"mean": sum(a) / len(a), "best": max(a)} for name, a in by_score.items()}
        for mark, by_score in found.items()
    }
    return {"boundary_rate": sum(rates) / len(rates), "auc": means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of grids, run with --save-models")
    rows = []
    for folder in parser.parse_args().runs:
        for line in (folder / "results.jsonl").read_text().splitlines():
            run = json.loads(line)
            model = load_model(str(folder / "models" / run["key"]), dtype=None, device="cpu")
            row = {name: run[name] for name in ("grid", "label", "seed", "loss", "memory")}
            row["validation loss"] = [e["loss"] for e in run["evaluations"]]
            if run["task"]["corpus"] == "books":
                ids = windows("books")
                row["text"] = of_model(model, ids, {"paragraph": starts(ids, rb"\n\n+(?=\S)(\S)")})
            else:
                ids = windows("library")
                row["text"] = of_model(model, ids, {"function": starts(ids, rb"\n *((?:async )?def |class )")})
                ids = documents()
                first = torch.zeros(ids.shape, dtype=torch.bool)
                first[:, DOCUMENT_LEAD] = True
                row["documents"] = of_model(model, ids, {"document": first})
            rows.append(row)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
