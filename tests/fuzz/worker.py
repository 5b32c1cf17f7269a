"""A process that loads mutated files, one after another: `python -m tests.fuzz.worker`, started by ``run.py``.

Requests come as lines of JSON on stdin: {"warm": FORMAT} loads the samples as they are, {"format": FORMAT, "index": I}
makes the mutated folder I and loads it, {"format": FORMAT, "folder": DIR} loads a folder as it is. Each is answered by
a line on stdout. A process that dies, or does not answer in time, is for the one that started it to notice.
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import resource
import shutil
import sys
import traceback
from pathlib import Path
from random import Random
from typing import Any, TextIO

from tests.fuzz.formats import Format, make_case, samples
from tests.fuzz.guard import Guard
from tests.fuzz.tensors import settled

MEMORY = 4 << 30  # bytes that loading may take beyond what the process has when it is ready
LONGEST = 4000  # characters of a message that counts as one line
PACKAGE = f"{os.sep}dla{os.sep}"

Answer = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--formats", default="tests.fuzz.formats", help="the module whose all_formats() counts")
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--own", type=Path, help="a folder for this worker alone; none: make the samples and end")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    formats: dict[str, Format] = importlib.import_module(asked.formats).all_formats()
    if asked.own is None:
        make_samples(formats, asked.samples)
        return
    requests, answers = _channels(asked.own)
    worker = Worker(formats, asked.samples.resolve(), asked.own.resolve(), asked.seed)
    _limit_memory()
    _say(answers, {"ready": list(formats)})
    for line in requests:
        try:
            _say(answers, worker.answer(json.loads(line)))
        except Exception:  # the harness's own, since what is loaded has its exceptions caught
            _say(answers, {"error": traceback.format_exc()})


def make_samples(formats: dict[str, Format], folder: Path) -> None:
    for name, format in formats.items():
        (folder / name).mkdir(parents=True)
        format.make((folder / name).resolve())
    for path in folder.rglob("*.safetensors"):  # so that a seed stands for the same bytes everywhere
        path.write_bytes(settled(path.read_bytes()))


def _channels(own: Path) -> tuple[TextIO, TextIO]:
    """Where requests come from and answers go. What is loaded gets an empty stdin, and its output goes to a file."""
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    output = os.open(own / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0), os.dup2(output, 1), os.dup2(output, 2)
    faulthandler.enable()  # where it was, should it be ended by a signal
    return requests, answers


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _say(answers: TextIO, answer: Answer) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


class Worker:
    """``own``/made is the mutated folder, ``own``/case the copy of it that is loaded."""

    def __init__(self, formats: dict[str, Format], samples: Path, own: Path, seed: int) -> None:
        self.formats, self.samples, self.own, self.seed = formats, samples, own, seed
        self.made, self.case = own / "made", own / "case"
        (own / "scratch").mkdir(exist_ok=True)
        os.environ["TMPDIR"] = os.environ["XDG_CACHE_HOME"] = str(own / "scratch")
        self.guard = Guard([self.case, own / "scratch"])

    def answer(self, request: dict[str, Any]) -> Answer:
        if "warm" in request:
            return self.warm(self.formats[request["warm"]])
        format = self.formats[request["format"]]
        _remove(self.made)
        mutation, file = "as it is", ""
        if "folder" in request:
            shutil.copytree(request["folder"], self.made)
        else:
            draw = Random(f"{self.seed} {format.name} {request['index']}")
            mutation, file = make_case(format, self.samples, self.made, draw)
        about = {"mutation": mutation, "file": file}
        (self.own / "about.json").write_text(json.dumps(about))  # for whoever finds this process dead
        return {**about, **self.attempt(format, self.made, watch=True)}

    def warm(self, format: Format) -> Answer:
        """Load the samples as they are, unwatched: what is imported late is imported now. They must load."""
        for sample in samples(format, self.samples):
            answer = self.attempt(format, sample, watch=False)
            if answer["outcome"] != "loaded":
                return {**answer, "message": f"the sample {sample} cannot be loaded: {answer['message']}"}
        return {"outcome": "loaded"}

    def attempt(self, format: Format, folder: Path, watch: bool) -> Answer:
        """Load a copy of a folder, and use it; what came of it."""
        os.chdir(self.own)
        _remove(self.case)
        shutil.copytree(folder, self.case)
        os.chdir(self.case)
        error: BaseException | None = None
        step = "load"
        with self.guard if watch else contextlib.nullcontext():
            try:
                loaded = format.load(self.case)
                step = "use"
                format.use(loaded)
            except BaseException as caught:  # an interrupt or an exit is no way out either
                error = caught
        if watch and self.guard.seen:
            return {"outcome": "code run", "message": "; ".join(self.guard.seen)}
        if error is None:
            return {"outcome": "loaded", "message": ""}
        wrong = why_not_a_refusal(error, None if step == "use" else str(self.case))
        if wrong is None:
            return {"outcome": "refused", "message": str(error)}
        trace = "".join(traceback.format_exception(error))
        return {"outcome": "traceback", "message": f"in {step}: {wrong}", "trace": trace[-20_000:]}


def why_not_a_refusal(error: BaseException, folder: str | None) -> str | None:
    """What keeps an exception from being a refusal in one line; None if it is one.

    ``folder``: the message must name it, or a file in it, while a folder is being loaded. What goes wrong when it is
    used (None) must have been refused by the package itself, and not by what it happened to call.
    """
    text = str(error)
    about = f"{type(error).__name__}: {text:.300}"
    if not isinstance(error, ValueError | OSError):
        return about
    if len(text.splitlines()) != 1 or len(text) > LONGEST:
        return f"the message is not one line of text: {about!r}"
    if folder is not None:
        return None if folder in text else f"the message does not name the file: {about}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = isinstance(error, OSError) or (frames and PACKAGE in frames[-1].filename)
    return None if inside and not isinstance(error, UnicodeError) else f"raised by {frames[-1].filename}: {about}"


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
