"""A verifier for tasks with hidden tests, which run in a fresh copy of the workspace."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError
from agentrl.tasks.rewards import NoRewardError, read_rewards, with_outcome
from agentrl.types import Task

TEST_TIMEOUT = 60.0  # seconds, if a task has no `test_timeout`
PATCH = ".agentrl-hidden.patch"
SUMMARY = "short test summary info"
PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S+)", re.MULTILINE)
UNITTEST = re.compile(
    r"^(\w+) \(([\w.<>]+)\)(?:\n.*?)? \.\.\. (?:.*\n)*?(ok|FAIL|ERROR|skipped|expected failure)\b",
    re.MULTILINE,
)


class TestsError(AgentRLError):
    """The hidden tests cannot judge the agent's work."""


async def run_tests(task: Task, workspace: Any) -> float | dict[str, float]:
    """1 if the hidden tests pass, else 0, or the rewards that they write.

    Keys of the task: `tests` (name -> text) and `test_patch` are added to a copy of the agent's
    workspace; `test_command` (default: unittest on `tests`) runs there in the agent's sandbox, for
    at most `test_timeout` seconds; `must_pass` names the tests that count (default: all); with
    `reward_file`, the command writes the reward itself, or several to the file of this name that
    ends in .json. Raises TestsError if the tests time out, change during their run, or do not
    exist, or if the task is `unfit` to be run in a workspace."""
    if unfit := task.get("unfit"):
        raise TestsError(str(unfit))
    tests = dict(task.get("tests", {}))
    patch = {PATCH: task["test_patch"]} if "test_patch" in task else {}
    copy = await workspace.fresh({**tests, **patch})
    if patch:
        applied = await copy.run(["git", "apply", "--whitespace=nowarn", PATCH])
        if applied.status:
            return 0.0  # the agent changed lines around the patch
    modules = [name.removesuffix(".py").replace("/", ".") for name in tests if name.endswith(".py")]
    command = task.get("test_command") or ["python3", "-m", "unittest", "-v", *modules]
    timeout = float(task.get("test_timeout", TEST_TIMEOUT))
    try:
        done = await copy.run(command, timeout=timeout, env={"PYTHONDONTWRITEBYTECODE": "1"})
    except TimeoutError:
        raise TestsError(f"the hidden tests ran longer than {timeout:g} s") from None
    for name, text in tests.items():
        file = copy.path / name
        if file.is_symlink() or not file.is_file() or file.read_text(encoding="utf-8") != text:
            raise TestsError(f"the hidden test {name} was changed or deleted while it ran")
    if "reward_file" in task:
        return _written(copy.path / task["reward_file"])
    passed = parse_results(f"{done.stdout}\n{done.stderr}")
    if must := task.get("must_pass"):
        return float(all(passed.get(name, False) for name in must))
    if not passed and not done.status:
        raise TestsError("the hidden tests ended without a test")
    return float(bool(passed) and all(passed.values()) and not done.status)


def parse_results(text: str) -> dict[str, bool]:
    """Test -> whether it passed, from `pytest -rA` or `unittest -v`, without skipped tests."""
    if SUMMARY in text:
        rows = [(name, said) for said, name in PYTEST.findall(text.rpartition(SUMMARY)[2])]
    else:
        rows = [(where, said) for _, where, said in UNITTEST.findall(text)]
    good, skipped = ("PASSED", "XFAIL", "ok", "expected failure"), ("SKIPPED", "skipped")
    return {name: said in good for name, said in rows if said not in skipped}


def _written(file: Path) -> dict[str, float]:
    found = {}
    for one in (file, file.with_suffix(".json")):
        with contextlib.suppress(OSError):
            found[f"reward{one.suffix}"] = one.read_text(encoding="utf-8", errors="replace")
    try:
        return with_outcome(read_rewards(found))
    except NoRewardError as error:
        raise TestsError(f"the hidden tests wrote {error}") from None
