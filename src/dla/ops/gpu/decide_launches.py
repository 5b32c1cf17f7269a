"""How the kernels of decisions are launched, one after another."""

from typing import Any

import torch
import triton
from torch import Tensor

from dla.ops.gpu.configs import config
from dla.ops.gpu.decide_candidates import LINKS, NOTES, candidates_kernel
from dla.ops.gpu.decide_carry import carry_kernel
from dla.ops.gpu.decide_merges import merges_kernel
from dla.ops.gpu.decide_settle import settle_kernel
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
        "DOUBLINGS": CHUNK.bit_length() - 1,
        "CARRIED": problem.state is not None,
        "DECAYS": problem.g is not None,
        "BLOCK": rules.block is not None,
        "STATE": rules.score == "state",
        "MERGES": rules.capacity is not None,
        "PACKED": problem.layout.packed,
        "CAPACITY": rules.capacity,
        "LANES": 32 if (rules.capacity or 0) <= 32 else 64,
        "PRECISION": "ieee" if interpreting() else "tf32x3",
    }
    wide = "" if problem.v.dtype == torch.bfloat16 else "_wide"
    start(candidates_kernel, tiles.count * H, f"decide_candidates{wide}", arguments)
    start(carry_kernel, N * H, f"decide_carry{wide}", arguments)
    start(settle_kernel, tiles.count * H, f"decide_settle{wide}", arguments)
    if rules.capacity is not None:
        start(merges_kernel, N * H, "decide_merges", arguments)


def start(kernel: Any, programs: int, name: str, arguments: dict[str, Any]) -> None:
    """Launch a kernel with those of the arguments that it names."""
    how = config(name)
    if "tile" in how:
        arguments = {**arguments, **tiling(arguments["DK"], arguments["DV"], how)}
    named = {name: arguments[name] for name in kernel.arg_names}
    launch(kernel, (programs,), named, warps=how["warps"], stages=how["stages"])


def tiling(dk: int, dv: int, how: dict[str, Any]) -> dict[str, int]:
    """Sizes of tiles; PARTS of them side by side, of the shape ``held``, are all of a matrix that fits in registers."""
    wide, high = triton.next_power_of_2(dk), triton.next_power_of_2(dv)
    held_k, held_v = how.get("held", (0, 0))
    if wide <= held_k and wide * high <= how["numbers"]:
        return {"TILE_K": wide, "TILE_V": held_v, "PARTS": triton.cdiv(dv, held_v)}
    tile_k, tile_v = how["tile"]
    return {"TILE_K": min(tile_k, wide), "TILE_V": min(tile_v, high), "PARTS": 0}


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
