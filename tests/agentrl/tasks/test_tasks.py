"""Tasks with hidden tests, from their making to their reward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.types import ErrorKind
from agentrl.tasks import bugs, harbor, run_tests, swe
from agentrl.tasks.rewards import parse_results

ECHO = "call('x')"
FIX = """
call("x")
import importlib, inspect
from pathlib import Path
(file,) = Path().glob("*.py")
module = file.stem.rpartition("_")[0]
file.write_text(inspect.getsource(importlib.import_module(module)))
"""
HIDDEN = """import unittest, calc

class Hidden(unittest.TestCase):
    def test_it(self):
        {}
"""


def hidden(body: str, **more: Any) -> dict[str, Any]:
    files = {"calc.py": "def add(a, b):\n    return a - b\n"}
    tests = {"test_hidden.py": HIDDEN.format(body)}
    return {"files": files, "tests": tests, **more}


def test_a_bug_is_one_place_of_one_function() -> None:
    import shlex

    tasks = bugs("shlex:quote", [("a b",), ("",), ("plain",)])
    assert len(tasks) == len({json.dumps(task["files"]) for task in tasks}) >= 3
    assert tasks == bugs("shlex:quote", [("a b",), ("",), ("plain",)])
    original = Path(shlex.__file__).read_text()
    for task in tasks:
        text = task["files"]["shlex_quote.py"]
        assert text.split("def quote")[0] == original.split("def quote")[0]
        assert "quote" in task["input"]
        assert "test" not in str(task["files"].keys())


@pytest.mark.parametrize("path", ["nowhere:f", "shlex:nothing", "math:sqrt", "shlex"])
def test_what_cannot_be_mutated_is_said(path: str) -> None:
    with pytest.raises(ConfigError, match="not a function with a Python source"):
        bugs(path, [()])


async def test_bugs_are_rewarded_when_they_are_fixed(play: Any) -> None:
    tasks = bugs("string:capwords", [("a b",), (" x  y",), ("a-b", "-")])[:1]
    (fixed,) = await play(FIX, *tasks, verifier=run_tests)
    (left,) = await play(ECHO, *tasks, verifier=run_tests)
    assert (fixed.failure, fixed.reward()) == (None, 1.0)
    assert (left.failure, left.reward()) == (None, 0.0)


GONE = "import os; os.unlink(__file__); self.assertTrue(calc)"


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (hidden("import time; time.sleep(60)", test_timeout=1.0), "ran longer than 1 s"),
        (hidden(GONE), "test_hidden.py was changed or deleted while it ran"),
        (hidden("pass", test_command=["true"]), "ended without having run a test"),
        (hidden("pass", test_command=["true"], reward_file="reward"), "wrote no reward"),
    ],
)
async def test_hidden_tests_that_say_nothing_fail_the_rollout(
    play: Any, task: dict[str, Any], says: str
) -> None:
    (rollout,) = await play(ECHO, task, verifier=run_tests)
    assert rollout.failure.kind is ErrorKind.VERIFIER
    assert says in rollout.failure.message
    assert rollout.rewards == []


@pytest.mark.parametrize(
    ("body", "agent", "reward"),
    [
        ("self.assertEqual(calc.add(2, 2), 0)", ECHO, 1.0),
        ("self.assertEqual(calc.add(2, 2), 4)", ECHO, 0.0),
        ("pass", "call('x'); open('calc.py', 'w').write('(')", 0.0),
        ("pass", "call('x'); open('calc.py', 'w').write('import os; os._exit(1)')", 0.0),
        ("self.fail()", "call('x'); open('test_hidden.py', 'w').write('# none')", 0.0),
    ],
)
async def test_what_hidden_tests_say(play: Any, body: str, agent: str, reward: float) -> None:
    (rollout,) = await play(agent, hidden(body), verifier=run_tests)
    assert rollout.failure is None
    assert rollout.reward() == reward


def test_results_are_read() -> None:
    text = "PASSED fake.py::test\n=== short test summary info ===\nPASSED a.py::test_x\n"
    text += "FAILED a.py::test_y[1] - assert 1\nSKIPPED [1] a.py:3: no\n"
    assert parse_results(text) == {"a.py::test_x": True, "a.py::test_y[1]": False}
    text = "test_a (m.C.test_a) ... ok\ntest_b (m.C.test_b)\nIt works. ... printed\nok\n"
    text += "test_c (m.C.test_c) ... FAIL\ntest_d (m.C.test_d) ... skipped 'no'\n"
    assert parse_results(text) == {"m.C.test_a": True, "m.C.test_b": True, "m.C.test_c": False}


async def test_harbor_folders(play: Any, tmp_path: Path) -> None:
    folder = tmp_path / "harbor" / "hello"
    for name, text in {
        "task.toml": "[verifier]\ntimeout_sec = 20.0\n",
        "instruction.md": "Write hello to hello.txt.",
        "environment/Dockerfile": "FROM scratch\n",
        "environment/given.txt": "x",
        "tests/test.sh": "if grep -q hello hello.txt; then echo 1; else echo 0; fi"
        " > /logs/verifier/reward.txt\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (task,) = harbor(str(tmp_path / "harbor"))
    assert (task["input"], list(task["files"])) == ("Write hello to hello.txt.", ["given.txt"])
    (good,) = await play(
        "call('x'); open('hello.txt', 'w').write('hello')", task, verifier=run_tests
    )
    (bad,) = await play(ECHO, task, verifier=run_tests)
    assert (good.reward(), bad.reward()) == (1.0, 0.0)
    with pytest.raises(ConfigError, match="no Harbor task"):
        harbor(str(tmp_path / "nothing"))


async def test_swe_instances(play: Any, tmp_path: Path) -> None:
    repository = tmp_path / "repos" / "owner__calc"
    repository.mkdir(parents=True)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(repository)]
    (repository / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
        subprocess.run([*git, *command], check=True)  # noqa: ASYNC221
    lines = ["import calc", "def test_add():", "    assert calc.add(2, 2) == 4"]
    patch = "diff --git a/test_calc.py b/test_calc.py\nnew file mode 100644\n--- /dev/null\n"
    patch += "+++ b/test_calc.py\n@@ -0,0 +1,3 @@\n" + "".join(f"+{line}\n" for line in lines)
    row = {
        "instance_id": "calc-1", "repo": "owner/calc", "base_commit": "HEAD", "test_patch": patch,
        "problem_statement": "add subtracts", "FAIL_TO_PASS": '["test_calc.py::test_add"]',
        "PASS_TO_PASS": [],
    }  # fmt: skip
    (tmp_path / "swe.jsonl").write_text(json.dumps(row) + "\n")
    (task,) = swe(str(tmp_path / "swe.jsonl"), str(tmp_path / "repos"), python=sys.executable)
    fix = "call('x'); open('calc.py', 'w').write('def add(a, b):\\n    return a + b\\n')"
    (good,) = await play(fix, task, verifier=run_tests)
    (bad,) = await play(ECHO, task, verifier=run_tests)
    assert (good.failure, good.reward(), bad.reward()) == (None, 1.0, 0.0)


def test_tasks_of_any_text_are_read(tmp_path: Path) -> None:
    row = {"instance_id": "1", "repo": "a/b", "base_commit": "HEAD", "test_patch": ""}
    row["problem_statement"] = "one\u2028two"
    (tmp_path / "swe.jsonl").write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert [task["input"] for task in swe(str(tmp_path / "swe.jsonl"), "repos")] == ["one\u2028two"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that can be imported."""
    folder = tmp_path / f"own_{tmp_path.name}"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (folder / "__init__.py").touch()
    return folder


def test_a_module_of_a_package_can_be_tested(package: Path) -> None:
    # A form feed ends a line for str.splitlines, and none for Python.
    text = "A = 1\n\x0c\ndef add(a, b):\n    return a + b\n"
    (package / "calc.py").write_text(text)
    (task,) = bugs(f"{package.name}.calc:add", [(1, 2)])
    ((file, source),), ((test, hidden),) = (dict(task[key]).items() for key in ("files", "tests"))
    folder = package.parent / "workspace"
    folder.mkdir()
    for name, said, passes in ((file, source, False), (file, text, True)):
        (folder / name).write_text(said)
        (folder / test).write_text(hidden)
        ran = [sys.executable, "-B", "-m", "unittest", test]  # both texts are of one length
        done = subprocess.run(ran, cwd=folder, check=False)
        assert (done.returncode == 0) is passes
    assert source == text.replace("a + b", "a - b")


def test_a_module_that_needs_its_package_is_said(package: Path) -> None:
    (package / "calc.py").write_text("from . import __name__\ndef add(a, b):\n    return a + b\n")
    with pytest.raises(
        ConfigError, match="does not run by itself: ImportError: attempted relative"
    ):
        bugs(f"{package.name}.calc:add", [(1, 2)])
