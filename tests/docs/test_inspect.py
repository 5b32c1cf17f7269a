"""What docs/inspect.md says of the page's size and speed is what was measured."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_in_figures() -> None:
    found = json.loads((ROOT / "benchmarks" / "inspect_page.json").read_text())
    assert (found["tokens"], found["layers"], found["heads"]) == (16384, 48, 48)
    text = (ROOT / "docs" / "inspect.md").read_text()
    for row in found["rows"]:
        frames = (f"{row[f'{what}: median frame ms']:.0f} / {row[f'{what}: 95% of frames ms']:.0f} ms"
                  for what in ("scroll", "time"))  # fmt: skip
        missing = [note.split()[2] for note in row["left out"] if note.startswith("Scores of")]
        cells = [
            f"{row['boundary rate']:.2f}",
            f"{row['page MB']:.1f} MB",
            f"{row['opening ms'] / 1000:.1f} s",
            f"{row['another layer ms']:.0f} ms",
            *frames,
            f"{missing[0]} of 2304" if missing else "none",
        ]
        assert f"| {' | '.join(cells)} |" in text
        assert row["page MB"] <= 30 and row["opening ms"] < 2000
