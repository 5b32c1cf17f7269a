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
