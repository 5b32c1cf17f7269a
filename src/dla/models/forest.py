"""One context, many continuations: reads token sequences with a model, every prefix that they share once.

Sequences are laid out as a forest (``plan``): a node is a run of tokens that some of them share. A batch of trees goes
through the model layer by layer and, in each layer, level by level: a node starts from its parent's state, which is
copied for every child and dropped when the layer is done. So of all the states of a batch those of one layer are held
at a time, and no padding is read. Trees too large for a batch are read from the top, and their stem's cache is kept.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from dla.layers.call import Call
from dla.layers.packing import Packing
from dla.models.cache import DLACache, LayerCache
from dla.models.causal_lm import DLAForCausalLM
from dla.models.config import DLAConfig
from dla.models.info import cache_bytes
from dla.typed import Count, NotNegative, convert

FORK, FORK_ROW = 8.0, 0.6  # tokens that could be read while a state is copied, and for each matrix of it (on a CPU)
CPU_STATES = 32 << 20  # bytes of one layer's states in a batch: with more, a CPU waits for its memory


@dataclass(eq=False)
class Node:
    """Tokens start … end of the sequences that share them."""

    tokens: Sequence[int]  # of one of these sequences, from its beginning
    start: int
    end: int
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)
    size: int = 0  # tokens of the whole tree from here on
    rows: int = 0  # its nodes

    def path(self) -> "Iterator[Node]":
        """From here to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass
class Level:
    """The nodes of a batch at one depth, as rows of a batch or packed one after another."""

    nodes: list[Node]
    parents: list[int]  # rows of the level above
    kept: list[int]  # rows whose caches are wanted
    packing: Packing
    offsets: list[int]  # of each node on the flat token axis

    def ids(self) -> Tensor:
        """[B, T] or packed [1, N] tokens"""
        ids = [token for node in self.nodes for token in node.tokens[node.start : node.end]]
        return torch.tensor(ids).view(self.packing.batch, self.packing.time)


@dataclass
class Pass:
    """What one batch gave."""

    levels: list[Level]
    hidden: list[Tensor]  # for each level [tokens, hidden], before the last norm
    nodes: list[Node]  # those whose caches were wanted
    cache: DLACache | None  # theirs, one row each

    def last(self) -> Tensor:
        """[nodes, hidden] of the last tokens of ``nodes``."""
        parts = []
        for level, hidden in zip(self.levels, self.hidden, strict=True):
            ends = [level.offsets[row] + level.nodes[row].end - level.nodes[row].start - 1 for row in level.kept]
            parts.append(hidden[torch.tensor(ends, dtype=torch.int64, device=hidden.device)])
        return torch.cat(parts)


def fork_tokens(config: DLAConfig) -> float:
    """About how many tokens could be read in the time that going on from a copied state takes."""
    rows = {"log_linear": config.level_width, "dynamic": config.capacity or config.slot_width}
    layers = [FORK + FORK_ROW * rows.get(memory or "", 0) for _, memory in config.kinds()]
    return sum(layers) / len(layers)


def plan(sequences: Iterable[Sequence[int]], fork: float = FORK, longest: int = 8192) -> list[Node]:
    """A forest of the sequences: the node where each of them ends, in their order.

    Args:
        sequences: of at least one token each; equal ones end in the same node.
        fork: what a branch costs, in tokens. A shared prefix makes a node if reading it once saves more than that.
        longest: longer nodes are cut.
    """
    wanted = [tuple(sequence) for sequence in sequences]
    if not all(wanted):
        raise ValueError("sequences must have at least one token each, got an empty one")
    order = sorted(set(wanted))
    common = [0, *(_common(a, b) for a, b in pairwise(order))]
    found: dict[tuple[int, ...], Node] = {}
    stack: list[tuple[int, int, Node | None]] = [(0, len(order), None)] if order else []
    while stack:
        first, last, node = stack.pop()
        start, alone = 0 if node is None else node.end, last - first == 1
        end = len(order[first]) if alone else min(common[first + 1 : last])
        cuts = [first, *(i for i in range(first + 1, last) if common[i] == end), last]
        branches = len(cuts) - 1
        if end > start and (alone or (end - start) * (branches - 1) >= fork * branches):
            node = _chain(order[first], start, end, node, longest)
        if alone:
            assert node is not None
            found[order[first]] = node
        else:
            stack += [(a, b, node) for a, b in pairwise(cuts)]
    return [found[sequence] for sequence in wanted]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _chain(tokens: Sequence[int], start: int, end: int, node: Node | None, longest: int) -> Node:
    """A node for tokens start … end, or several, one below the other; the last of them."""
    for at in range(start, end, longest):
        above, node = node, Node(tokens, at, min(at + longest, end), node)
        if above is not None:
            above.children.append(node)
    assert node is not None
    return node


def measure(ends: Iterable[Node]) -> list[Node]:
    """Fill in the sizes of the trees that hold these nodes; their roots."""
    nodes = list({id(node): node for end in ends for node in end.path()}.values())
    nodes.sort(key=lambda node: -node.start)
    for node in nodes:  # children stand before their parents
        node.size = node.end - node.start + sum(child.size for child in node.children)
        node.rows = 1 + sum(child.rows for child in node.children)
    return [node for node in nodes if node.parent is None]


