"""The demo in a few steps: all its outputs, not its result."""

import json

from dla import cli


def test_demo(tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path), "--steps", "2"]) == 0
    text = capsys.readouterr().out
    for label in ("single state", "Log-Linear", "the paper's rules", "recommended", "as large"):
        assert label in text
    assert text.index("minute") < text.index("single state")  # how long it takes is said before
    assert "at changes" in text and "By the paper's own rules" in text and "What was kept" in text
    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/png") >= 3 and "What is kept of a stream" in page
    results = {r["label"]: r for r in map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())}
    assert len(results) == 5
    large, routed = results["single state, as large"], results["DLA, recommended"]
    assert abs(large["state_bytes"] / routed["state_bytes"] - 1) < 0.05
    assert cli.main(["demo", "--out", str(tmp_path), "--steps", "2"]) == 0  # nothing is run again
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 5
