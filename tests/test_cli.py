import importlib
import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

import dla
from dla import cli


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"dla {dla.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nonsense"]])
def test_wrong_commands_are_explained(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    assert "usage: dla" in capsys.readouterr().err


# Every command and group: what its help says.
HELPS = [[], *([word] for word in cli.GROUPS), *(name.split() for name in cli.COMMANDS)]


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_every_help_page_ends_with_an_example_that_is_one(words, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words, "--help"])
    *_, heading, example = capsys.readouterr().out.rstrip().splitlines()
    assert heading == "example:"
    program, *arguments = shlex.split(example)
    assert program == "dla" and arguments[: len(words)] == words
    assert callable(cli.build_parser(arguments).parse_args(arguments).run)


def test_every_command_runs_something_with_options_that_it_has():
    """The options that a command reads are parameters of the library's function that takes them."""
    for name in cli.COMMANDS:
        parser = cli.build_parser(name.split())
        for word in name.split():
            (kinds,) = (action for action in parser._actions if isinstance(action.choices, dict))
            parser = kinds.choices[word]
        options = {action.dest for action in parser._actions} - {"help", "json"}
        where = getattr(parser.get_default("run"), "where", None)
        if where is not None:  # else it chooses between functions itself
            function = getattr(importlib.import_module(where[0]), where[1])
            known = inspect.signature(function).parameters
            if not any(
                parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()
            ):  # else it passes them on
                assert options <= set(known), name


def test_choices_are_those_of_the_tables_they_name():
    from dla import choices
    from dla.evaluation.reproduce import PLANS
    from dla.models.convert.formats import FORMATS

    assert tuple(PLANS) == choices.REPRODUCED
    assert tuple(FORMATS) == choices.FORMATS


def test_help_needs_no_torch():
    for words in ([], ["train"], ["eval"], ["generate"], ["lab", "run"]):
        code = f"import sys; from dla.cli import main\ntry: main({[*words, '--help']})\nexcept SystemExit: pass\n"
        code += "assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_python_m_dla_is_dla():
    found = subprocess.run([sys.executable, "-m", "dla", "--version"], check=True, capture_output=True, text=True)
    assert found.stdout == f"dla {dla.__version__}\n"


