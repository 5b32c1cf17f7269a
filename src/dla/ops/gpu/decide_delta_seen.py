"""With the delta rule: what the soft gate needs of decisions (decide_seen.py), S^T k / |k|, S v / |v| and |S|.

A transition is a matrix, so that the current state S is no difference of prefixes. But all that a step does to S beside
its decay is to add k w^T, where w is what it writes less what its transition takes away. Over unit keys, with
b = beta |k|^2,

    seen_t = S^T k_t        w_t = beta_t |k_t| v_t - b_t e^g_t seen_t        S <- e^g_t S + k_t w_t^T

where S is that of the step before, and nothing (w_t has its first part alone) if t opens a state. So keys go first: one
program a sequence, head and some columns takes the current state from chunk to chunk. With c and eff of
decide_delta_table.py, tokens of a chunk whose first one sees S_c have

    seen_t = e^G_(t-1) S_c^T eff_t (as long as t's state began before the chunk)
             + sum over s from start to t - 1 of e^(G_(t-1) - G_s) c[t, s] beta_s |k_s| v_s

Values then find S as if there were no delta steps and w were the values, all chunks at once:

    S v_t = e^G_(t-1) S_c v_t (as long as ...) + sum over s from start to t - 1 of e^(G_(t-1) - G_s) (w_s . v_t) k_s
    |S|^2, afresh at every chunk, goes on by e^2g |S|^2 + w . (w + 2 e^g seen)

S_c of every chunk is 4 dk dv bytes a head, so sequences are cut into pieces of as many chunks as PIECE_BYTES hold.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from dla.ops.decide.decided import Seen
from dla.ops.decide.scores import safe_norm
from dla.ops.gpu.configs import config
from dla.ops.gpu.decide_delta_states import delta_seen_keys, delta_seen_values
from dla.ops.gpu.decide_delta_table import DELTA_LINKS, DELTA_NOTES, delta_unit_keys
from dla.ops.gpu.decide_launches import start
from dla.ops.gpu.decide_seen import norms_of, starts_seen
from dla.ops.gpu.delta_pieces import pieces
from dla.ops.gpu.language import arithmetic, tile
from dla.ops.gpu.launch import launch
from dla.ops.gpu.reading import side_by_side, used
from dla.ops.gpu.states import running_sums
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.problem import Problem

PIECE_BYTES = 512 << 20  # that the states at chunks' starts take at once


def keys_met(problem: Problem, arguments: dict[str, Any], tiles: Tiles) -> dict[str, Tensor]:
    """c [chunks, H, CHUNK, CHUNK] and eff [tokens, H, dk] of decide_delta_table.py."""
    (_, H, dk, dv), device = problem.shape, problem.device

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    tokens = len(arguments["v"])
    made = {"c": empty(tiles.count, H, CHUNK, CHUNK), "eff": empty(tokens, H, dk)}
    others = {"end_keys": empty(tokens, H, dk), "notes": empty(tiles.count, H, DELTA_NOTES.value, CHUNK)}
    others["links"] = empty(tiles.count, H, DELTA_LINKS.value, CHUNK, dtype=torch.int32)
    others |= {"beta": arguments["beta"], "first": tiles.first, "end": tiles.end}
    sizes = {"HEADS": H, "GROUP": problem.group, "DK": dk, "DV": dv, "C": CHUNK}
    given = {name: arguments[name] for name in ("k", "k_stride", "PRECISION")}
    start(delta_unit_keys, tiles.count * H, made | others | sizes | given, arguments["k"].dtype)
    return made


def operands(problem: Problem, boundary: Tensor, tiles: Tiles) -> dict[str, Any]:
    """What both kernels are given, but for sizes of tiles and what they make."""
    layout, (_, H, dk, dv) = problem.layout, problem.shape
    assert problem.beta is not None
    k, v = side_by_side(layout.flat(problem.k)), side_by_side(layout.flat(problem.v))
    g, beta = (None if x is None else layout.flat(x).float().contiguous() for x in (problem.g, problem.beta))
    assert k is not None and v is not None and beta is not None
    norm_k, norm_v = (safe_norm(x.float()).contiguous() for x in (k, v))
    opened = layout.flat(boundary)
    made: dict[str, Any] = {"k": k, "v": v, "k_stride": k.stride(0), "v_stride": v.stride(0), "beta": beta, "g": g}
    made |= {"G": None if g is None else running_sums(g, tiles), "norm_k": norm_k, "norm_v": norm_v}
    made |= {"size": beta * norm_k.repeat_interleave(problem.group, 1), "start": starts_seen(opened, layout)}
    made |= {"boundary": opened.to(torch.uint8).contiguous(), "tokens": len(v), "count": tiles.count, "width": dk}
    made |= {name: getattr(tiles, name) for name in ("first", "stop", "sequence", "offset")}
    made |= {"H": H, "GROUP": problem.group, "DK": dk, "DV": dv, "C": CHUNK}
    return made | {"PRECISION": arithmetic(torch.float32)["PRECISION"]}


def delta_seen_of(problem: Problem, boundary: Tensor) -> Seen:
    """Of boundaries [B, T, H], which may be given ones."""
    (N, H, dk, dv), device, tiles = problem.shape, problem.device, Tiles.of(problem.layout, problem.device)
    arguments = operands(problem, boundary, tiles)
    arguments |= keys_met(problem, arguments, tiles)
    tokens, dtype = arguments["tokens"], arguments["k"].dtype
    for_keys, for_values = (config(kernel.__name__, dtype) for kernel in (delta_seen_keys, delta_seen_values))
    columns = triton.cdiv(dv, tile(dv, for_keys["BV"]))
    each = tuple(-(-length // CHUNK) for length in problem.layout.lengths)
    cut = list(pieces(each, max(1, PIECE_BYTES // max(4 * N * H * dk * dv, 1)), device))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    state_k, state_v, w = empty(tokens, H, dv), empty(tokens, H, dk), empty(tokens, H, dv)
    grown, squares = (empty(n, H, dtype=torch.float64) for n in (columns * tokens, tiles.count))
    kept = empty(max((len(piece.chunk) for piece in cut), default=0), H, dk, dv)
    arguments |= {"S": torch.zeros(N, H, dk, dv, device=device), "kept": kept, "w": w}
    arguments |= {"grown": grown, "squares": squares}
    for piece in cut:
        arguments |= vars(piece)
        for kernel, how, made, grid in (
            (delta_seen_keys, for_keys, state_k, (N * H * columns,)),
            (delta_seen_values, for_values, state_v, (len(piece.chunk), H)),
        ):
            sizes = {"BK": tile(dk, how["BK"]), "BV": tile(dv, how["BV"]), "BS": how.get("BS"), "made": made}
            launch(kernel, grid, used(kernel, arguments | sizes), how)
    sums = {"sees": grown.view(columns, tokens, H).sum(0), "tiles": 1}
    return Seen(state_k, state_v, norms_of(arguments | sums | {"norm_k": None, "norm_v": None}, tiles))
