"""Load tasks in the formats of other projects from local files."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.types import Json

NOT_FILES = ("Dockerfile", "docker-compose.yaml")
LOGS = re.compile(r"/logs/verifier\b")
TESTS = re.compile(r"(?<![\w./}])/tests\b")


def harbor(folder: str) -> list[dict[str, Json]]:
    """The Harbor tasks in a folder: `instruction.md`, `task.toml`, `environment/`, `tests/test.sh`.

    The files of the environment become the workspace. No image is built, so this machine must have
    what the Dockerfile installs. Paths /tests and /logs/verifier become relative. Raises
    ConfigError if there is no such task."""
    found = sorted(Path(folder).glob("**/task.toml"))
    if not found:
        raise ConfigError(f"{folder} has no Harbor task: a folder with a task.toml")
    return [_harbor(file.parent) for file in found]


def _harbor(folder: Path) -> dict[str, Json]:
    try:
        about = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        files, tests = _texts(folder / "environment"), _texts(folder / "tests")
        moved = {k: LOGS.sub(".logs/verifier", TESTS.sub("tests", v)) for k, v in tests.items()}
        tests = {f"tests/{name}": text for name, text in moved.items()}
        return {
            "id": folder.name,
            "input": (folder / "instruction.md").read_text(encoding="utf-8"),
            "files": {name: text for name, text in files.items() if name not in NOT_FILES},
            "tests": tests | {".logs/verifier/.keep": ""},
            "test_command": ["bash", "tests/test.sh"],
            "test_timeout": float(about.get("verifier", {}).get("timeout_sec", 60.0)),
            "reward_file": ".logs/verifier/reward.txt",
        }
    except (OSError, ValueError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{folder} is no Harbor task: {error}") from None


def _texts(folder: Path) -> dict[str, str]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in files}


def swe(file: str, repositories: str, *, python: str = "python3") -> list[dict[str, Json]]:
    """The tasks of a JSONL file with the fields of SWE-bench (`instance_id`, `repo`, `base_commit`,
    `problem_statement`, `test_patch`, `FAIL_TO_PASS`, `PASS_TO_PASS`). Their repositories are in
    `repositories`/OWNER__NAME on this machine; `python` runs pytest and has their dependencies."""
    lines = Path(file).read_bytes().splitlines()  # str.splitlines would also split at U+2028
    try:
        return [_swe(json.loads(line), repositories, python) for line in lines if line.strip()]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{file} is not a file of SWE-style tasks: {error!r}") from None


def _swe(row: dict[str, Any], repositories: str, python: str) -> dict[str, Json]:
    must = [name for key in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in _listed(row.get(key))]
    files = sorted(set(re.findall(r"^\+\+\+ b/(\S+\.py)$", row["test_patch"], re.MULTILINE)))
    folder = Path(repositories, row["repo"].replace("/", "__"))
    return {
        "id": row["instance_id"],
        "input": row["problem_statement"],
        "files": f"git:{folder}@{row['base_commit']}",
        "test_patch": row["test_patch"],
        "test_command": [python, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *files],
        "must_pass": must,
    }


def _listed(value: str | list[str] | None) -> list[str]:
    """A list, which some files encode as a JSON string."""
    return json.loads(value) if isinstance(value, str) else value or []