def test_bench_prints_what_it_measured(tmp_path, capsys):
    sizes = ["--heads", "2", "--dk", "8", "--dv", "4", "--rounds", "2", "--length", "70", "--decoded", "16"]
    out = tmp_path / "ops.json"
    assert cli.main(["bench", "ops", *sizes, "--streams", "correlated", "drift", "--json", "--out", str(out)]) == 0
    streams = json.loads(capsys.readouterr().out)["streams"]
    assert [stream["stream"] for stream in streams] == ["correlated", "drift"]
    for stream in streams:
        times = {row["call"]: row["ms"] for row in stream["prefill"]}
        assert {"single", "log_linear", "dynamic", "sdpa", "chunked dynamic", "scan"} <= set(times)
        assert all(value > 0 for value in times.values())
        assert all(0 < ratio["low"] <= ratio["median"] <= ratio["high"] for ratio in stream["ratios"])
        held = {row["call"]: row["bytes"] for row in stream["decode"]["tokens"]}
        assert held["single"] == 2 * 8 * 4 * 4 + 8 and held["dynamic"] > 0
    learned = streams[0]["training"]
    assert [row["memory"] for row in learned] == ["single", "log_linear", "dynamic"] and "training" not in streams[1]
    assert all(row["ratio"] > 1 for row in learned)
    assert json.loads(out.read_text())["streams"] == streams
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["bench", "ops", *sizes, "--streams", "every", "--chunked", "0", "--beta"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert cli.main(["bench", "ops", *sizes, "--streams", "captured"]) == 2
    assert "--model" in capsys.readouterr().err


def test_info_generate_and_convert_are_commands(tmp_path, capsys):
    assert cli.main(["info", "gdn-tiny", "--memory", "dynamic", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["memories"]) == ["dynamic"]
    assert cli.main(["generate", "gdn-tiny", "--prompt", "a", "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generated_tokens"] == 2
    assert cli.main(["convert", str(tmp_path / "none"), str(tmp_path / "new")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.slow
def test_benches_of_models(tmp_path, capsys):
    out = tmp_path / "figures.json"
    arguments = ["--preset", "mamba2-tiny", "--prompt", "8", "--new-tokens", "2", "--out", str(out)]
    assert cli.main(["bench", "models", *arguments]) == 0
    capsys.readouterr()
    rows = json.loads(out.read_text())["rows"]
    assert [row["model"] for row in rows] == ["single", "log_linear", "dynamic", "transformers"]
    assert rows[0]["parameters"] == rows[-1]["parameters"] < rows[1]["parameters"]
    assert all(row["seconds"] > row["prefill seconds"] > 0 and row["cache bytes"] > 0 for row in rows)
    arguments = ["--preset", "mamba2-tiny", "--contexts", "5", "40", "--tokens", "3", "--json"]
    assert cli.main(["bench", "decoding", *arguments]) == 0
    near, far = json.loads(capsys.readouterr().out)["rows"]
    assert near["single bytes"] == far["single bytes"] < far["log_linear bytes"]
    assert 0 < near["dynamic bytes"] < far["dynamic bytes"]  # as many as its tokens need, while they are few
    assert near["log_linear bytes"] < far["log_linear bytes"]


# Errors and Ctrl-C end in main, in one line.


@pytest.mark.parametrize("error", [ValueError("lr must be\na number"), OSError("disk full"), ImportError("needs x")])
def test_errors_of_commands_are_one_line(error, monkeypatch, capsys):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("dla.lab.demo.run", refuse)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == f"dla demo: {' '.join(str(error).split())}\n"


def test_other_errors_are_not_hidden(monkeypatch):
    monkeypatch.setattr("dla.lab.demo.run", lambda *_, **__: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        cli.main(["demo"])


def test_an_interrupt_is_130(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dla.lab.demo.run", interrupt)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_demo_of_no_steps_is_refused(tmp_path, capsys):
    assert cli.main(["demo", "--steps", "0", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("dla demo: steps must be an integer >= 1")


def start(*arguments, **options):
    """`dla` in a process group of its own, as in a terminal."""
    command = [sys.executable, "-c", READY, *map(str, arguments)]
    made = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    made["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells ignore it in the background
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **{**made, **options})


# Says when main is at work: before that, Python itself and torch are imported.
READY = """
import sys
from dla import cli

def build(asked):
    print("ready", file=sys.stderr, flush=True)
    return made(asked)

made, cli.build_parser = cli.build_parser, build
sys.exit(cli.main())
"""
COMMANDS = {
    "generate": ("generate", "mamba2-mini", "--prompt", "a", "--max-new-tokens", "100000"),
    "bench": ("bench", "ops", "--rounds", "1000"),
    "eval": ("eval", "mamba2-mini", "--task", "niah_single_1_8192", "--samples", "50", "--out", "{out}/e.json"),
    "demo": ("demo", "--out", "{out}"),
    "inspect": ("inspect", "stream", "--out", "{out}"),
}
CASES = [("bench", 0.0), ("generate", 0.7), ("generate", 1.5)]
SLOW = [(name, after) for name in COMMANDS for after in (0.1, 0.4, 1.0, 5.0)]


@pytest.mark.parametrize(
    ("name", "after"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_a_real_interrupt(name, after, tmp_path):
    """At the start, while modules are imported, and at work; none leaves a traceback."""
    process = start(*(word.format(out=tmp_path) for word in COMMANDS[name]))
    assert process.stderr.readline() == "ready\n"
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    try:
        said = process.communicate(timeout=60)[1]
    finally:
        if process.poll() is None:  # it has not heard: nothing may go on beside the other tests
            os.killpg(process.pid, signal.SIGKILL)
    finished = name == "inspect" and after > 0.4  # it takes about as long
    assert process.returncode in ((0, 130, -signal.SIGINT) if finished else (130,)), said
    assert not any(word in said for word in ("Traceback", "Exception ignored", "leaked"))


def test_readers_that_leave_are_no_error(tmp_path):
    process = start("info", "gdn-tiny")
    process.stdout.close()
    said = process.stderr.read()
    process.wait(timeout=60)
    assert said == "ready\n" and process.returncode == 1
