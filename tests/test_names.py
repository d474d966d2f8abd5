"""No module is too long, and what documents mention exists."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.benchmarks.size import LONG, PACKAGE, folders, lines

ROOT = Path(__file__).parents[1]
MODULES = sorted(file for folder in folders(PACKAGE) for file in folder.glob("*.py"))
DOCUMENTS = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.split()


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_no_module_is_long() -> None:
    assert not {name(file) for file in MODULES if lines(file) > LONG}


LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|md|toml|sql))`")


def test_what_documents_point_at_exists() -> None:
    missing = [f"{name}: {what}" for name in DOCUMENTS for what in missing_in(ROOT / name)]
    assert missing == []


def missing_in(file: Path) -> Iterator[str]:
    text = file.read_text()
    for path, anchor in LINK.findall(text):
        target = (file.parent / path) if path else file
        if not target.exists():
            yield path
        elif anchor and anchor not in anchors(target):
            yield f"{path}#{anchor}"
    places = (file.parent, ROOT, ROOT / "agentrl")
    for path in FILE.findall(text):
        if not any((place / path).is_file() for place in places):
            yield path


@cache
def anchors(document: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
