"""What a result was made with: all that would give another number, as short texts that can be compared.

weights: a checksum of the model's configuration and of its tensors as they were loaded, and so in their dtype.
dtype: theirs, for people.
tokenizer: a checksum of the tokenizer and of the tokens that begin and end its texts.
rows: a checksum of the rows of a local folder, or of the text that RULER's needles are hidden in; for rows of the
    Hugging Face hub, which are not asked for again to find this out, the dataset's name.
task: a checksum of the task's definition: lm-eval's file and ours.
dla, lm-eval: their versions.
"""

import hashlib
import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dla
from dla.evaluation.haystack import find_haystack
from dla.evaluation.local import local_rows
from dla.evaluation.ruler import KINDS
from dla.evaluation.suites import Spec, data_folder, definition
from dla.fingerprint import json_fingerprint

DIGITS = 16  # of a checksum
# Our files of which each suite's prompts, texts and metrics are made.
DEFINITIONS = {"ruler": ("ruler.py", "haystack.py"), "retrieval": ("cloze.py",), "longbench": ("longbench.py",)}


def model_provenance(lm: Any) -> dict[str, str]:
    """Of a `DLALM`."""
    text = [lm.text_fingerprint, lm.prefix_token_id, lm.eot_token_id, lm.add_bos_token, lm.stop_tokens]
    dtype = str(lm.model.dtype).removeprefix("torch.")
    return {"weights": lm.fingerprint[:DIGITS], "dtype": dtype, "tokenizer": json_fingerprint(text)[:DIGITS]}


def task_provenance(spec: Spec, data: Path | str | None, haystack: str) -> dict[str, str]:
    """Of a task over the rows that there are now; a file of them that cannot be read raises ValueError."""
    folder = data_folder(data)
    rows = _haystack_text(spec, folder, haystack) if spec.suite == "ruler" else _rows(spec, folder)
    versions = {"dla": dla.__version__, "lm-eval": version("lm-eval")}
    return {"rows": rows, "task": _definition(spec), **versions}


def _rows(spec: Spec, folder: Path | None) -> str:
    if folder is not None:
        try:
            return json_fingerprint(local_rows(spec.name, folder))[:DIGITS]
        except FileNotFoundError:
            pass
    return f"hub: {spec.hub or spec.lm_eval}"


def _haystack_text(spec: Spec, folder: Path | None, source: str) -> str:
    """By name where that says it all; essays of the hub, which "auto" takes if it can, are not asked for."""
    if not KINDS[spec.lm_eval or ""].text:
        return "noise"
    if source == "essays":
        return "hub: essays"
    books = source == "books" or (source == "auto" and folder is not None and (folder / "books").is_dir())
    if not books and source in ("auto", "stdlib"):
        return f"{source}: Python {platform.python_version()}"
    stack = find_haystack("books" if books else source, data=folder, length=spec.length)
    return f"{source if books else 'text'}: {hashlib.sha256(' '.join(stack.units).encode()).hexdigest()[:DIGITS]}"


def _definition(spec: Spec) -> str:
    own = Path(__file__).parent
    files = [own / name for name in DEFINITIONS.get(spec.suite, ())]
    if (theirs := definition(spec)) is not None:
        files += sorted(path for path in theirs.parent.iterdir() if path.suffix in (".py", ".yaml"))
    digest = hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:DIGITS]
