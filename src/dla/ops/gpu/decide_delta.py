"""How the kernels of decisions with the delta rule are launched, one after another."""

from typing import Any

import torch
from torch import Tensor

from dla.ops.gpu.decide_delta_carry import delta_carry
from dla.ops.gpu.decide_delta_scores import delta_scores
from dla.ops.gpu.decide_delta_settle import delta_settle
from dla.ops.gpu.decide_delta_table import DELTA_LINKS, DELTA_NOTES, delta_terms, delta_unit_keys
from dla.ops.gpu.decide_delta_window import delta_window
from dla.ops.gpu.decide_launches import start
from dla.ops.gpu.decide_merges import merges
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.problem import Problem


def tables(problem: Problem, tiles: Tiles) -> dict[str, Any]:
    """beta, and what these kernels leave to each other."""
    (_, H, dk, _), device, tokens = problem.shape, problem.device, problem.layout.batch * problem.layout.time
    assert problem.beta is not None

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    squares = ("c", "V", "own_scores", "own_y", "old_scores", "old_y")
    made: dict[str, Any] = {name: empty(tiles.count, H, CHUNK, CHUNK) for name in squares}
    made |= {name: empty(tokens, H, dk) for name in ("eff", "end_keys")}
    made |= {
        "notes": empty(tiles.count, H, DELTA_NOTES.value, CHUNK),
        "origins": empty(tiles.count, H, dtype=torch.int32),
    }
    made["links"] = empty(tiles.count, H, DELTA_LINKS.value, CHUNK, dtype=torch.int32)
    return made | {"beta": problem.layout.flat(problem.beta).float().contiguous()}


def run_with_beta(problem: Problem, tiles: Tiles, arguments: dict[str, Any]) -> None:
    """``arguments``: what ``decide_launches.run`` has put together."""
    (N, H, _, _), dtype = problem.shape, problem.v.dtype
    arguments = {**arguments, **tables(problem, tiles)}
    kinds = {old: {"OLD": old == "old", "scores": arguments[f"{old}_scores"], "y": arguments[f"{old}_y"]} for old in
             ("own", "old")}  # fmt: skip
    start(delta_unit_keys, tiles.count * H, arguments, dtype)
    start(delta_terms, tiles.count * H, arguments, dtype)
    start(delta_scores, tiles.count * H, arguments | kinds["own"], dtype)
    start(delta_window, tiles.count * H, arguments, dtype)
    start(delta_scores, tiles.count * H, arguments | kinds["old"], dtype)
    start(delta_carry, N * H, arguments, dtype)
    start(delta_settle, tiles.count * H, arguments, dtype)
    if problem.rules.capacity is not None and tiles.count:
        start(merges, N * H, arguments, dtype)
