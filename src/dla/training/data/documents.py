"""Where documents come from: files, folders, the standard library, datasets of the Hugging Face hub."""

import difflib
import gzip
import json
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from dla.fingerprint import json_fingerprint
from dla.text import first_line
from dla.training.recipe import Source

HUB = "hf:"
STDLIB = "stdlib"
STDLIB_WITHOUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
DATASET_NOTES = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})  # datasets' save_to_disk
PROBE = 4096  # bytes of a text file that are searched for NUL


def documents(source: Source) -> Iterator[str]:
    """The documents of a source, in a fixed order; those without text are left out.

    Bytes of text files that are no UTF-8 come as surrogate escapes, so that nothing is lost here: bytes as tokens need
    them as they were, and what other tokenizers cannot take is replaced where they are called.
    """
    texts = filter(None, _hub_documents(source) if is_hub(source) else _file_documents(source))
    first = next(texts, None)
    if first is None:
        raise ValueError(f"the source {source.path} has no documents with text")
    yield from islice(chain([first], texts), source.first or None)


def is_hub(source: Source) -> bool:
    """Whether a source is streamed from the hub."""
    return source.path.startswith(HUB)


def source_fingerprint(source: Source) -> str:
    """Changes when the documents of a source may have changed: files by their names, sizes and times."""
    about: list[Any] = [source.field, source.first]
    if is_hub(source):
        about += [source.path, source.subset, source.split]
    elif source.path == STDLIB:
        about += [sys.version, [(name, path.stat().st_size) for name, path in _files(source)]]
    else:
        stats = [(name, path.stat()) for name, path in _files(source)]
        about += [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return json_fingerprint(about)


def hub_dataset(source: Source) -> Any:
    """The streamed dataset of a source "hf:NAME"; "hf:json:GLOB" (or csv, parquet, …) for files of one's own."""
    try:
        from datasets import load_dataset  # type: ignore[import-untyped]
    except ImportError as e:
        raise ValueError(f"the source {source.path} needs datasets: pip install datasets") from e
    name, _, files = source.path.removeprefix(HUB).partition(":")
    try:
        rows = load_dataset(name, source.subset or None, data_files=files or None, split=source.split, streaming=True)
    except Exception as e:  # whatever the hub, the network or a builder may say
        raise ValueError(f"the source {source.path} cannot be loaded: {first_line(e)}") from e
    return rows.take(source.first) if source.first else rows


def text_of(row: dict[str, Any], field: str, where: str) -> str:
    """The text of a row, or a refusal that names the nearest key. None counts as no text."""
    if field not in row:
        raise ValueError(f"{where} has no {field!r}; {_keys_there(field, row)}")
    value = row[field]
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where} has a {type(value).__name__} as {field!r}, accepted is text")
    return _without_lone_surrogates(value or "")


def _hub_documents(source: Source) -> Iterator[str]:
    for number, row in enumerate(hub_dataset(source)):
        yield text_of(row, source.field, f"row {number} of {source.path}")


def _file_documents(source: Source) -> Iterator[str]:
    for _, path in _files(source):
        kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
        if path.suffix in (".parquet", ".arrow"):
            yield from _columns(path, source.field)
            continue
        try:
            if kind in (".jsonl", ".json"):
                yield from _json_lines(path, source.field)
            else:
                yield _text(path)
        except (OSError, EOFError, zlib.error) as e:
            raise ValueError(f"{path} cannot be read: {e}") from e


def _files(source: Source) -> list[tuple[str, Path]]:
    """(name below the source, path) of a source's files, sorted by name."""
    if source.path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths: Iterable[Path] = (
            p for p in root.rglob("*.py") if STDLIB_WITHOUT.isdisjoint(p.relative_to(root).parts[:-1])
        )
    else:
        root = Path(source.path)
        if root.is_file():
            return [(root.name, root)]
        if not root.is_dir():
            raise ValueError(f"the source {source.path} is no file or folder; accepted are these, stdlib and hf:NAME")
        paths = (p for p in root.rglob("*") if p.is_file() and p.name not in DATASET_NOTES)
    named = [(p.relative_to(root), p) for p in paths]
    files = sorted((n.as_posix(), p) for n, p in named if not any(part.startswith(".") for part in n.parts))
    if not files:
        raise ValueError(f"the source {source.path} has no files")
    return files


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _text(path: Path) -> str:
    with _open(path) as file:
        head = file.read(PROBE)
        if b"\0" in head:
            raise ValueError(f"{path} is no text: there are NUL bytes in it")
        return (head + file.read()).decode("utf-8", errors="surrogateescape")


def _json_lines(path: Path, field: str) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            where = f"line {number} of {path}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise ValueError(f"{where} is no JSON: {e}") from e
            if not isinstance(row, dict):
                raise ValueError(f"{where} is a {type(row).__name__}, accepted is one JSON object a line")
            yield text_of(row, field, where)


def _columns(path: Path, field: str) -> Iterator[str]:
    """Of Parquet, and of both forms of Arrow's IPC: the file with its index, and the stream, which datasets writes."""
    try:
        import pyarrow.ipc  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as e:
        raise ValueError(f"{path} needs pyarrow: pip install pyarrow") from e
    try:
        with pyarrow.memory_map(str(path)) as mapped:
            if path.suffix == ".parquet":
                reader = pyarrow.parquet.ParquetFile(mapped)
                names, batches = reader.schema_arrow.names, reader.iter_batches(batch_size=1024, columns=[field])
            elif mapped.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(mapped)
                names, batches = reader.schema.names, map(reader.get_batch, range(reader.num_record_batches))
            else:
                mapped.seek(0)
                batches = pyarrow.ipc.open_stream(mapped)
                names = batches.schema.names
            if field not in names:
                raise ValueError(f"{path} has no {field!r}; {_keys_there(field, names)}")
            for batch in batches:
                column = batch.column(field)
                column.validate(full=True)  # what points outside of the file would end the process
                for i, value in enumerate(column.to_pylist()):
                    yield text_of({field: value}, field, f"row {i} of a batch of {path}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} cannot be read: {' '.join(str(e).split())}") from e


def _keys_there(field: str, names: Iterable[str]) -> str:
    there = list(names)
    near = difflib.get_close_matches(field, there, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, there)) or 'none'}"


def _without_lone_surrogates(text: str) -> str:
    """JSON may escape half a character, which no encoding takes."""
    if text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
