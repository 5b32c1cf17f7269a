"""The cost model's stages with delta steps, forward and backward: matrices that go through chunks, and rows."""

from collections.abc import Iterator

from benchmarks.gpu_costs import CHUNK, DYNAMIC, SOFT, WAIT, Content, Layer, Work, gate, merges, product, routing
from dla.ops.gpu.configs import TABLE

SQUARE = product(CHUNK, CHUNK, CHUNK)


def prefill(layer: Layer) -> Iterator[tuple[str, list[Work]]]:
    """The stages of each memory; what their stream is like changes decisions and routed reads alone."""
    yield "single", [chunk_matrices(layer), walk(layer, 1)]
    yield "log_linear", [chunk_matrices(layer), walk(layer, layer.levels)]
    for content in DYNAMIC:
        deciding = [candidates(layer), settle(layer), merges(layer, content)]
        reading = [chunk_matrices(layer), rows(layer, content.rows), walk(layer, content.matrices)]
        yield f"dynamic, {content.name}", [*deciding, *reading, routing(layer, content)]
        if content is SOFT:
            yield f"dynamic, {content.name}, soft gate", [*deciding, seen(layer), gate(layer), *reading]


def candidates(layer: Layer) -> Work:
    """What starts in a chunk, or in the one before, leads to: Gram products, an inverse, suffix sums of products.

    A state that is older still takes a step over a matrix in memory, which is rare and not counted.
    """
    s = layer.shape
    keys = 3 * product(CHUNK, s.dk, CHUNK) + SQUARE
    terms = product(CHUNK, CHUNK, s.dv) + SQUARE
    window = product(CHUNK, s.dk, CHUNK) + product(CHUNK, CHUNK, s.dv) + 2 * SQUARE
    return Work("candidates", tf32=layer.tiles * 3 * (keys + terms + 2 * SQUARE + window), launches=5,
                single=layer.tiles * 60 * CHUNK * CHUNK, hbm=layer.input_bytes, programs=layer.tiles,
                l2=layer.tiles * (3 * layer.token_bytes + 60 * CHUNK * CHUNK))  # fmt: skip


def settle(layer: Layer) -> Work:
    """The orbit of the carried state's end, chunk by chunk, and each chunk's boundaries."""
    return Work("settle", hbm=layer.tiles * 12 * CHUNK, launches=2, programs=layer.shape.heads, steps=layer.chunks,
                cycles=WAIT / 3)  # fmt: skip


def seen(layer: Layer) -> Work:
    """What the soft gate's scores see: the current state from chunk to chunk, then values with all chunks' states."""
    s = layer.shape
    tiles = s.dv / TABLE["delta_seen_keys"]["BV"]
    keys = 4 * product(CHUNK, s.dk, CHUNK) + 2 * SQUARE + 2 * product(CHUNK, s.dk, s.dv) + product(CHUNK, CHUNK, s.dv)
    values = product(CHUNK, s.dv, CHUNK) + product(CHUNK, s.dv, s.dk) + product(CHUNK, CHUNK, s.dk)
    return Work("seen", tf32=layer.tiles * 3 * (keys + values), hbm=layer.tiles * 8 * layer.matrix, launches=4,
                l2=layer.tiles * (12 * layer.matrix + tiles * 6 * CHUNK * s.dk), programs=s.heads * tiles,
                steps=layer.chunks, cycles=WAIT)  # fmt: skip


def chunk_matrices(layer: Layer) -> Work:
    """Of a chunk's keys and steps: the inverse by elimination, effective queries and keys."""
    s = layer.shape
    return Work("chunks", half=layer.tiles * (4 * product(CHUNK, s.dk, CHUNK) + SQUARE), launches=2,
                single=layer.tiles * 6 * CHUNK**3, hbm=layer.input_bytes + layer.tiles * 2 * 2 * CHUNK * s.dk,
                l2=layer.tiles * 8 * CHUNK * CHUNK, programs=layer.tiles)  # fmt: skip


