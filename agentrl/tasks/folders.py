"""Tasks with files: read from folders in formats of other projects, or generated from bugs.

`bugs` generates repositories with one bug, without a network: a function is mutated in its module,
and only bugs that a hidden test detects become tasks. `train` and `heldout` use the standard
library.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.types import Json
from agentrl.tasks.harbor_format import HarborTask, UnsupportedTask, read_task, task_folders

NOT_FILES = ("Dockerfile", ".dockerignore")
# Instructions of a Dockerfile that allow a task to run with only the files beside it.
HARMLESS = ("FROM", "WORKDIR", "COPY", "LABEL", "CMD", "ENTRYPOINT", "MAINTAINER", "EXPOSE")
LOGS = re.compile(r"/logs/verifier\b")
TESTS = re.compile(r"(?<![\w./}])/tests\b")
USUAL = r"tests\b|logs/verifier\b|dev/|bin/|usr/bin/"
ABSOLUTE = re.compile(rf"(?<![\w./}})>*?-])/(?!{USUAL})[A-Za-z_]\w*")
INSTALLS = re.compile(r"\b(apt-get|apt|apk|yum|dnf|pip3?|uvx?|npm|npx|curl|wget)\b")


def harbor(folder: str) -> list[dict[str, Json]]:
    """The Harbor tasks in a folder, to be run without containers: the files of the environment
    become the workspace, and paths /tests and /logs/verifier become relative. A task that needs
    more, such as packages that its Dockerfile installs, has the reason in `unfit`, and its rollouts
    fail with this message. Raises ConfigError if there is no task, or an invalid one."""
    return [_harbor(path, id) for id, path in task_folders(Path(folder)).items()]


def _harbor(folder: Path, id: str) -> dict[str, Json]:
    try:
        task = read_task(folder, id)
        (step,) = task.steps if len(task.steps) == 1 else (None,)
        if step is None or step.name or step.judge:
            raise UnsupportedTask(
                f"the Harbor task {id!r} has several steps, or a verifier's container"
            )
        files, tests = _texts(folder / "environment", id), _texts(folder / "tests", id)
        for why in _needs_container(files.get("Dockerfile", ""), task, tests):
            raise UnsupportedTask(f"the Harbor task {id!r} {why}")
    except UnsupportedTask as error:
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
    """Reasons why a workspace cannot replace the task's container; each continues "the task
    ..."."""
    if task.image.name or task.about.environment.env or task.steps[0].verifier.env:
        yield "names an image or variables of its container"
    words = (line.split(maxsplit=1)[0].upper() for line in _lines(dockerfile))
    if used := next((word for word in words if word not in HARMLESS), ""):
        yield f"has {used} in its Dockerfile, which nothing runs without a container"
    for name, text in tests.items():
        code = "\n".join(_lines(text))
        if match := INSTALLS.search(code) or ABSOLUTE.search(code):
            yield f"uses {match[0]} in tests/{name}, which would be that of this machine"


def _lines(text: str) -> list[str]:
    """The lines of a Dockerfile without comments, with continued lines joined."""
    joined = re.sub(r"\\\n", " ", text).splitlines()
    return [line for line in joined if line.strip() and not line.lstrip().startswith("#")]


def _texts(folder: Path, id: str) -> dict[str, str]:
    texts = {}
    for file in (path for path in sorted(folder.rglob("*")) if path.is_file()):
        try:
            texts[file.relative_to(folder).as_posix()] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UnsupportedTask(
                f"the Harbor task {id!r} has a file that is not text: {file}"
            ) from None
    return texts


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


