"""What one layer should cost on a GPU, stage by stage, from its sizes alone: the cost model of docs/gpu.md.

Here are the model and the stages without delta steps; gpu_costs_delta.py has those with them, gpu_costs_training.py
gradients, and gpu_tables.py writes the tables.

Nothing here is measured. A stage's work is counted (products of tiles, bytes, launches, steps that wait for others),
and its time is the largest of what arithmetic, memory and waiting take, at a share of what a data sheet promises.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dla.ops.gpu.configs import TABLE
from dla.ops.gpu.shapes import LayerShape
from dla.ops.gpu.tiles import CHUNK

TENSOR, ALU, HBM, L2 = 0.5, 0.5, 0.8, 0.6  # shares of the data sheet that a kernel is assumed to reach
LAUNCH = 3e-6  # seconds from one kernel of a stream to the next
WAIT = 1500  # cycles of a step over chunks beside its products: loads, reductions, barriers
MERGE = 237  # cycles of a step over boundaries: benchmarks/gpu_issue.py, from the machine code
ENTRY, LINE, MISS = 12, 128, 250  # bytes of a boundary in its list, and of a line that L2 sends in so many cycles
TAIL = 16  # tokens of a chunk's end: where its last state has no more, they alone are multiplied


@dataclass(frozen=True)
class Gpu:
    name: str
    half: float  # FLOP/s of tensor cores, bf16
    tf32: float
    single: float  # FLOP/s of float32 outside of tensor cores
    hbm: float  # bytes/s
    l2: float
    sms: int
    clock: float  # cycles/s


GPUS = (
    Gpu("A100", 312e12, 156e12, 19.5e12, 1.55e12, 5e12, 108, 1.41e9),
    Gpu("H100", 989e12, 495e12, 67e12, 3.35e12, 7e12, 132, 1.7e9),
)


@dataclass(frozen=True)
class Content:
    """What the tokens of a stream lead to, at T = 16384 and K = 30."""

    name: str
    rate: float  # of boundaries
    runs: float  # of whole chunks, read as differences of prefixes, per chunk of queries
    tiles: float  # of tokens, read as tokens, per chunk of queries
    matrices: float  # with delta steps: states that are matrices (benchmarks/gpu_rows.py)
    rows: float  # with delta steps: tiles of other states' tokens


DYNAMIC = (
    Content("every token a boundary", 1.0, 7, 6, matrices=2.6, rows=8.4),
    Content("correlated", 0.1, 8, 7, matrices=3.5, rows=12.0),
    Content("slow drift", 0.1, 28, 27, matrices=3.8, rows=20.9),
)
SOFT = DYNAMIC[1]  # of which the soft gate's cost is said
SMALL = 25  # passes of torch over a number of every token and head, to make the gate of products and norms


@dataclass(frozen=True)
class Work:
    """Of one stage of a layer."""

    stage: str
    half: float = 0.0  # FLOP of products of halves
    tf32: float = 0.0  # of products of float32, on tensor cores; three products each where exactness matters
    single: float = 0.0  # of everything else
    hbm: float = 0.0  # bytes
    l2: float = 0.0
    launches: int = 1
    programs: float = 1e9  # that there are; what fewer than SMs do is not done by all of them
    steps: float = 0.0  # that wait for each other
    cycles: float = 0.0  # of each, beside its products

    def seconds(self, gpu: Gpu) -> dict[str, float]:
        """What would take how long, were it alone."""
        share = min(1.0, self.programs / gpu.sms)
        tensor = (self.half / gpu.half + self.tf32 / gpu.tf32) / TENSOR
        products = (tensor + self.single / (gpu.single * ALU)) / share
        waiting = self.steps * self.cycles / gpu.clock
        memory = {"HBM": self.hbm / (gpu.hbm * HBM), "L2": self.l2 / (gpu.l2 * L2)}
        if self.steps:  # a step's products follow its loads
            return {"steps": waiting + products, **memory}
        return {"products": products, **memory}

    def expected(self, gpu: Gpu) -> tuple[float, str]:
        """Seconds, and what bounds them."""
        by = self.seconds(gpu)
        bound = max(by, key=lambda name: by[name])
        launching = self.launches * LAUNCH
        return (by[bound] + launching, bound if by[bound] > launching else "launches")


def product(rows: float, inner: float, columns: float) -> float:
    """FLOP of a product of matrices."""
    return 2 * rows * inner * columns


@dataclass(frozen=True)
class Layer:
    """Numbers that every stage needs."""

    shape: LayerShape

    @property
    def chunks(self) -> int:
        return self.shape.length // CHUNK

    @property
    def tiles(self) -> int:
        """Pairs of a chunk and a head."""
        return self.chunks * self.shape.heads

    @property
    def token_bytes(self) -> float:
        """k and v of a chunk."""
        return 2 * CHUNK * (self.shape.dk + self.shape.dv)

    @property
    def matrix(self) -> int:
        return self.shape.dk * self.shape.dv

    @property
    def input_bytes(self) -> float:
        s = self.shape
        return 2 * s.length * (2 * s.key_heads * s.dk + s.heads * s.dv)

    @property
    def levels(self) -> float:
        """Fenwick levels that live at a chunk's start, in the mean."""
        return self.chunks.bit_length() / 2

    @property
    def columns(self) -> int:
        """Programs a head that share out a matrix's columns, 64 each."""
        return -(-self.shape.dv // 64)


def candidates(layer: Layer) -> Work:
    """Two Gram products a chunk and head, and squares as a product."""
    return replace(settle(layer), stage="candidates", tf32=layer.tiles * 3 * product(CHUNK, CHUNK, CHUNK))


def settle(layer: Layer) -> Work:
    """The Gram products again, of which every token takes one column."""
    s = layer.shape
    return Work(
        "settle",
        half=layer.tiles * (product(CHUNK, s.dk, CHUNK) + product(CHUNK, s.dv, CHUNK)),
        single=layer.tiles * 40 * CHUNK * CHUNK,
        hbm=layer.input_bytes,
        l2=layer.tiles * (layer.token_bytes + 4 * 4 * CHUNK),
        programs=layer.tiles,
    )


def carry(layer: Layer, content: Content) -> Work:
    """The state that crosses chunks: K S to score the tokens before the first hit, then K^T V to take them in.

    Each in three parts of bfloat16. Of chunks whose last state is short, the second product is a part.
    """
    s, ends = layer.shape, 1 - (1 - content.rate) ** TAIL
    takes_in = (1 - ends) * CHUNK + ends * TAIL
    each = product(CHUNK, s.dk, s.dv) + product(s.dk, takes_in, s.dv)
    return Work("carry", half=layer.tiles * 3 * each, hbm=layer.input_bytes, l2=layer.tiles * layer.token_bytes,
                programs=s.heads, steps=layer.chunks, cycles=WAIT)  # fmt: skip


def merges(layer: Layer, content: Content) -> Work:
    """One warp a head, a step a boundary."""
    s = layer.shape
    return Work("merges", hbm=s.length * s.heads * ENTRY, steps=content.rate * s.length,
                cycles=MERGE + MISS * ENTRY / LINE, programs=s.heads)  # fmt: skip


def states(layer: Layer) -> Work:
    """H at every chunk's start: one product a chunk, one write."""
    s = layer.shape
    return Work("states", half=layer.tiles * product(s.dk, CHUNK, s.dv), launches=2,  # decays are summed first
                hbm=layer.tiles * 4 * layer.matrix + layer.input_bytes,
                programs=s.heads * layer.columns * max(1, s.dk // 64), steps=layer.chunks, cycles=WAIT / 2)  # fmt: skip


def plan(layer: Layer, content: Content) -> Work:
    """Who is read how, for every chunk: integers."""
    entries = 2 * (content.runs + content.tiles)
    return Work("plan", hbm=layer.shape.length * layer.shape.heads * 8, l2=layer.tiles * (entries + CHUNK) * 8,
                launches=3, single=layer.tiles * CHUNK * 64, programs=layer.tiles)  # fmt: skip


def outputs(layer: Layer, runs: float, tiles: float) -> Work:
    """Its own chunk and ``tiles`` others as tokens (Q K^T, P V), ``runs`` as two float32 matrices and one product."""
    s = layer.shape
    tokens = (1 + tiles) * (product(CHUNK, s.dk, CHUNK) + product(CHUNK, CHUNK, s.dv))
    both = 2 if runs > 1 else 1
    return Work(
        "outputs",
        half=layer.tiles * (tokens + runs * product(CHUNK, s.dk, s.dv)),
        single=layer.tiles * ((1 + tiles) * 10 * CHUNK * CHUNK + runs * both * layer.matrix),
        hbm=layer.tiles * 4 * layer.matrix + layer.input_bytes * 2,
        l2=layer.tiles * (runs * both * 4 * layer.matrix + (1 + tiles) * layer.token_bytes),
        programs=layer.tiles,
    )


def routing(layer: Layer, content: Content) -> Work:
    """Sums of keys as differences of prefixes, and the queries' cosines with those that live in a chunk."""
    s = layer.shape
    live = min(s.capacity + content.rate * CHUNK, s.capacity + CHUNK)
    return Work("routing", tf32=layer.tiles * 3 * product(CHUNK, s.dk, live), l2=layer.tiles * live * 2 * 4 * s.dk,
                hbm=s.length * s.heads * 4 * live / CHUNK, launches=4, programs=layer.tiles)  # fmt: skip


def seen(layer: Layer) -> Work:
    """What the soft gate's scores see, with all digits of float32: S^T k and S v, S being a difference of two rows."""
    s, side = layer.shape, TABLE["seen_states"]["BO"]
    gram = product(CHUNK, s.dk, CHUNK) * max(1, s.dv / side) + product(CHUNK, s.dv, CHUNK) * max(1, s.dk / side)
    inside = gram + product(CHUNK, CHUNK, s.dk + s.dv)
    past = 4 * product(CHUNK, s.dk, s.dv) + product(s.dk, CHUNK, s.dv)  # of both; the recurrence itself
    return Work("seen", tf32=layer.tiles * 3 * (inside + past), hbm=layer.tiles * 4 * layer.matrix, launches=5,
                l2=layer.tiles * (16 * layer.matrix + 4 * layer.token_bytes), programs=layer.tiles)  # fmt: skip


def gate(layer: Layer, back: bool = False) -> Work:
    """Of what was seen the gate, or back: one pass over it, keys and values, and torch's over numbers of tokens."""
    s, heads = layer.shape, layer.shape.length * layer.shape.heads
    each = 4 * (s.dk + s.dv) + 4 * s.dv if back else 4 * s.dk + 2 * s.dv
    return Work("gate", hbm=heads * (each + 4 * SMALL), launches=SMALL)


def twice(work: Work) -> Work:
    """For both streams of the soft gate."""
    more = {name: 2 * getattr(work, name) for name in ("half", "tf32", "single", "hbm", "l2", "launches", "steps")}
    return replace(work, **more)


def prefill(layer: Layer) -> Iterator[tuple[str, list[Work]]]:
    """The stages of each memory, without delta steps."""
    yield "single", [states(layer), outputs(layer, 1, 0)]
    yield "log_linear", [states(layer), outputs(layer, layer.levels, 0)]
    for content in DYNAMIC:
        deciding = [candidates(layer), carry(layer, content), settle(layer), merges(layer, content)]
        reading = [states(layer), plan(layer, content), outputs(layer, content.runs, content.tiles)]
        yield f"dynamic, {content.name}", [*deciding, *reading, routing(layer, content)]
        if content is SOFT:
            both = [twice(work) for work in reading]
            yield f"dynamic, {content.name}, soft gate", [*deciding, seen(layer), gate(layer), *both]


def decoding(shape: LayerShape) -> Iterator[tuple[str, Work]]:
    """Bytes of one token, by memory; the last row is how states might be held instead (9 matrices' worth of them)."""
    one, s = 4 * shape.heads * shape.dk * shape.dv, shape
    both = 2 if s.beta else 1  # delta steps write every state
    levels = (s.length - 1).bit_length() / 2  # live at a time
    programs = s.heads * (s.dv // 16)
    yield "single", Work("decode", hbm=2 * one, launches=2, programs=programs)
    yield "log_linear", Work("decode", hbm=2 * levels * one, launches=2, programs=programs)
    yield "dynamic", Work("decode", hbm=(both * s.capacity + 2) * one, launches=3, programs=programs)
    yield "dynamic, were short states tokens", Work("decode", hbm=(both * 9 + 2) * one, launches=3, programs=programs)
