"""Does a score see that the content changed? Both scores on a stream whose changes are known.

    python study/transitions.py

The noisy piecewise-constant stream of `dla inspect stream` (segments of 16 tokens on average), with forgetting from
none to a factor of e a token. AUC: how often a token at which a segment begins scores above another (0.5: the
score cannot tell). Hits and false alarms: of the tokens that begin a segment and of the others, the share that opens a
state.
"""

import torch
from torch import Tensor

from dla import segment
from dla.inspect.streams import correlated
from dla.report import table

LENGTH, HEADS, WIDTH, SEEDS = 4096, 4, 16, range(3)
THRESHOLDS = (0.5, 0.6, 0.7)
DECAYS = {"none": 0.0, "0.9 a token": 0.1054, "0.6 a token": 0.511, "1/e a token": 1.0}


def auc(score: Tensor, positive: Tensor) -> float:
    """score [T, H], positive [T]; the mean over heads."""
    ranks = score.double().argsort(0).argsort(0).double() + 1
    ones = positive.sum()
    return float(((ranks[positive].sum(0) - ones * (ones + 1) / 2) / (ones * (~positive).sum())).mean())


def row(score: str, name: str, decay: float) -> dict[str, str]:
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        stream = correlated(seed, length=LENGTH, heads=HEADS, dk=WIDTH, dv=WIDTH)
        changes = stream.changes[0].clone()
        changes[0] = False
        g = torch.full_like(stream.g, -decay)
        for tau in THRESHOLDS:
            seen = segment(stream.k, stream.v, g, tau=tau, score=score)
            opened = seen.boundary[0].float()
            found.setdefault("AUC", []).append(auc(seen.score[0], changes))
            found.setdefault(f"hits, τ={tau}", []).append(float(opened[changes].mean()))
            found.setdefault(f"false alarms, τ={tau}", []).append(float(opened[~changes].mean()))
    means = {name: sum(values) / len(values) for name, values in found.items()}
    shown = {"AUC": f"{means['AUC']:.3f}"}
    for tau in THRESHOLDS:
        shown[f"hits / false alarms, τ = {tau}"] = (
            f"{means[f'hits, τ={tau}']:.2f} / {means[f'false alarms, τ={tau}']:.2f}"
        )
    return {"score": score, "forgetting": name, **shown}


if __name__ == "__main__":
    print(table([row(score, name, decay) for score in ("token", "state") for name, decay in DECAYS.items()]))
