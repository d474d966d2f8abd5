"""The settings that every run file of the examples and every block of settings in the documents
comes to, by `agentrl train --dry-run`: `dryrun.jsonl`.

The case `defaults` has the whole output of a short run file; every other case has its lines that
differ from the defaults, by their keys. Run files are read from a folder without any other file, so
that nothing depends on what the machine has.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.golden import access, files
from tests.golden.normal import normal

BLOCK = re.compile(r"^```toml\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = ("docs/how-to/**/*.md", "docs/concepts/*.md", "docs/migrate/*.md", "docs/*.md", "README.md")
BASE: dict[str, Any] = {
    "name": "golden",
    "agent": {"path": "agent.py:agent"},
    "tasks": {"train": "tasks.jsonl"},
    "verifier": {"path": "verifier.py:verify"},
    "policy": {"model": "model"},
}


def toml(settings: dict[str, Any]) -> str:
    """Settings as a run file: tables are inline, because only their values matter."""

    def inline(value: Any) -> str:
        if isinstance(value, dict):
            pairs = (f"{json.dumps(key)} = {inline(inner)}" for key, inner in value.items())
            return f"{{ {', '.join(pairs)} }}"
        if isinstance(value, list):
            return f"[{', '.join(map(inline, value))}]"
        return json.dumps(value) if isinstance(value, str | bool) else repr(value)

    return "".join(f"{json.dumps(key)} = {inline(value)}\n" for key, value in settings.items())


def whole(block: dict[str, Any]) -> dict[str, Any]:
    """A block of settings with what else a run file needs; runs on data have no agent."""
    played = ("agent", "tasks", "verifier")
    base = {key: x for key, x in BASE.items() if "data" not in block or key not in played}
    return merged(base, block)


def merged(base: dict[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in block.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found


def settings_of(text: str) -> tuple[list[str], dict[str, Any]]:
    """Notes of the output, and its settings by their keys."""
    notes = [line for line in text.splitlines() if line.startswith("#")]
    flat: dict[str, Any] = {}

    def add(values: dict[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and value:
                add(value, f"{prefix}{key}.")
            else:
                flat[prefix + key] = value

    add(tomllib.loads(text), "")
    return notes, flat


def run_files() -> Iterator[tuple[str, str]]:
    """The name and the text of each run file."""
    for path in sorted((access.ROOT / "examples").rglob("*.toml")):
        yield str(path.relative_to(access.ROOT)), path.read_text(encoding="utf-8")
    for pattern in PAGES:
        for path in sorted(access.ROOT.glob(pattern)):
            blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
            for number, block in enumerate(blocks):
                name = f"{path.relative_to(access.ROOT)}:{number}"
                yield name, toml(whole(tomllib.loads(block)))


def printed(name: str, text: str, folder: Path) -> access.Printed:
    own = folder / (name if name.endswith(".toml") else "page/run.toml")
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(text, encoding="utf-8")
    empty = {"HF_HOME": str(folder / "none"), "HF_HUB_OFFLINE": "1"}
    with mock.patch.dict("os.environ", empty):
        found = access.command("train", str(own), "--dry-run", folder=folder)
    shutil.rmtree(own.parent)
    return access.Printed(found.code, normal(found.text, folder))


def cases() -> Iterator[tuple[str, files.Case]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        base = printed("page", toml(BASE), folder)
        yield "defaults", {"exit": base.code, "text": base.text.splitlines()}
        _, defaults = settings_of(base.text)
        for name, text in run_files():
            found = printed(name, text, folder)
            if found.code:
                yield name, {"exit": found.code, "text": found.text.splitlines()}
                continue
            notes, flat = settings_of(found.text)
            changed = {key: x for key, x in flat.items() if defaults.get(key, "none") != x}
            gone = sorted(defaults.keys() - flat.keys())
            yield name, {"exit": 0, "notes": notes, "settings": changed, "without": gone}


if __name__ == "__main__":
    files.main("dryrun", cases)
