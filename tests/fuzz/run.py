"""`make fuzz`: load thousands of damaged and hostile files, and see that each is loaded or refused in one line.

Workers (``worker.py``) load many files each, since their imports take seconds. One that dies by a signal, or does not
answer in time, is replaced; the file that it had is kept with what went wrong.

Mutations are blind, not guided by coverage as those of Atheris or AFL: the parsers are those of json, tomllib,
safetensors and torch, and the package's own part is checks of one field after another, which mutations of single values
reach.
"""

import argparse
import contextlib
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
OUTCOMES = ("loaded", "refused", "traceback", "code run", "crash", "hang")
GOOD = OUTCOMES[:2]
START = 180.0  # seconds that a worker may take to be ready, or for its first file of a kind
Answer = dict[str, Any]


@dataclass
class Result:
    """What came of one mutated folder."""

    format: str
    index: int
    outcome: str
    mutation: str = ""
    file: str = ""  # the one that was mutated
    message: str = ""
    kept: str = ""  # where a failure is kept


@dataclass
class Settings:
    """What is asked for."""

    seed: int = 0
    files: int = 4800
    workers: int = 2
    limit: float = 30.0  # seconds a file
    out: Path = Path("out/fuzz")
    formats: str = "tests.fuzz.formats"  # the module that has them
    only: Sequence[str] = field(default_factory=tuple)  # names of formats; none: all


