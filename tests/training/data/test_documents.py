"""Documents come out as they went in, whatever holds them, and bad ones are named."""

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from dla.training.data.documents import documents, source_fingerprint
from dla.training.recipe import Source

TEXTS = ["first", "zweites, größer", "third\nin two lines", "後"]


def read(path: Path | str, **options: str) -> list[str]:
    return list(documents(Source(str(path), **options)))


def json_lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text, "other": 1}) + "\n" for text in texts).encode()


def test_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("größer\nline")
    assert read(tmp_path / "a.txt") == ["größer\nline"]


def test_compressed_text(tmp_path: Path) -> None:
    (tmp_path / "a.md.gz").write_bytes(gzip.compress("größer".encode()))
    assert read(tmp_path / "a.md.gz") == ["größer"]


def test_bytes_that_are_no_text_are_kept_as_escapes(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6\xdf")
    assert [text.encode("utf-8", "surrogateescape") for text in read(tmp_path / "latin.txt")] == [b"gr\xf6\xdf"]


def test_a_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"abc\0def")
    with pytest.raises(ValueError, match=r"model\.bin is no text"):
        read(tmp_path / "model.bin")
    with pytest.raises(ValueError, match=r"model\.bin is no text"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    data = json_lines(TEXTS, "body")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read(tmp_path / name, field="body") == TEXTS


def test_bad_json_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(TEXTS) + b"\n{broken\n")
    with pytest.raises(ValueError, match=r"line 6 of .*a\.jsonl is no JSON"):
        read(path)
    path.write_text('{"text": "a"}\n["b"]\n')
    with pytest.raises(ValueError, match=r"line 2 of .*a\.jsonl is a list"):
        read(path)


def test_a_missing_field_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    with pytest.raises(ValueError, match=r"line 1 of .* has no 'texts'; did you mean 'text'\?"):
        read(tmp_path / "a.jsonl", field="texts")
    with pytest.raises(ValueError, match="there are 'text', 'other'"):
        read(tmp_path / "a.jsonl", field="zzz")
    with pytest.raises(ValueError, match="has a int as 'other'"):
        read(tmp_path / "a.jsonl", field="other")


def test_half_characters_in_json_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b\\ud83d\\ude00"}\n')
    assert read(tmp_path / "a.jsonl") == ["a\N{REPLACEMENT CHARACTER}b\N{GRINNING FACE}"]


def test_documents_without_text_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n{"text": "x"}\n')
    assert read(tmp_path / "a.jsonl") == ["x"]
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl has no documents"):
        read(tmp_path / "b.jsonl")


def test_a_broken_gzip_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(json_lines(TEXTS * 100))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz cannot be read"):
        read(tmp_path / "a.jsonl.gz")


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    texts = [f"text {i}" for i in range(3000)]
    pq.write_table(pa.table({"text": texts, "n": range(3000)}), tmp_path / "a.parquet", row_group_size=700)
    assert read(tmp_path / "a.parquet") == texts
    with pytest.raises(ValueError, match=r"a\.parquet has no 'txt'; did you mean 'text'"):
        read(tmp_path / "a.parquet", field="txt")
    with pytest.raises(ValueError, match=r"int as 'n'"):
        read(tmp_path / "a.parquet", field="n")
    (tmp_path / "b.parquet").write_bytes(b"PAR1nonsense")
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read"):
        read(tmp_path / "b.parquet")


@pytest.mark.parametrize("form", ["file", "stream"])
def test_arrow(tmp_path: Path, form: str) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": [f"text {i}" for i in range(100)]})
    make = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with make(tmp_path / "a.arrow", table.schema) as writer:
        for batch in table.to_batches(max_chunksize=30):
            writer.write_batch(batch)
    assert read(tmp_path / "a.arrow") == [f"text {i}" for i in range(100)]
    with pytest.raises(ValueError, match=r"a\.arrow has no 'body'"):
        read(tmp_path / "a.arrow", field="body")


def test_a_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == TEXTS


def test_a_folder_by_relative_path_without_hidden_files(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.txt", "a/c.txt", ".hidden", ".git/config", "c/.x/d.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a" / "lines.jsonl").write_bytes(json_lines(["one", "two"]))
    assert read(tmp_path) == ["a/c.txt", "one", "two", "a/z.txt", "b.txt"]


def test_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is no file or folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no files"):
        read(tmp_path)


def test_the_standard_library() -> None:
    texts = documents(Source("stdlib"))
    assert next(texts) == Path(json.__file__).parent.parent.joinpath("__future__.py").read_text()
    assert sum(1 for _ in texts) > 300


def test_the_hub_with_files_of_ones_own(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for i in range(2):
        (tmp_path / f"part{i}.jsonl").write_bytes(json_lines([f"{i} {t}" for t in TEXTS]))
    expected = [f"{i} {t}" for i in range(2) for t in TEXTS]
    assert read(f"hf:json:{tmp_path}/*.jsonl") == expected
    assert read(f"hf:{tmp_path}") == expected
    with pytest.raises(ValueError, match=r"row 0 of hf:.* has no 'txt'"):
        read(f"hf:{tmp_path}", field="txt")
    with pytest.raises(ValueError, match=r"hf:json:.*missing.* cannot be loaded"):
        read(f"hf:json:{tmp_path}/missing.jsonl")


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    source = Source(str(tmp_path))
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("abc")
    first = source_fingerprint(source)
    assert source_fingerprint(source) == first
    assert source_fingerprint(Source(str(tmp_path), field="body")) != first
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    second = source_fingerprint(source)
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    third = source_fingerprint(source)
    (tmp_path / "c.txt").write_text("abcd")
    assert len({first, second, third, source_fingerprint(source)}) == 4
    assert source_fingerprint(Source("stdlib")) == source_fingerprint(Source("stdlib"))
    assert source_fingerprint(Source("hf:x")) != source_fingerprint(Source("hf:x", split="test"))


def test_files_that_are_damaged(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text('{"text": "a"}\n' + "[" * 200_000)
    with pytest.raises(ValueError, match=r"line 2 of .*deep\.jsonl is no JSON: "):
        read(str(tmp_path / "deep.jsonl"))
    packed = bytearray(gzip.compress(random.Random(0).randbytes(5000)))
    packed[10] ^= 0xFF  # of the compressed data itself, which its sum would come after
    for name in ("text.txt.gz", "lines.jsonl.gz"):
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(ValueError, match=f"{name} cannot be read: "):
            read(str(tmp_path / name))
