"""Training checkpoints, tokens on disk, texts, recipes and training logs."""

import contextlib
import gzip
import hashlib
import io
import json
import pickle
from pathlib import Path
from random import Random
from typing import Any

import torch

from dla.text import ByteTokenizer
from dla.training.data.build import summary
from dla.training.data.documents import documents
from dla.training.data.shard_writer import build
from dla.training.data.shards import Shards
from dla.training.distributed import leave
from dla.training.export import export
from dla.training.plots import draw as draw_curves
from dla.training.plots import read_run
from dla.training.recipe import Source
from dla.training.recipe.read import model_config, read_recipe
from dla.training.run import Run, run
from tests.fuzz.formats import Format
from tests.fuzz.mutate import BINARY, JSON, JSON_LINES, TOML
from tests.fuzz.pickles import CALLS, PICKLE, TORCH

STEPS = 2
RECIPE = """\
extends = "base.toml"
run = "run"
seed = 3

[model]
backbone = "linear"
memory = "dynamic"
capacity = 3
vocab_size = 256
hidden_size = 8
num_hidden_layers = 1
num_heads = 2
head_k_dim = 4
head_v_dim = 4
tie_word_embeddings = true
layers = ["linear:dynamic"]

[data]
cache = "cache"
length = 16
holdout = 0.2

[[data.train]]
path = "text"
weight = 1.0
"""
BASE = f"""\
[batch]
sequences = 2

[optimizer]
lr = 1e-2
betas = [0.9, 0.95]

[schedule]
steps = {STEPS}
warmup = 1

[compute]
device = "cpu"
threads = 1

[checkpoint]
every = {STEPS}
export = false

[evaluation]
sequences = 2

[log]
memory_every = 0
"""
DOCUMENTS = [f"document {i} of some words, " * (i + 1) for i in range(6)]


def _write_recipe(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "base.toml").write_text(BASE)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


# --- checkpoints


def _make_runs(folder: Path) -> None:
    """A run that has ended: its checkpoint can be exported, and gone on from."""
    recipe = _write_recipe(folder / "run")
    (folder / "run" / "text").mkdir()
    for i, text in enumerate(DOCUMENTS):
        (folder / "run" / "text" / f"{i}.txt").write_text(text)
    with contextlib.chdir(folder / "run"):
        assert run(recipe) is None


def _export(folder: Path) -> Path:
    export(folder / "run", folder / "exported", STEPS)
    return folder


def _resume(folder: Path) -> None:
    """As `dla train` does with a run that was interrupted: everything up to the next step."""
    made = Run(read_recipe(folder / "recipe.toml"))
    made.monitor.close()
    leave(made.world)


def _mend_record(folder: Path, file: Path, draw: Random) -> None:
    """The record says that the files are as they were written; one time in ten it does not."""
    record = file.parent / "record.json"
    if file == record or not record.is_file() or draw.random() < 0.1:
        return
    content = json.loads(record.read_bytes())
    data = file.read_bytes()
    if file.name in content["files"]:
        content["files"][file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    record.write_text(json.dumps(content))


class _Call:
    """Pickled as a call of something."""

    def __init__(self, module: str, name: str, argument: str) -> None:
        self.found, self.argument = getattr(__import__(module, fromlist=[name]), name), argument

    def __reduce__(self) -> Any:
        return self.found, (self.argument,)


def _planted(case: Path, draw: Random) -> None:
    """A tensor's bytes are a file of torch's that calls something, with everything around it in order."""
    checkpoint = next((case / "run" / "checkpoints").iterdir())
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())  # our own, which nothing has touched
    data = (checkpoint / "__0_0.distcp").read_bytes()
    key = draw.choice(sorted(metadata.storage_data, key=str))
    buffer = io.BytesIO()
    torch.save({"x": _Call(*draw.choice([call for call in CALLS if "." not in call[1]][:4]))}, buffer)
    place = metadata.storage_data[key]
    place.offset, place.length = len(data), len(buffer.getvalue())
    for name, content in ((".metadata", pickle.dumps(metadata)), ("__0_0.distcp", data + buffer.getvalue())):
        (checkpoint / name).write_bytes(content)
        _mend_record(case, checkpoint / name, Random(1))


# --- tokens on disk


def _make_shards(folder: Path) -> None:
    for name, limit in {"one": 2**20, "several": 200}.items():
        shards = folder / name / "tokens"
        shards.mkdir(parents=True)
        build(DOCUMENTS, shards, ByteTokenizer(), tokenizer_name="bytes", shard_tokens=limit)


def _open_shards(folder: Path) -> Shards:
    """As a run opens them: nothing is compared with its checksum unless it is read."""
    return Shards(folder / "tokens")


