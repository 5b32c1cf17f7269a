"""What a page shows, as numbers for JSON: of every layer and head, its decisions and the states at the end."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dla.inspect.queries import Query
from dla.inspect.reading import LayerReading, Reading
from dla.ops.segmentation import ALIVE

MEANING = (
    "Theorem 1's bound, for a query of norm 1 after the last token, with u_t = k_t v_tᵀ (times the step beta under the "
    "delta rule; decays are left out). It measures how mixed the tokens inside a block are. It is not an error of the "
    "model: a state is the sum of its tokens, reading a sum is exact, and with block means as representatives the "
    "deviation itself is 0. More blocks make it smaller, so compare partitions of as many blocks."
)


def numbers(readings: Sequence[Reading]) -> dict[str, Any]:
    """The readings as JSON can hold them."""
    return {"bound": MEANING, "readings": [_reading(one) for one in readings]}


def _reading(reading: Reading) -> dict[str, Any]:
    return {
        "name": reading.name,
        "tokens": len(reading.ids),
        "ids": reading.ids,
        "text": reading.pieces,
        "layers": [_layer(one, reading.pieces) for one in reading.layers],
        "queries": [_query(one, reading) for one in reading.queries],
        "notes": reading.notes,
    }


def _layer(layer: LayerReading, pieces: Sequence[str]) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "kind": layer.kind,
        "rules": layer.rules,
        "totals": layer.totals,
        "heads": [_head(layer, head, pieces) for head in range(layer.heads)],
    }


def _head(layer: LayerReading, head: int, pieces: Sequence[str]) -> dict[str, Any]:
    decided = layer.decided
    starts = decided.boundary[0, :, head].nonzero()[:, 0]
    deaths = decided.death[0, starts, head].tolist()
    found = {
        "boundary_rate": len(starts) / len(pieces),
        "starts": starts.tolist(),
        "deaths": [None if death == ALIVE else death for death in deaths],
        "states": states(layer, head, pieces),
        "bounds": layer.bounds[head],
        "blocks": layer.blocks[head],
    }
    return {**found, "scores": decided.score[0, :, head].tolist()} if layer.scored else found


def states(layer: LayerReading, head: int, pieces: Sequence[str], t: int | None = None) -> list[dict[str, Any]]:
    """The table of the states alive after step t (None: the last), oldest first."""
    decided, rows = layer.decided, []
    score = decided.score[0, :, head].double()
    for start, end in decided.spans(0, head, t):
        absorbed = start + 1 + decided.boundary[0, start + 1 : end, head].nonzero()[:, 0]
        information = float(score[start:end].sum()) if layer.scored else None
        rows.append({
            "start": start,
            "end": end,
            "tokens": end - start,
            "text": "".join(pieces[start:end]),
            "information": information,
            "density": None if information is None else information / (end - start),
            "merged_from": [start, *absorbed.tolist()],
        })  # fmt: skip
    return rows


def _query(query: Query, reading: Reading) -> dict[str, Any]:
    layers = {str(i): {"lam": one.lam, "share": one.share, "left_out": [asdict(effect) for effect in one.effects]}
              for i, one in query.layers.items()}  # fmt: skip
    return {
        "at": query.at,
        "text": reading.pieces[query.at],
        "candidates": candidates(query, reading),
        "layers": layers,
    }


def candidates(query: Query, reading: Reading) -> list[dict[str, Any]]:
    """The tokens whose probabilities a query tells, the likeliest first."""
    return [
        {"token": token, "text": reading.words[token], "p": p}
        for token, p in zip(query.candidates, query.p, strict=True)
    ]
