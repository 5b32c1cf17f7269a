"""What the documentation site takes from outside of docs/: the README as its first page, files that pages link to."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)((?:#[^)]*)?)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README, and whatever a page links to with ../"""
    readme = (ROOT / "README.md").read_text()
    linked = {path for page in ROOT.glob("docs/*.md") for path, _ in OUTSIDE.findall(page.read_text())}
    linked |= {path for path in re.findall(r"\]\(([\w./-]+)", readme) if not path.startswith("docs/")}
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
    for path in sorted(linked - {"README.md"}):
        name = _name(path)
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to the outside are links to what was added."""
    return OUTSIDE.sub(lambda found: f"]({_name(found[1])}{found[2]})", markdown)


def _name(path: str) -> str:
    """A file's place in the site: pages of other folders beside ours, everything else as it is, for download."""
    if path == "README.md":
        return "index.md"
    return (
        path.replace("/", "_")
        if path.endswith(".md")
        else f"files/{path}.txt"
        if path.endswith(".py")
        else f"files/{path}"
    )