class LostError(Exception):
    """A worker that is no more: how it ended."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome, self.message = outcome, message


class Worker:
    """A process that loads files, as seen from outside."""

    def __init__(self, settings: Settings, samples: Path, own: Path) -> None:
        own.mkdir(parents=True, exist_ok=True)
        self.own, self.warm = own, set[str]()
        command = [*_command(settings, samples), "--own", str(own), "--seed", str(settings.seed)]
        plots = {"MPLCONFIGDIR": str(samples.parent / "matplotlib")}  # its list of fonts, which all workers share
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=_environment() | plots, text=True
        )
        try:
            self.formats: list[str] = self._receive(START)["ready"]
        except LostError:
            self.close()
            raise

    def load(self, format: str, what: dict[str, Any], limit: float) -> Answer:
        """What came of a folder. Raises LostError if the worker is lost over it."""
        if format not in self.warm:
            answer = self._ask({"warm": format}, START)
            if answer["outcome"] != "loaded":
                raise RuntimeError(f"{format}: {answer['message']}\n{answer.get('trace', '')}")
            self.warm.add(format)
        return self._ask({"format": format, **what}, limit)

    def _ask(self, request: dict[str, Any], limit: float) -> Answer:
        with contextlib.suppress(BrokenPipeError):
            self._pipe(self.process.stdin).write(json.dumps(request) + "\n")
            self._pipe(self.process.stdin).flush()
        return self._receive(limit)

    def _receive(self, limit: float) -> Answer:
        stdout = self._pipe(self.process.stdout)
        if not select.select([stdout], [], [], limit)[0]:
            self.process.send_signal(signal.SIGABRT)  # it writes down where it is
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            raise LostError("hang", f"no answer in {limit:g} s\n{self._output()}")
        line = stdout.readline()
        if line:
            answer: Answer = json.loads(line)
            if "error" in answer:
                raise RuntimeError(f"the harness itself failed:\n{answer['error']}")
            return answer
        code = self.process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise LostError("crash", f"ended by {how}\n{self._output()}")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def _output(self) -> str:
        """The end of what it wrote to stderr."""
        file = self.own / "output.txt"
        return file.read_text(errors="replace")[-5000:] if file.exists() else ""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._pipe(self.process.stdin).close()
        self._pipe(self.process.stdout).close()


def _command(settings: Settings, samples: Path) -> list[str]:
    arguments = ["--formats", settings.formats, "--samples", str(samples)]
    return [sys.executable, "-m", "tests.fuzz.worker", *arguments]


def _environment() -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    sources = os.pathsep.join(map(str, (ROOT, ROOT / "src")))  # those beside the tests, whatever is installed
    return {**os.environ, **threads, **quiet, "PYTHONPATH": sources, "MPLBACKEND": "agg"}


@contextlib.contextmanager
def prepared(settings: Settings) -> Iterator[tuple[Path, Path]]:
    """The samples' folder, and one for the workers; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        samples = Path(root) / "samples"
        samples.mkdir()
        made = subprocess.run(
            _command(settings, samples), cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise RuntimeError(f"the samples could not be made:\n{made.stderr}")
        yield samples, Path(root)


def fuzz(settings: Settings) -> list[Result]:
    """Load ``settings.files`` mutated folders, the formats in turn; the results, failures kept in ``settings.out``."""
    with prepared(settings) as (samples, root):
        names = sorted(path.name for path in samples.iterdir())
        if unknown := set(settings.only) - set(names):
            raise ValueError(f"only must be of {', '.join(names)}, got {', '.join(unknown)}")
        names = [name for name in names if not settings.only or name in settings.only]
        cases: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        for i in range(settings.files):
            cases.put((names[i % len(names)], i // len(names)))
        results: list[Result] = []
        errors: list[BaseException] = []
        own = [root / f"worker-{i}" / "own" for i in range(settings.workers)]
        threads = [threading.Thread(target=_work, args=(settings, samples, x, cases, results, errors)) for x in own]
        for thread in threads:
            thread.start()
        _show_progress(threads, results, settings.files)
    if errors:
        raise errors[0]
    return sorted(results, key=lambda result: (result.format, result.index))


def _work(
    settings: Settings,
    samples: Path,
    own: Path,
    cases: "queue.SimpleQueue[tuple[str, int]]",
    results: list[Result],
    errors: list[BaseException],
) -> None:
    """One worker's share: cases until there are none."""
    worker: Worker | None = None
    try:
        while not errors:
            format, index = cases.get_nowait()
            worker = worker or Worker(settings, samples, own)
            try:
                answer = worker.load(format, {"index": index}, settings.limit)
            except LostError as lost:
                about = json.loads((own / "about.json").read_text())
                answer = {**about, "outcome": lost.outcome, "message": lost.message}
                worker.close()
                worker = None
            results.append(_result(settings, format, index, answer, own))
    except queue.Empty:
        pass
    except BaseException as error:  # for the main thread
        errors.append(error)
    finally:
        if worker is not None:
            worker.close()


def _result(settings: Settings, format: str, index: int, answer: Answer, own: Path) -> Result:
    known = {name: answer[name] for name in ("outcome", "mutation", "file", "message") if name in answer}
    result = Result(format, index, **known)
    if result.outcome not in GOOD:
        kept = settings.out / "failed" / f"{format}@{settings.seed}-{index}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(own / "made", kept / "files")
        about = [f"{result.outcome} after the mutation {result.mutation!r} of {result.file}", result.message]
        (kept / "why.txt").write_text("\n".join([*about, answer.get("trace", "")]), errors="replace")
        result.kept = str(kept)
    return result


def _show_progress(threads: Sequence[threading.Thread], results: Sequence[Result], total: int) -> None:
    from tqdm import tqdm

    with tqdm(total=total, unit=" files", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
            bar.update(len(results) - bar.n)


def repeat(settings: Settings, kept: Path) -> Answer:
    """Load once more what a failure was kept of."""
    with prepared(settings) as (samples, root):
        worker = Worker(settings, samples, root / "worker" / "own")
        try:
            return worker.load(kept.name.partition("@")[0], {"folder": str((kept / "files").resolve())}, settings.limit)
        except LostError as lost:
            return {"outcome": lost.outcome, "message": lost.message}
        finally:
            worker.close()


def counts(results: Sequence[Result], by: str) -> list[dict[str, object]]:
    """A row for each format or mutation: how many files came to what."""
    found: dict[str, Counter[str]] = {}
    for result in results:
        found.setdefault(getattr(result, by) or "?", Counter())[result.outcome] += 1
    rows = [{by: name, "files": sum(n.values()), **{x: n[x] for x in OUTCOMES}} for name, n in sorted(found.items())]
    total = Counter(result.outcome for result in results)
    return [*rows, {by: "all", "files": len(results), **{x: total[x] for x in OUTCOMES}}]


def main() -> int:
    asked = _parser().parse_args()
    names = ("seed", "files", "workers", "limit", "out", "only")
    settings = Settings(**{name: getattr(asked, name) for name in names})
    if asked.repeat is not None:
        answer = repeat(settings, asked.repeat)
        print(f"{answer['outcome']}: {answer['message']}\n{answer.get('trace', '')}".rstrip())
        return answer["outcome"] not in GOOD
    results = fuzz(settings)
    return report(results, settings)


def report(results: Sequence[Result], settings: Settings) -> int:
    """Print the tables and every failure; the exit code."""
    from dla.report import table

    print(table(counts(results, "format")), table(counts(results, "mutation")), sep="\n\n")
    settings.out.mkdir(parents=True, exist_ok=True)
    about = {"seed": settings.seed, "results": [asdict(result) for result in results]}
    (settings.out / "results.json").write_text(json.dumps(about, indent=1))
    failures = [result for result in results if result.outcome not in GOOD]
    for result in failures:
        first = result.message.splitlines()[0] if result.message else ""
        print(f"\n{result.outcome}: {result.format} {result.file} ({result.mutation}): {first}")
        print(f"  why: {result.kept}/why.txt   again: make fuzz FUZZ_CASE={result.kept}")
    print(f"\nseed {settings.seed}: {len(results)} files, {len(failures)} failures; all in {settings.out}/results.json")
    return int(bool(failures))


def _parser() -> argparse.ArgumentParser:
    plain = Settings()
    parser = argparse.ArgumentParser(
        prog="make fuzz", description="Load mutated files; each is to load, or to be refused"
    )
    parser.add_argument("--seed", type=int, default=plain.seed, help="of the mutations (%(default)s)")
    parser.add_argument("--files", type=int, default=plain.files, help="how many (%(default)s)")
    parser.add_argument("--workers", type=int, default=plain.workers, help="processes (%(default)s)")
    parser.add_argument("--limit", type=float, default=plain.limit, help="seconds a file (%(default)s)")
    parser.add_argument("--only", nargs="+", default=(), metavar="FORMAT", help="these alone")
    parser.add_argument("--out", type=Path, default=plain.out, help="where failures are kept (%(default)s)")
    parser.add_argument("--repeat", type=Path, metavar="DIR", help="load what a failure was kept of once more")
    return parser


if __name__ == "__main__":
    sys.exit(main())
