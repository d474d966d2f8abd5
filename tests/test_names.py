"""One word, one thing: class names, sizes of folders and modules, and names that documents mention.

The lists of exceptions only shrink: an entry that is no exception any more fails its test too.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.benchmarks.size import LONG, PACKAGE, folders, lines

ROOT = Path(__file__).parents[1]
MODULES = sorted(file for folder in folders(PACKAGE) for file in folder.glob("*.py"))
DOCUMENTS = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.split()
IN_A_FOLDER = 16  # modules

LONG_MODULES: set[str] = set()


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_no_class_name_is_used_twice() -> None:
    found = defaultdict(set)
    for file in MODULES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(name(file))
    several = {item: sorted(files) for item, files in found.items() if len(files) > 1}
    assert not several, "give one of them another name"


def test_no_module_is_long() -> None:
    long = {name(file) for file in MODULES if lines(file) > LONG}
    assert long == LONG_MODULES, "split it, or remove it from LONG_MODULES"


def test_no_folder_has_many_modules() -> None:
    modules = Counter(file.parent for file in MODULES if file.name != "__init__.py")
    assert not {name(folder) for folder, count in modules.items() if count > IN_A_FOLDER}


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
