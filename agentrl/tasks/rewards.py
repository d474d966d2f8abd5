"""The verifier of tasks with hidden tests.

The tests run in a fresh copy of the workspace, and may write rewards to files.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from agentrl.core.errors import AgentRLError
from agentrl.core.types import Task
from agentrl.runners.workspace import cleaner

TEST_TIMEOUT = 60.0  # seconds, if a task has no `test_timeout`
PATCH = ".agentrl-hidden.patch"
SUMMARY = "short test summary info"
# Names under which a repository could replace a test runner's modules.
TEST_MODULES = ("unittest", "pytest", "_pytest", "sitecustomize", "usercustomize", "conftest")
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
    exist, or if the task is `unfit` for a workspace."""
    if unfit := task.get("unfit"):
        raise TestsError(str(unfit))
    tests = dict(task.get("tests", {}))
    patch = {PATCH: task["test_patch"]} if "test_patch" in task else {}
    copy = await workspace.fresh({**tests, **patch})
    restore_runners(workspace.template.folder, copy.path, tests)
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
        raise TestsError("the hidden tests ended without having run a test")
    return float(bool(passed) and all(passed.values()) and not done.status)


def restore_runners(template: Path, repository: Path, tests: Container[str]) -> None:
    """Remove files of the agent that would replace a test runner's modules and could let every test
    pass."""
    for name in (f"{module}{end}" for module in TEST_MODULES for end in (".py", "")):
        file, first = repository / name, template / name
        if name in tests or not (file.is_symlink() or file.exists()):
            continue
        cleaner.remove(file) if file.is_dir() and not file.is_symlink() else file.unlink()
        if first.is_file():
            shutil.copyfile(first, file)
        elif first.is_dir():
            shutil.copytree(first, file, symlinks=True)


def parse_results(text: str) -> dict[str, bool]:
    """Test -> whether it passed, from `pytest -rA` or `unittest -v`, without skipped tests."""
    if SUMMARY in text:
        rows = [(name, word) for word, name in PYTEST.findall(text.rpartition(SUMMARY)[2])]
    else:
        rows = [(name, word) for _, name, word in UNITTEST.findall(text)]
    good, skipped = ("PASSED", "XFAIL", "ok", "expected failure"), ("SKIPPED", "skipped")
    return {name: word in good for name, word in rows if word not in skipped}


def _written(file: Path) -> dict[str, float]:
    texts = {}
    for path in (file, file.with_suffix(".json")):
        with contextlib.suppress(OSError):
            texts[f"reward{path.suffix}"] = path.read_text(encoding="utf-8", errors="replace")
    try:
        return with_outcome(read_rewards(texts))
    except NoRewardError as error:
        raise TestsError(f"the hidden tests wrote {error}") from None


REWARD = "reward"  # the name of the outcome in Harbor's files


class NoRewardError(ValueError):
    """The text is not a valid reward. The message continues "the tests wrote ..."."""


def read_rewards(texts: Mapping[str, str]) -> dict[str, float]:
    """The rewards by name, from the contents of `reward.json` (names -> numbers) or else
    `reward.txt` (a number, the reward "reward"). Raises NoRewardError."""
    if "reward.json" in texts:
        return _by_name(texts["reward.json"])
    if "reward.txt" in texts:
        return {REWARD: _number(texts["reward.txt"].strip(), "reward.txt")}
    raise NoRewardError("no reward to reward.json or reward.txt")


def with_outcome(rewards: Mapping[str, float], name: str = REWARD) -> dict[str, float]:
    """Add `outcome`: the reward of this name, or the only one. Raises NoRewardError if that is
    ambiguous."""
    if name not in rewards and len(rewards) > 1:
        raise NoRewardError(
            f"several rewards to reward.json ({', '.join(rewards)}), and none is named {name!r};"
            " name the rollout's by the option `outcome`"
        )
    chosen = name if name in rewards else next(iter(rewards))
    return {"outcome": rewards[chosen]} | {k: v for k, v in rewards.items() if k != chosen}


def _by_name(text: str) -> dict[str, float]:
    try:
        decoded = json.loads(text)
    except ValueError:
        raise NoRewardError(f"no JSON to reward.json: {text.strip()[:80]!r}") from None
    if not isinstance(decoded, dict) or not decoded:
        raise NoRewardError(f"no names with numbers to reward.json: {text.strip()[:80]!r}")
    return {name: _number(value, f"reward.json as {name!r}") for name, value in decoded.items()}


def _number(value: object, where: str) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or (isinstance(value, str) and where != "reward.txt"):
        raise NoRewardError(f"{value!r:.80} to {where}, which is not a finite number")
    return number