def _read_shards(shards: Shards) -> None:
    """What a run reads of them, and `dla data check`."""
    shards.read(0, shards.tokens)
    shards.document_starts(0, shards.tokens)
    half = shards.part(0, shards.tokens // 2)
    half.documents, half.read(0, half.tokens), shards.vocab_size, shards.tokenizer_name, shards.tokenizer_fingerprint
    shards.verify()
    json.dumps(summary(shards))


def _mend_index(folder: Path, file: Path, draw: Random) -> None:
    """Three times in four the index has the sum of what is there now, and every other time its size too."""
    index = file.parent / "index.json"
    if file == index or not index.is_file() or draw.random() < 0.25:
        return
    kind, _, number = file.stem.partition("-")
    content, data = json.loads(index.read_bytes()), file.read_bytes()
    if kind not in ("tokens", "ends"):
        return
    shard = content["shards"][int(number)]
    shard["sha256"][kind] = hashlib.sha256(data).hexdigest()
    if draw.random() < 0.5:
        shard["documents" if kind == "ends" else "tokens"] = len(data) // (8 if kind == "ends" else 2)
    index.write_text(json.dumps(content))


# --- texts


def _make_documents(folder: Path) -> None:
    """The same documents in every kind of file."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(DOCUMENTS)).encode()
    table = pa.table({"text": DOCUMENTS, "id": list(range(len(DOCUMENTS)))})
    for name in ("rows.jsonl", "rows.jsonl.gz", "words.txt", "table.parquet", "file.arrow", "stream.arrow"):
        path = folder / name.replace(".", "-") / name
        path.parent.mkdir(parents=True)
        if path.suffix == ".parquet":
            pa.parquet.write_table(table, path)
        elif path.suffix == ".arrow":
            kind = pa.ipc.new_file if path.stem == "file" else pa.ipc.new_stream
            with kind(str(path), table.schema) as writer:
                writer.write_table(table)
        else:
            text = "\n".join(DOCUMENTS).encode() if path.suffix == ".txt" else rows
            path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _read_documents(folder: Path) -> None:
    """As `dla data build` does."""
    for text in documents(Source(str(folder))):
        text.encode("utf-8", "surrogateescape")


# --- recipes and logs


def _make_recipes(folder: Path) -> None:
    _write_recipe(folder / "recipe")
    preset = folder / "preset"
    preset.mkdir()
    (preset / "recipe.toml").write_text('run = "x"\n[model]\npreset = "mamba2-tiny"\n[data]\ntrain = ["a", "b"]\n')


def _read_recipe(folder: Path) -> None:
    """As `dla train` does before anything else."""
    model_config(read_recipe(folder / "recipe.toml"))


def _make_logs(folder: Path) -> None:
    step = {"loss": 2.5, "lr": 0.01, "grad_norm": 1.0, "temperature": None, "tokens": 32, "skipped": False}
    timing = {"seconds": 0.5, "waited": 0.1, "tokens_per_second": 64.0, "memory_bytes": 1000, "mfu": 0.1}
    places = {"0-7": 2.6, "8-15": 2.4}
    evaluation = {"kind": "evaluation", "step": 2, "validation_loss": 2.5, "perplexity": 12.0, "by_position": places}
    layer = {"layer": 0, "boundary_rate": 0.2, "live_states": 2.0, "W": 1.5}
    records = [{"kind": "step", "step": i, **step, **timing} for i in (1, 2)]
    records += [evaluation, {"kind": "memory", "step": 2, "memory": [layer, {**layer, "layer": 1}]}]
    records += [{"kind": "step", "step": 3, **step, **timing}]
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def _draw(folder: Path) -> None:
    """As `dla train plot` does."""
    draw_curves([read_run(folder, "run")])


FORMATS = (
    Format(
        "checkpoint",
        _make_runs,
        _export,
        {".metadata": PICKLE, "*.distcp": TORCH, "record.json": JSON, "log.jsonl": JSON_LINES},
        _resume,
        _mend_record,
        {"planted": _planted},
    ),
    Format("shards", _make_shards, _open_shards, {"*.bin": BINARY, "index.json": JSON}, _read_shards, _mend_index),
    Format(
        "documents",
        _make_documents,
        _read_documents,
        {"*.jsonl": JSON_LINES, "*.gz": {}, "*.txt": {}, "*.parquet": BINARY, "*.arrow": BINARY},
    ),
    Format("recipe", _make_recipes, _read_recipe, {"*.toml": TOML}),
    Format("log", _make_logs, _draw, {"log.jsonl": JSON_LINES}),
)
