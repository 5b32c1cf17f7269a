import json

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


def test_bench_prints_what_it_measured(capsys):
    sizes = ["--heads", "2", "--dk", "8", "--dv", "4", "--repeats", "1", "--lengths", "40"]
    assert cli.main(["bench", "operators", *sizes, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["operator"] for row in rows] == ["dynamic", "log_linear", "linear"]
    assert all(row["seconds"] > 0 and row["state bytes"] > 0 for row in rows)
    assert cli.main(["bench", "operators", *sizes]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_info_generate_and_convert_are_commands(tmp_path, capsys):
    assert cli.main(["info", "gdn-tiny", "--memory", "dynamic", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["memories"]) == ["dynamic"]
    assert cli.main(["generate", "gdn-tiny", "--prompt", "a", "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generated_tokens"] == 2
    assert cli.main(["convert", str(tmp_path / "none"), str(tmp_path / "new")]) == 1
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
    assert near["dynamic bytes"] == far["dynamic bytes"]
    assert near["log_linear bytes"] < far["log_linear bytes"]
