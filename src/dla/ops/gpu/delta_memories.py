"""The second stage with delta steps: the three memories as lists of where states begin, over one walk."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dla.ops.chunked.gate import soft_gate
from dla.ops.chunked.tokens import tokens_after
from dla.ops.decide.decided import Decided
from dla.ops.gpu.delta_gate import soft_shares, soft_weights
from dla.ops.gpu.delta_gradients import DeltaAttention, Settings
from dla.ops.gpu.delta_levels import runs_and_slots
from dla.ops.gpu.delta_operation import RowTables
from dla.ops.gpu.delta_plan import Runs
from dla.ops.gpu.delta_states import Boundaries, StateViews
from dla.ops.gpu.delta_weights import Gathered, slots_of
from dla.ops.gpu.gate_alignment import aligned
from dla.ops.gpu.key_sums import KeySums, key_sums_of
from dla.ops.gpu.reading import FlatOperands, Lives
from dla.ops.gpu.routed import RoutedWeights
from dla.ops.gpu.routing import routed_weights
from dla.ops.gpu.starts import Starts, starts_of
from dla.ops.gpu.tiles import CHUNK, Tiles
from dla.ops.problem import Problem
from dla.ops.state import DynamicState, LinearState, LogLinearState, State
from dla.ops.state.base import take_rows

LEAST = 320  # tokens of a state that is a matrix: benchmarks/gpu_rows.py


def attend(problem: Problem, decided: Decided | None) -> tuple[Tensor, State | None]:
    """The outputs [B, T, H, dv] and, if wanted, the state after the last step."""
    if decided is not None:
        return dynamic(problem, decided)
    return linear(problem) if problem.memory == "single" else log_linear(problem)


def run(
    problem: Problem, x: FlatOperands, tiles: Tiles, runs: Runs, S: Tensor | None, weight: Tensor | None = None,
    rows: RowTables | None = None, shares: Tensor | None = None, p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs [B, T, H, dv] and the states after the last token.

    S [N, H, K, dk, dv] are those before the first; None: there is none.
    """
    assert problem.beta is not None
    beta = problem.layout.flat(problem.beta).float().contiguous()
    lead = CHUNK - 1 if problem.memory == "log_linear" and problem.state is not None else 0  # as Tiles.of has it
    each = tuple(-(-(n + lead) // CHUNK) for n in problem.layout.lengths)
    settings = Settings(problem.scale, tiles, runs, rows, each)
    o, after = DeltaAttention.apply(x.q, x.k, x.v, x.g, beta, weight, shares, p, settings, S)
    return problem.layout.unflat(o), after


def linear(problem: Problem) -> tuple[Tensor, State | None]:
    x, tiles, state = FlatOperands.of(problem), Tiles.of(problem.layout, problem.device), problem.state
    S = None if state is None else state.matrix[:, :, None].float().contiguous()
    o, after = run(problem, x, tiles, Runs.single(tiles, state is not None), S)
    if not problem.wants_state:
        return o, None
    return o, LinearState(matrix=after[:, :, 0].contiguous(), length=problem.length())


def log_linear(problem: Problem) -> tuple[Tensor, State | None]:
    x, state, device = FlatOperands.of(problem), problem.state, problem.device
    assert x.lam is not None
    if state is None:
        start, carried = torch.zeros(problem.shape[0], dtype=torch.int64, device=device), 0
        tiles = Tiles.of(problem.layout, device)
    else:
        start, carried = state.length, state.levels.shape[2]
        tiles = Tiles.of(problem.layout, device, lead=start % CHUNK)
    longest = max(problem.layout.lengths, default=0)
    levels = max(((1 << carried) - 1 + longest).bit_length(), 1)  # of the longest sequence at most
    S = None if state is None else F.pad(state.dense().float(), (0, 0, 0, 0, 0, levels - carried))
    runs, slots = runs_and_slots(start, carried, levels, x.lam.shape[2], tiles)
    o, after = run(problem, x, tiles, runs, S, Gathered.apply(x.lam, slots, tiles))
    if not problem.wants_state:
        return o, None
    end = problem.length()
    width = max((n.bit_length() for n in end.tolist()), default=0)
    bit = torch.arange(width, device=device)
    there = (end[:, None] >> bit) & 1
    older = there.sum(1, keepdim=True) - there.cumsum(1)  # than the block of each bit
    place = older.clamp(0, levels - 1)[:, None].expand(*after.shape[:2], width)
    found = torch.where((there == 1)[:, None, :, None, None], take_rows(after, place), 0)
    return o, LogLinearState(levels=found, length=end)


def dynamic(problem: Problem, decided: Decided) -> tuple[Tensor, State | None]:
    x, tiles, lives = FlatOperands.of(problem), Tiles.of(problem.layout, problem.device), Lives.of(problem, decided)
    assert x.lam is not None
    made, capacity, recency = decided.segmentation, problem.rules.capacity, problem.slot_order == "recency"
    starts = starts_of(lives.death, lives.initial_death, tiles, lives.states, ends=True)
    lam, sums = x.lam, None
    if problem.route is not None:  # weights of each state, oldest first
        sums = key_sums_of(x.k, lives.keys, tiles)
        lam, recency = routed(problem, x, sums, starts, tiles), False
    slots = slots_of(starts, tiles, lam.shape[2], recency)
    if problem.soft:
        p = soft_gate(problem, decided, aligned).float()
        boundaries = Boundaries.of(lives.death >= 0, problem.layout)
        states = StateViews.soft(starts, boundaries, tiles)
        runs, rows = states.split(LEAST, False, tiles, boundaries.following)
        weight = soft_weights(p, lam, slots, lives.death, starts.count, tiles)
        shares = soft_shares(p, boundaries.following, runs, tiles)
        return run(problem, x, tiles, runs, None, weight, rows, shares, p)[0], None
    ends = problem.wants_state and capacity is not None
    runs, rows = StateViews.hard(starts, tiles).split(LEAST, ends, tiles)
    weight = Gathered.apply(lam, slots, tiles)
    o, after = run(problem, x, tiles, runs, first_states(lives, runs.states), weight, rows)
    if not problem.wants_state:
        return o, None
    if capacity is None:
        return o, tokens_after(problem, made)
    position, count = starts.position[tiles.count :], starts.count[tiles.count :]
    alive = torch.arange(lives.states, device=count.device) < count[..., None]
    after = F.pad(after, (0, 0, 0, 0, 0, lives.states - after.shape[2]))
    matrices = torch.where(alive[..., None, None], after, 0)
    keys = None if sums is None else sums.between(position, count, tiles)
    counts, info = made.tally(None if problem.state is None else problem.state.info, capacity)
    return o, DynamicState.of_matrices(matrices, counts, info, keys, problem.length(), capacity)


def routed(problem: Problem, x: FlatOperands, sums: KeySums, starts: Starts, tiles: Tiles) -> Tensor:
    """[tokens, H, K] the weights of states, oldest first."""
    assert x.lam is not None and x.route is not None
    recency = problem.slot_order == "recency"
    with torch.no_grad():
        weights = routed_weights(x.q, x.lam, x.route, sums, starts, tiles, recency)
    if not problem.needs_gradient:
        return weights
    made: Tensor = RoutedWeights.apply(weights, problem, starts, tiles, x.q, x.k, x.v, x.lam, x.route)
    return made


def first_states(lives: Lives, states: int) -> Tensor | None:
    """[N, H, states, dk, dv] as they are after the first token's merge, oldest first; zero behind the last."""
    if lives.matrices is None or lives.initial_death is None:
        return None
    matrices = lives.matrices.float()
    S = matrices.new_zeros(*matrices.shape[:2], states, *matrices.shape[3:])
    place = ((lives.initial_death > 0).cumsum(2) - 1).clamp(0, states - 1)
    there = (lives.initial_death >= 0)[..., None, None]
    matrices = torch.where(there, matrices, 0)
    index = place[..., None, None].expand(matrices.shape)
    return S.scatter_add_(2, index, matrices)  # at most two to a place, so that their order does not matter
