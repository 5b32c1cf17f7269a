"""The state of a memory without a capacity after a call: every token seen, its key after all later transitions."""

import torch
from torch import Tensor

from dla.ops.chunked.chunks import Chunks
from dla.ops.chunked.transitions import spread, transitions
from dla.ops.problem import Problem
from dla.ops.segmentation import Segmentation
from dla.ops.state import DynamicState
from dla.ops.state.base import widen

CHUNK = 64


@torch.no_grad()
def tokens_after(problem: Problem, made: Segmentation) -> DynamicState:
    layout, (_, H, _, _), length = problem.layout, problem.shape, problem.length()
    state: DynamicState = problem.state or DynamicState.empty(
        problem.shape, None, problem.routed, problem.dtype, problem.device
    )
    longest = int(length.max()) if layout.sequences else 0
    # sequences taken out of a batch may be shorter than its width; every new token gets a place of its own
    past = {name: x[:, :, :longest] for name, x in state.tensors().items() if name in state.growing}
    store = {name: widen(x, longest).clone() for name, x in past.items()}
    sequence = layout.each_token(torch.arange(layout.sequences, device=problem.device))
    place = layout.running(torch.ones_like(sequence)) - 1 + state.length[sequence]  # [B * T]
    new = {
        "values": layout.flat(problem.v),
        "raw_keys": spread(layout.flat(problem.k), problem.group),
        "boundary": layout.flat(made.boundary),
        "info": layout.flat(made.score),
    }
    for name, x in new.items():
        if name in store:
            store[name][sequence, :, place] = x.to(store[name].dtype)
    _move(problem, store["keys"], sequence, place, H)
    after = DynamicState.from_tensors({**store, "length": length}, {"capacity": None})
    after.held.current()
    return after


def _move(problem: Problem, keys: Tensor, sequence: Tensor, place: Tensor, H: int) -> None:
    """Carry keys [N, H, L, dk] through all transitions, chunk by chunk, and put the new ones in, in place."""
    chunks = Chunks(problem.layout, CHUNK, problem.device)
    operands = [problem.flat(x) for x in (problem.k, problem.g, problem.beta)]
    for step in range(chunks.steps):
        rows = chunks.rows[: chunks.active(step)]
        k, g, beta = (None if x is None else chunks.take(x.to(keys.dtype), step, 1) for x in operands)
        assert k is not None
        move = transitions(None, k, g, beta, H)
        if move.T is not None:
            T = move.T[:, :, 0]
            keys[rows] = keys[rows] * T if T.shape[-1] == 1 else keys[rows] @ T.transpose(-1, -2)
        token, valid = chunks.places(step, 1)
        new = move.Z[:, :, 0].transpose(1, 2)  # [n, C, H, dk]
        token, new = (token.flatten(), new.flatten(0, 1)) if valid is None else (token[valid], new[valid])
        keys[sequence[token], :, place[token]] = new
