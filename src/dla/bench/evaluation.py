"""`dla bench eval`: multiple choice by ``DLALM``, which reads a shared context once, and by lm_eval's ``HFLM``.

Both answer the same requests with the same model, so the ratio of their times is what reading once and batching without
padding bring. The most it can be is the ratio of the tokens they read.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dla.bench.common import Figures, say
from dla.bench.timing import interleaved, medians, now
from dla.evaluation.local import read_rows
from dla.models import DLAForCausalLM
from dla.models.load import load_model
from dla.report import table
from dla.report.found import Found
from dla.text import ByteTokenizer
from dla.typed import Count, convert

BATCH_SIZES = (8, 16, 32)  # of HFLM: the best of them counts
Request = tuple[tuple[str, str], list[int], list[int]]  # as lm_eval has them: text, context, continuation


def run(
    *,
    requests: int = 64,
    context: int = 100,
    ending: int = 10,
    endings: int = 4,
    preset: str = "mamba2-tiny",
    memory: str = "single",
    rows: Path | None = None,
    repeats: int = 5,
    out: Path | None = None,
) -> Found:
    """Time both on ``requests`` made-up contexts with ``endings`` endings each, and on as many of a HellaSwag file.

    Args:
        context, ending: tokens of each.
        rows: a file of JSON lines with "ctx" and "endings" (.gz or not); its text is read as bytes.
        repeats: rounds, after one that does not count; the medians are taken.
    """
    sizes = {"requests": requests, "context": context, "ending": ending, "endings": endings, "repeats": repeats}
    for name, value in sizes.items():
        convert(name, value, Count)
    asked = {"made up": made_up(requests, context, ending, endings)}
    if rows is not None:
        asked[rows.name] = from_file(rows, requests)
    model = load_model(preset, memory=memory, device="cpu")
    found = []
    for name, some in asked.items():
        found.append({"requests": name, **compare(model, some, repeats)})
        say(f"{name}: {found[-1]['ratio']:.2f} times as fast")
    report = {"preset": preset, "memory": memory, "threads": torch.get_num_threads(), "rows": found}
    return Found(table(found), report, out)


def made_up(requests: int, context: int, ending: int, endings: int, vocabulary: int = 256) -> list[Request]:
    """Contexts of random tokens, each with a few endings."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=generator).tolist()

    return [
        (("", ""), shared, tokens(ending))
        for shared in (tokens(context) for _ in range(requests))
        for _ in range(endings)
    ]


def from_file(path: Path, most: int) -> list[Request]:
    """The first rows of a HellaSwag file, as bytes."""
    encode = ByteTokenizer().encode
    found = read_rows(path, lambda row: (encode(row["ctx"]), [encode(" " + x) for x in row["endings"]]))
    if not found:
        raise ValueError(f"rows has no lines: {path}")
    return [(("", ""), context, ending) for context, endings in found[:most] for ending in endings]


def compare(model: DLAForCausalLM, requests: Sequence[Request], repeats: int) -> Figures:
    """Tokens, seconds and their ratios; and how far the answers are apart."""
    from dla.evaluation.adapter import DLALM

    ours = DLALM(model, tokenizer=ByteTokenizer(), progress=False)
    calls: dict[str, Callable[[], Any]] = {"DLALM": lambda: ours._loglikelihood_tokens(requests, disable_tqdm=True)}
    for size in BATCH_SIZES:
        calls[f"HFLM {size}"] = _theirs(model, size, requests)
    answers = [call() for call in calls.values()]  # the round that does not count
    tokens = ours.reader.tokens_read
    theirs = sum(len(context) + len(continuation) - 1 for _, context, continuation in requests)
    # beside wall-clock seconds the process's own: where others use the machine, those hold still
    times = interleaved(calls, repeats, warmup=0, clock=lambda: np.array([now(), time.process_time()]))
    seconds, busy = (medians({name: [x[i] for x in found] for name, found in times.items()}) for i in range(2))
    best = min((name for name in calls if name != "DLALM"), key=seconds.__getitem__)
    return {
        "DLALM tokens": tokens,
        "HFLM tokens": theirs,  # without its padding
        "token ratio": theirs / tokens,
        "DLALM s": seconds["DLALM"],
        "HFLM s": seconds[best],
        "batch size": int(best.removeprefix("HFLM ")),
        "ratio": seconds[best] / seconds["DLALM"],
        "CPU ratio": busy[best] / busy["DLALM"],
        "largest difference": max(abs(a[0] - b[0]) for a, b in zip(answers[0], answers[1], strict=True)),
    }


def _theirs(model: DLAForCausalLM, batch_size: int, requests: Sequence[Request]) -> Callable[[], Any]:
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it has much to say about a model that it did not load
    lm = HFLM(pretrained=model, tokenizer=_tokenizer(), batch_size=batch_size)
    return lambda: lm._loglikelihood_tokens(list(requests), disable_tqdm=True)


def _tokenizer() -> Any:
    """What HFLM wants to have; it is not used on requests that are tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
