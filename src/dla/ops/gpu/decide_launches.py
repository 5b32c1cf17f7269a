"""How the kernels of decisions are launched, one after another."""

from typing import Any

import torch
import triton
from torch import Tensor

from dla.ops.gpu.configs import Config, config
from dla.ops.gpu.decide_candidates import LINKS, NOTES, candidates
from dla.ops.gpu.decide_carry import carry
from dla.ops.gpu.decide_merges import merges
from dla.ops.gpu.decide_settle import settle
from dla.ops.gpu.language import LEAST_TILE
from dla.ops.gpu.launch import launch
from dla.ops.gpu.runtime import interpreting
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.problem import Problem


def run(problem: Problem, given: dict[str, Tensor]) -> None:
    """Fill score, boundary, death and initial_death; ``given`` has these and what is carried in."""
    tiles = Tiles.of(problem.layout, problem.device)
    (N, H, dk, dv), rules = problem.shape, problem.rules
    arguments = {**operands(problem), **vars(tiles), **scratch(problem, tiles), **given}
    arguments |= {
        "tau": rules.tau,
        "block": rules.block or 0,
        "HEADS": H,
        "GROUP": problem.group,
        "DK": dk,
        "DV": dv,
        "C": CHUNK,
        "TAIL": LEAST_TILE,
        "DOUBLINGS": CHUNK.bit_length() - 1,
        "CARRIED": problem.state is not None,
        "DECAYS": problem.g is not None,
        "BLOCK": rules.block is not None,
        "STATE": rules.score == "state",
        "MERGES": rules.capacity is not None,
        "PACKED": problem.layout.packed,
        "CAPACITY": rules.capacity,
        "LANES": max(triton.next_power_of_2((rules.capacity or 0) + 1), 32),
        "PRECISION": "ieee" if interpreting() else "tf32x3",
    }
    dtype = problem.v.dtype
    if problem.beta is not None:
        from dla.ops.gpu.decide_delta import run_with_beta

        run_with_beta(problem, tiles, arguments)
        return
    start(candidates, tiles.count * H, arguments, dtype)
    start(carry, N * H, arguments, dtype)
    start(settle, tiles.count * H, arguments, dtype)
    if rules.capacity is not None and tiles.count:
        start(merges, N * H, arguments, dtype)


def start(kernel: Any, programs: int, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """Launch a kernel with those of the arguments that it names."""
    how = config(kernel.__name__, dtype)
    if "BK" in how:
        arguments = {**arguments, **tiling(arguments["DK"], arguments["DV"], how)}
    launch(kernel, (programs,), {name: arguments[name] for name in kernel.arg_names}, how)


def tiling(dk: int, dv: int, how: Config) -> dict[str, int]:
    """Sizes of tiles; PARTS of them side by side, of the shape ``held``, are all of a matrix that fits in registers."""
    wide, high = triton.next_power_of_2(dk), triton.next_power_of_2(dv)
    if held := how.get("held"):
        held_k, held_v = held
        if wide <= held_k and wide * high <= how["numbers"]:
            return {"TILE_K": wide, "TILE_V": held_v, "PARTS": triton.cdiv(dv, held_v)}
    return {"TILE_K": min(how["BK"], wide), "TILE_V": min(how["BV"], high), "PARTS": 0}


def operands(problem: Problem) -> dict[str, Any]:
    """k [tokens, Hk, dk] and v [tokens, H, dv] with their strides, and g [tokens, H] in float32."""
    made: dict[str, Any] = {"g": None if problem.g is None else problem.layout.flat(problem.g).float().contiguous()}
    for name, x in (("k", problem.layout.flat(problem.k)), ("v", problem.layout.flat(problem.v))):
        x = x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
        made |= {name: x, f"{name}_stride": x.stride(0)}
    return made


def scratch(problem: Problem, tiles: Tiles) -> dict[str, Tensor | None]:
    """What one kernel leaves to the next, and in the place of states carried in, if there are none."""
    (N, H, dk, dv), device = problem.shape, problem.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(tiles.count, H, *shape, dtype=dtype, device=device)

    carried = ("position0", "size0", "scale0", "square0", "spoiled0", "count0", "info0", "initial_death")
    made = {
        "links": empty(LINKS.value, CHUNK),
        "notes": empty(NOTES.value, CHUNK, dtype=torch.float32),
        "hits": empty(),
        "opened": empty(CHUNK),
        "sums": empty(CHUNK, dtype=torch.int64),
        "many": empty(),
        "totals": empty(dtype=torch.int64),
        "matrix": torch.empty(N, H, dk, dv, dtype=torch.float32, device=device),
    }
    return {**dict.fromkeys(carried), **made}
