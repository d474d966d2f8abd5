"""No module is too long, and what documents mention exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_points_at_exists(document: str) -> None:
    file = ROOT / document
    text = file.read_text()
    for path, anchor in LINK.findall(text):
        target = (file.parent / path) if path else file
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"
    for path in FILE.findall(text):
        places = (file.parent, ROOT, ROOT / "agentrl")
        assert any((place / path).is_file() for place in places), path


def anchors(document: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