class Reader:
    """Reads forests with a model, in batches of at most ``batch_tokens`` tokens and ``state_bytes`` of states."""

    def __init__(
        self,
        model: DLAForCausalLM,
        *,
        batch_tokens: int = 4096,
        state_bytes: int = 1 << 30,
        fork: float | None = None,
    ) -> None:
        convert("batch_tokens", batch_tokens, Count)
        convert("state_bytes", state_bytes, Count)
        convert("fork", fork, NotNegative | None)
        self.model = model
        self.batch_tokens, self.state_bytes = batch_tokens, state_bytes
        self.fork = fork_tokens(model.config) if fork is None else fork
        self.bar = tqdm(disable=True)  # told how many tokens are to be read, and how many have been
        self.passes = 0
        self.tokens_read = 0

    def lay_out(self, sequences: Iterable[Sequence[int]], more: int = 0) -> tuple[list[Node], list[Node]]:
        """The node where each sequence ends, and the roots; ``more`` tokens will follow."""
        ends = plan(sequences, self.fork, self.batch_tokens)
        roots = measure(ends)
        self.bar.reset(total=sum(root.size for root in roots) + more)
        return ends, roots

    def rows_that_fit(self, context: int, all_layers: bool = False) -> int:
        """How many sequences' states may be held, of one layer at a time or of all of them."""
        config, limit = self.model.config, self.state_bytes
        total = cache_bytes(config, context, self.model.dtype)["total"]
        if not all_layers:
            total //= config.num_hidden_layers
            limit = min(limit, CPU_STATES) if self.model.device.type == "cpu" else limit
        return max(1, limit // max(1, total))

    def read(self, roots: Sequence[Node], most_rows: int, wanted: Collection[Node] = ()) -> Iterator[Pass]:
        """All trees, a batch at a time, with the caches of the nodes that are ``wanted``."""
        stack: list[tuple[Sequence[Node], DLACache | None]] = [(roots, None)]
        while stack:
            nodes, past = stack.pop()
            whole = [node for node in nodes if self._fits(node, most_rows)]
            for batch in self._batches(whole, most_rows):
                yield self._pass(_levels(batch, wanted), past)
            for node in nodes:
                if self._fits(node, most_rows):
                    continue
                if len(nodes) > 1:  # one at a time: the cache of each is held while its children are read
                    stack.append(([node], past))
                    continue
                stem = self._pass(_levels([node], [node], depth=1), past)
                yield stem
                stack.append((node.children, stem.cache))

    def _fits(self, node: Node, most_rows: int) -> bool:
        return node.size <= self.batch_tokens and node.rows <= most_rows

    def _batches(self, trees: list[Node], most_rows: int) -> Iterator[list[Node]]:
        """Longest first; trees of a single node apart from the others, because they need no states."""
        batch: list[Node] = []
        size = rows = 0
        for tree in sorted(trees, key=lambda tree: (not tree.children, -tree.size)):
            if batch and (size + tree.size > self.batch_tokens or rows + tree.rows > most_rows):
                yield batch
                batch, size, rows = [], 0, 0
            batch.append(tree)
            size, rows = size + tree.size, rows + tree.rows
        if batch:
            yield batch

    @torch.inference_mode()
    def _pass(self, levels: list[Level], past: DLACache | None) -> Pass:
        """All layers over one batch of trees, which go on from ``past`` (one row) or begin."""
        model, device = self.model.model, self.model.device
        xs = [model.embed(level.ids().to(device)) for level in levels]
        nodes = [level.nodes[row] for level in levels for row in level.kept]
        cache = DLACache(0) if nodes else None
        for i, block in enumerate(model.layers):
            above = None if past is None else past.layers[i]
            kept: list[LayerCache] = []
            for depth, level in enumerate(levels):
                own = None if above is None else above.select(torch.tensor(level.parents))
                keep = bool(level.kept) or depth + 1 < len(levels)
                if own is None and keep:
                    own = LayerCache()
                xs[depth] = block(xs[depth], Call(level.packing, own, keep=keep))
                if level.kept and own is not None:
                    kept.append(own.select(torch.tensor(level.kept)))
                above = own
            if cache is not None:
                cache.layers.append(LayerCache.cat(kept))
        if cache is not None:
            cache.advance(max(node.end for node in nodes))
        tokens = sum(level.packing.batch * level.packing.time for level in levels)
        self.passes, self.tokens_read = self.passes + 1, self.tokens_read + tokens
        self.bar.update(tokens)
        return Pass(levels, [x.flatten(0, 1) for x in xs], nodes, cache)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] before the last norm -> [..., vocab] in float32 or wider"""
        logits = self.model.lm_head(self.model.model.norm(hidden))
        return logits if logits.dtype == torch.float64 else logits.float()


def _levels(trees: list[Node], wanted: Collection[Node], depth: int | None = None) -> list[Level]:
    """Trees by depth, all of it or the first so many levels."""
    levels: list[Level] = []
    rows = [(tree, 0) for tree in trees]
    while rows and len(levels) != depth:
        nodes = [node for node, _ in rows]
        lengths = tuple(node.end - node.start for node in nodes)
        if len(set(lengths)) == 1:
            packing = Packing(len(nodes), lengths[0])
        else:
            packing = Packing(1, sum(lengths), lengths, rows=False)
        kept = [row for row, node in enumerate(nodes) if node in wanted]
        offsets = [0, *accumulate(lengths[:-1])]
        levels.append(Level(nodes, [parent for _, parent in rows], kept, packing, offsets))
        rows = [(child, row) for row, node in enumerate(nodes) for child in node.children]
    return levels
