"""Which tests are the spine's: they pass without any part, and `make test-spine` runs them so.

They are those of the folders that mirror the library's, and of whole runs (`tests/system`), but for
the folders of parts and files that import a part. A single test there that needs a part has the
mark `part`.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
WITHOUT_PARTS = os.environ.get("WITHOUT_PARTS") == "all"
FOLDERS = {"agentrl", "algorithms", "runners", "store", "system"}
PARTS = [TESTS / "algorithms/zoo"]  # and what is in all of these
PACKAGES = {"tests.algorithms.zoo"}
for top in FOLDERS - {"system"}:
    for file in (TESTS.parent / top).rglob("part.py"):
        folder = file.parent.relative_to(TESTS.parent)
        PARTS.append(TESTS / folder)
        package = ".".join(folder.parts)
        PACKAGES |= {f"agentrl.{package.removeprefix('agentrl.')}", f"tests.{package}"}
IMPORTED = re.compile(r"^(?:from|import) ([\w.]+)(?: import \(?([\w, ]+))?", re.MULTILINE)


@cache
def tests(path: Path) -> bool:
    """Whether the spine's tests are this file, or may be in this folder."""
    if path == TESTS or path in TESTS.parents:
        return True
    top = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    if top not in FOLDERS or any(path.is_relative_to(part) for part in PARTS):
        return False
    return not imports_a_part(path)


@cache
def imports_a_part(file: Path) -> bool:
    """Whether a file imports a part when it is imported, or another test that does."""
    if file.suffix != ".py" or not file.is_file():
        return False
    for module, things in IMPORTED.findall(file.read_text(encoding="utf-8")):
        names = [module, *(f"{module}.{thing.strip()}" for thing in things.split(","))]
        if any(f"{name}.".startswith(f"{part}.") for name in names for part in PACKAGES):
            return True
        other = TESTS.parent.joinpath(*module.split(".")).with_suffix(".py")
        if module.startswith("tests.") and imports_a_part(other):
            return True
    return False


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
