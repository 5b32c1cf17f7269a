"""Recipes: what a training run is made of, from TOML files and the command line. Here are the sections of a file."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dla.typed import BelowOne, Count, Limit, Natural, NotNegative, Positive, Seed, Share, Text

Betas = Annotated[tuple[float, float], Limit("two numbers from 0 to below 1", lambda x: all(0 <= y < 1 for y in x))]


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    path: a file or a folder of files (text, .jsonl, .parquet, .arrow, also .gz), a folder that `dla data build` made,
        "stdlib" (the Python standard library's sources), or "hf:NAME" (a dataset of the Hugging Face hub, streamed).
    weight: its share of the sequences, relative to the other sources'.
    field: the column or key that holds the text. subset, split: of a dataset of the hub.
    first: only so many documents, from the beginning; 0: all.
    """

    path: Text
    weight: Positive = 1.0
    field: Text = "text"
    subset: str = ""
    split: str = "train"
    first: Natural = 0


@dataclass(frozen=True)
class Data:
    """train, validation: sources; without any for validation, a share ``holdout`` of the training documents is for it.
    tokenizer: "bytes", a folder or file, or a name of the Hugging Face hub. length: tokens of a sequence.
    documents: "packed" (states are reset where a document begins) or "concatenated" (they are not).
    cache: where files are kept as tokens.
    """

    train: Annotated[tuple[Source, ...], Limit("one source at least", bool)] = (Source("stdlib"),)
    validation: tuple[Source, ...] = ()
    holdout: BelowOne = 0.02
    tokenizer: Text = "bytes"
    length: Annotated[int, Limit("an integer >= 2", lambda x: x >= 2)] = 2048
    documents: Literal["packed", "concatenated"] = "packed"
    cache: Text = "out/data"


@dataclass(frozen=True)
class BatchSizes:
    """sequences: of a step, over all ranks. micro: those that a rank computes at a time; 0: all that it has."""

    sequences: Count = 8
    micro: Natural = 0


@dataclass(frozen=True)
class Optimizer:
    """AdamW. clip: the largest norm of the gradient. skips: so many steps in a row may be skipped as not finite."""

    lr: Positive = 3e-4
    betas: Betas = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip: Positive = 1.0
    skips: Natural = 10


@dataclass(frozen=True)
class Schedule:
    """steps in all; a linear warm-up over so many of them, then a cosine down to ``final`` of the learning rate."""

    steps: Count = 1000
    warmup: Natural = 100
    final: Share = 0.1


@dataclass(frozen=True)
class Gate:
    """The gate of dynamic memories: "hard", or "soft" with a temperature that goes from start to end over a share
    ``until`` of the steps, and hard after.
    """

    kind: Literal["soft", "hard"] = "soft"
    start: Positive = 0.2
    end: Positive = 0.02
    until: Share = 0.5


@dataclass(frozen=True)
class Compute:
    """dtype: of the arithmetic; weights and optimizer are float32 with "bfloat16". recompute: activations again for the
    gradient instead of keeping them. device: "auto", "cpu" or "cuda". threads: of a CPU process; 0: as torch chooses.
    shard, replicate: ranks over which the weights are split (0: all that are left), and over which they are repeated.
    """

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    recompute: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Natural = 0
    shard: Natural = 0
    replicate: Count = 1


@dataclass(frozen=True)
class Checkpoint:
    """every: steps from one to the next (0: only at the end). keep: so many of the newest. on_error: what to do when
    one cannot be written. export: save the model for `from_pretrained` at the end.
    """

    every: Natural = 500
    keep: Count = 3
    on_error: Literal["continue", "stop"] = "continue"
    export: bool = True


@dataclass(frozen=True)
class Validation:
    """every: steps from one to the next (0: only at the end). sequences: of the validation data, the same each time."""

    every: Natural = 500
    sequences: Count = 64


@dataclass(frozen=True)
class Log:
    """every: steps from one line to the next. memory_every: steps from one look into dynamic memories to the next (0:
    none). tensorboard: write its files too.
    """

    every: Count = 10
    memory_every: Natural = 100
    tensorboard: bool = False


@dataclass(frozen=True)
class Recipe:
    """A training run. model: ``preset`` (or ``load``, the folder of a saved model to go on from) and any option of
    ``DLAConfig``. run: the folder of the run.
    """

    run: Text = "out/train"
    seed: Seed = 0
    model: dict[str, Any] = field(default_factory=dict)
    data: Data = Data()
    batch: BatchSizes = BatchSizes()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    gate: Gate = Gate()
    compute: Compute = Compute()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Validation = Validation()
    log: Log = Log()
