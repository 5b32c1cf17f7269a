"""The page's script and style: built from what is in web/, and fit to be read."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import dla

ROOT = Path(__file__).parents[2]
ASSETS = Path(dla.__file__).parent / "inspect" / "assets"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def node(*arguments: str) -> None:
    done = subprocess.run(["node", *arguments], cwd=ROOT / "web", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_node
def test_the_built_script_is_current():
    node("bundle.mjs", "--check")


@needs_node
def test_the_modules_do_what_they_say():
    node("--test")


def test_the_script_asks_nobody_for_anything():
    script = (ASSETS / "page.js").read_text()
    assert not re.findall(
        r"fetch\(|XMLHttpRequest|WebSocket|eval\(|innerHTML|insertAdjacentHTML|document\.write", script
    )


def colours(css: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", css))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_on_every_colour(dark):
    """WCAG's contrast for text (4.5), and for marks that mean something (3)."""
    light, other = (ASSETS / "page.css").read_text().split("@media (prefers-color-scheme: dark)")
    look = colours(light) | (colours(other.split("\n* {")[0]) if dark else {})
    for name in ("paper", "card", "pick", *(f"c{i}" for i in range(8))):
        assert contrast(look["ink"], look[name]) >= 4.5, name
    for name in ("quiet", "accent", "query"):
        assert contrast(look[name], look["card"]) >= 4.5, name
    for name in ("opened", "joined", "now", *(f"line-{i}" for i in range(8))):
        assert contrast(look[name], look["card"]) >= 3, name