def walk(layer: Layer, n: float, outputs: bool = True, stage: str = "walk") -> Work:
    """n matrices through every chunk: each is read by the queries and the keys, and takes in what is new."""
    s = layer.shape
    each = (3 if outputs else 2) * n * product(CHUNK, s.dk, s.dv) + product(CHUNK, CHUNK, s.dv)
    tiles = s.dv / TABLE["delta_walk"]["BV"]
    return Work(stage, half=layer.tiles * each, hbm=2 * layer.input_bytes,
                l2=layer.tiles * (16 * n * layer.matrix + tiles * n * CHUNK * s.dk * 8),
                programs=s.heads * tiles, steps=layer.chunks, cycles=WAIT * max(1, n / 4))  # fmt: skip


def rows(layer: Layer, tiles: float, products: bool = True, stage: str = "rows") -> Work:
    """Keys of so many tiles through every chunk, two products each; what queries read of them, two more."""
    s = layer.shape
    key = product(CHUNK, s.dk, CHUNK)
    each = 2 * key + (key + product(CHUNK, CHUNK, s.dv)) * products
    kept = 2 * CHUNK * s.dk + (2 * CHUNK * s.dk + 4 * CHUNK * CHUNK) * products  # bytes written and read
    return Work(stage, half=layer.tiles * tiles * each, hbm=layer.tiles * tiles * kept, launches=3,
                l2=layer.tiles * tiles * (4 * 2 * CHUNK * s.dk + 2 * CHUNK * s.dv),
                programs=s.heads * tiles * CHUNK / TABLE["delta_rows"]["BR"], steps=layer.chunks,
                cycles=WAIT)  # fmt: skip


def rows_back(layer: Layer, tiles: float) -> Work:
    """dS, three products of keys for their gradients, three for those of a chunk's queries and keys, one for values."""
    s = layer.shape
    key, value = product(CHUNK, s.dk, CHUNK), product(CHUNK, CHUNK, s.dv)
    kept = 2 * (6 * CHUNK * s.dk + 8 * CHUNK * CHUNK)  # bytes written and read
    return Work("rows back", half=layer.tiles * tiles * (7 * key + 2 * value), hbm=layer.tiles * tiles * kept,
                launches=5, l2=layer.tiles * tiles * (8 * 2 * CHUNK * s.dk + 6 * CHUNK * s.dv),
                programs=s.heads * tiles * CHUNK / TABLE["delta_rows_back"]["BR"], steps=layer.chunks,
                cycles=WAIT)  # fmt: skip


def gradients(layer: Layer, n: float, tiles: float) -> list[Work]:
    """The walk twice more, for states at the starts of pieces and of chunks; back; then chunk by chunk."""
    s = layer.shape
    kept = 2 * n * (layer.matrix + CHUNK * s.dv)  # bytes a chunk and head, halves
    again = [walk(layer, n, outputs=False, stage="walks again"), walk(layer, n, outputs=False, stage="walks again")]
    back = Work("back", half=layer.tiles * 3 * n * product(CHUNK, s.dk, s.dv), hbm=layer.tiles * kept,
                l2=layer.tiles * 12 * n * layer.matrix, programs=s.heads * s.dv / TABLE["delta_back"]["BV"],
                steps=layer.chunks, cycles=WAIT * max(1, n / 4))  # fmt: skip
    reads = Work("reads", half=layer.tiles * 3 * n * product(CHUNK, s.dk, s.dv), hbm=layer.tiles * 2 * kept,
                 programs=layer.tiles)  # fmt: skip
    own = 2 * product(CHUNK, CHUNK, s.dv) + 8 * product(CHUNK, s.dk, CHUNK) + 4 * SQUARE
    inside = Work("chunks", half=layer.tiles * own, hbm=3 * layer.input_bytes, launches=5, programs=layer.tiles)
    of_rows = [rows(layer, tiles, products=False, stage="rows again"), rows(layer, tiles, stage="rows again"),
               rows_back(layer, tiles)] if tiles else []  # fmt: skip
    return [*again, back, reads, inside, *of_rows]


def states_of(memory: str, layer: Layer) -> tuple[float, float]:
    """Matrices, and tiles of rows."""
    content: Content | None = next((x for x in DYNAMIC if x.name in memory), None)
    if content is not None:
        return content.matrices, content.rows
    return (1 if memory == "single" else layer.levels), 0
