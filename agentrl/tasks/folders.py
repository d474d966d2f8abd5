"""Load tasks in the formats of other projects from local files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.tasks.harbor_format import HarborTask, UnfitTask, read_task, task_folders
from agentrl.types import Json

NOT_FILES = ("Dockerfile", ".dockerignore")
# What a Dockerfile may say if the files beside it are all that the task needs.
HARMLESS = ("FROM", "WORKDIR", "COPY", "LABEL", "CMD", "ENTRYPOINT", "MAINTAINER", "EXPOSE")
LOGS = re.compile(r"/logs/verifier\b")
TESTS = re.compile(r"(?<![\w./}])/tests\b")
USUAL = r"tests\b|logs/verifier\b|dev/|bin/|usr/bin/"
ABSOLUTE = re.compile(rf"(?<![\w./}})>*?-])/(?!{USUAL})[A-Za-z_]\w*")
INSTALLS = re.compile(r"\b(apt-get|apt|apk|yum|dnf|pip3?|uvx?|npm|npx|curl|wget)\b")


def harbor(folder: str) -> list[dict[str, Json]]:
    """The Harbor tasks in a folder, to be run without containers: the files of the environment
    become the workspace, and paths /tests and /logs/verifier become relative. A task that needs
    more, such as what its Dockerfile installs, has the reason as `unfit`, and its rollouts fail
    with it. Raises ConfigError if there is no task, or one is not written correctly."""
    return [_harbor(path, id) for id, path in task_folders(Path(folder)).items()]


def _harbor(folder: Path, id: str) -> dict[str, Json]:
    try:
        task = read_task(folder, id)
        (step,) = task.steps if len(task.steps) == 1 else (None,)
        if step is None or step.name or step.judge:
            raise UnfitTask(f"the Harbor task {id!r} has several steps, or a verifier's container")
        files, tests = _texts(folder / "environment", id), _texts(folder / "tests", id)
        for why in _needs_container(files.get("Dockerfile", ""), task, tests):
            raise UnfitTask(f"the Harbor task {id!r} {why}")
    except UnfitTask as error:
        message = f"{error}; use environment = 'harbor:FOLDER', which runs it in its container"
        return {"id": id, "input": "", "files": {}, "unfit": message}
    moved = {k: LOGS.sub(".logs/verifier", TESTS.sub("tests", v)) for k, v in tests.items()}
    return {
        "id": id,
        "input": step.instruction,
        "files": {name: text for name, text in files.items() if name not in NOT_FILES},
        "tests": {f"tests/{k}": v for k, v in moved.items()} | {".logs/verifier/.keep": ""},
        "test_command": ["bash", "tests/test.sh"],
        "test_timeout": step.verifier.timeout_sec,
        "reward_file": ".logs/verifier/reward.txt",
    }


def _needs_container(dockerfile: str, task: HarborTask, tests: Mapping[str, str]) -> Iterator[str]:
    """Why its workspace would not be what its container is; each continues "the task ..."."""
    if task.image.name or task.about.environment.env or task.steps[0].verifier.env:
        yield "names an image or variables of its container"
    words = (line.split(maxsplit=1)[0].upper() for line in _lines(dockerfile))
    if used := next((word for word in words if word not in HARMLESS), ""):
        yield f"has {used} in its Dockerfile, which nothing runs without a container"
    for name, text in tests.items():
        code = "\n".join(_lines(text))
        if found := INSTALLS.search(code) or ABSOLUTE.search(code):
            yield f"uses {found[0]} in tests/{name}, which would be that of this machine"


def _lines(text: str) -> list[str]:
    """The lines with more than a comment, those that go on in the next one as one."""
    joined = re.sub(r"\\\n", " ", text).splitlines()
    return [line for line in joined if line.strip() and not line.lstrip().startswith("#")]


def _texts(folder: Path, id: str) -> dict[str, str]:
    found = {}
    for file in (one for one in sorted(folder.rglob("*")) if one.is_file()):
        try:
            found[file.relative_to(folder).as_posix()] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UnfitTask(f"the Harbor task {id!r} has a file that is no text: {file}") from None
    return found


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
