"""Which tests are the spine's: they pass without any part, and `make test-spine` runs them so.

They are those of the folders that mirror the library's, and of whole runs (`tests/system`), but for
the folders of parts. A single test there that needs a part has the mark `part`, and imports it
itself: what its file imports is imported without parts too.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
WITHOUT_PARTS = os.environ.get("WITHOUT_PARTS") == "all"
FOLDERS = {"agentrl", "algorithms", "runners", "store", "system"}
# Tests of all presets, which some parts have.
PRESETS = ("credit_page", "families", "gates_symbols", "states_credit")
PARTS = [TESTS / f"algorithms/presets/test_{name}.py" for name in PRESETS] + [
    TESTS / file.parent.relative_to(TESTS.parent)
    for top in FOLDERS - {"system"}
    for file in (TESTS.parent / top).rglob("part.py")
]


@cache
def tests(path: Path) -> bool:
    """Whether the spine's tests are this file, or may be in this folder."""
    if path == TESTS or path in TESTS.parents:
        return True
    top = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    return top in FOLDERS and not any(path.is_relative_to(part) for part in PARTS)


@cache
def needs_none(file: Path) -> bool:
    """Whether no test of this file needs a part; those that do are named by one of these words."""
    if not tests(file) or file.is_relative_to(TESTS / "store"):
        return False
    text = file.read_text(encoding="utf-8")
    return not any(word in text for word in ("mark.part", "of_part", "postgres"))


def of_part(*values: object) -> Any:
    """One of a test's parameters that needs a part."""
    return pytest.param(*values, marks=pytest.mark.part)