CALL_SECONDS = 0.2  # seconds for all cases of one mutant; an endless loop counts as a detected bug
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
}
# Function -> arguments of its hidden calls. No function is in both sets.
TRAIN: dict[str, list[tuple[Any, ...]]] = {
    "colorsys:hls_to_rgb": [(0.6, 0.4, 0.5), (0, 1, 0), (0.1, 0.7, 1), (0.5, 0.5, 0.2)],
    "textwrap:dedent": [(" a\n  b",), ("\ta\n\tb\n",), ("x",), ("  a\n\n  b\n",)],
    "heapq:nsmallest": [(2, [3, 1, 2]), (0, [1]), (5, [2, 1]), (1, [4, 3])],
    "statistics:median": [([1, 3, 2],), ([1, 2, 3, 4],), ([5],)],
    "fnmatch:translate": [("*.py",), ("[!a]?",), ("a[b",), ("[a-c]",)],
    "colorsys:rgb_to_hsv": [(0.2, 0.4, 0.6), (1, 0, 0), (0, 0, 0), (0.5, 0.5, 0.2)],
    "posixpath:commonpath": [(["/a/b/c", "/a/b/d"],), (["a/b"],), (["a", "b"],), (["/", "/x"],)],
}
HELDOUT: dict[str, list[tuple[Any, ...]]] = {
    "shlex:quote": [("a b",), ("",), ("it's",), ("plain",)],
    "string:capwords": [("a b",), (" x  y",), ("a-b", "-")],
    "calendar:monthrange": [(2024, 2), (2023, 12), (1900, 2), (2000, 2)],
}
# Reads a module, variants of a function and its calls as JSON; writes the results of each variant.
CHILD = f"""
import json, resource, signal, sys
def late(*_): raise TimeoutError
def answers(text, name, cases):
    space = dict(whole)
    def call(case):
        try:
            return repr(eval(name, space)(*eval(case)))
        except TimeoutError:
            raise
        except Exception as error:
            return "raises " + type(error).__name__
    signal.setitimer(signal.ITIMER_VIRTUAL, {CALL_SECONDS})  # CPU time, whatever the load
    try:
        exec(text, space)
        return [call(case) for case in cases]
    except TimeoutError:
        return ["does not end"]
    except BaseException as error:
        return ["raises " + type(error).__name__]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
signal.signal(signal.SIGVTALRM, late)
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
asked, whole = json.load(sys.stdin), {{"__name__": "mutant"}}
exec(compile(asked["whole"], "mutant", "exec"), whole)
sys.stdout.write(json.dumps([answers(t, asked["name"], asked["cases"]) for t in asked["texts"]]))
"""
HIDDEN = "test_hidden.py"
TEST = """import unittest

from {module} import {name}

CASES = [
{cases}]


def answer(case):
    try:
        return repr({name}(*case))
    except Exception as error:
        return "raises " + type(error).__name__


class Hidden(unittest.TestCase):
{methods}"""


def train() -> list[dict[str, Json]]:
    return [task for path, cases in TRAIN.items() for task in bugs(path, cases)]


def heldout() -> list[dict[str, Json]]:
    return [task for path, cases in HELDOUT.items() for task in bugs(path, cases)]


def bugs(function: str, cases: Sequence[tuple[Any, ...]]) -> list[dict[str, Json]]:
    """A task for each one-place bug in `function`, "module:name", that changes the result of one of
    the `cases`, tuples of arguments that are Python literals. `files` has the module under another
    name, `tests` the hidden tests. Raises ConfigError for a function without a Python source."""
    module, _, name = function.partition(":")
    try:
        whole = inspect.getsource(importlib.import_module(module))
        mutants = list(_mutants(whole, name))
    except (ImportError, TypeError, OSError) as error:
        raise ConfigError(f"{function!r} is not a function with a Python source: {error}") from None
    request = {"whole": whole, "name": name, "cases": [repr(case) for case in cases]}
    request["texts"] = ["", *(text for text, _ in mutants)]
    done = subprocess.run(
        [sys.executable, "-I", "-c", CHILD],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=60 + 10 * CALL_SECONDS * len(mutants),
        check=False,
    )
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"{function!r}: its module does not run by itself: {why}")
    wanted, *outputs = json.loads(done.stdout)
    file, tasks = f"{module}_{name}".replace(".", "_"), list[dict[str, Json]]()
    methods = "".join(
        f"    def test_{n}(self):\n        self.assertEqual(answer(CASES[{n}]), {answer!r})\n\n"
        for n, answer in enumerate(wanted)
    )
    listed = "".join(f"    {case!r},\n" for case in cases)
    test = TEST.format(module=file, name=name, cases=listed, methods=methods)
    for (_, source), output in zip(mutants, outputs, strict=True):
        if output != wanted:
            pairs = enumerate(zip(wanted, output, strict=False))
            wrong = next((n for n, (right, actual) in pairs if right != actual), 0)
            call = f"{name}({', '.join(map(repr, cases[wrong]))})"
            words = f"{file}.py has one bug, in the function {name}. For example, {call} must give"
            words += f" {wanted[wrong]}. Fix it."
            about: dict[str, Json] = {"id": f"{file}/{len(tasks)}", "input": words}
            tasks.append(about | {"files": {f"{file}.py": source}, "tests": {HIDDEN: test}})
    return tasks


def _mutants(whole: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the function with one change, and its module with this function and all other lines
    unchanged. Raises TypeError if the module has no such function."""
    nodes = [node for node in ast.parse(whole).body if isinstance(node, ast.FunctionDef)]
    function = next((node for node in nodes if node.name == name), None)
    if function is None:
        raise TypeError("its module does not define it")
    lines = list(StringIO(whole))  # lines as `ast` counts them; str.splitlines splits more often
    first = min([function.lineno, *(node.lineno for node in function.decorator_list)]) - 1
    head, tail = lines[:first], lines[function.end_lineno :]
    for node in list(ast.walk(function)):
        before = dict(vars(node))
        if _change(node):
            text = ast.unparse(ast.fix_missing_locations(function)) + "\n"
            vars(node).update(before)
            yield text, "".join([*head, text, *tail])


def _change(node: ast.AST) -> bool:
    """Turn a node into a bug in place; False if its kind has no mutation."""
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        node.ops = [SWAPS[type(node.ops[0])](), *node.ops[1:]]  # type: ignore[list-item]
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        return False
    return True
