"""Comparisons for verifiers that are often written incorrectly; each documents what it accepts and
rejects.

    from agentrl import verify

    def score(task, result):
        return float(verify.number(verify.final(result), task["answer"]))

They compare the whole answer, reject answers with two candidates or a negation, and return a bool.
No text of a model makes them raise, and only `latex` needs another package.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl.core.values import marked_answer

NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?"
DENIAL = re.compile(
    r"\b(?:not|no|nor|never|neither|cannot|isnt|wrong|false|incorrect|except|anything but)\b"
    r"|n['\u2019]t\b",
    re.IGNORECASE,
)
MAX_ANSWER_CHARS = 100_000  # characters of an answer that are read
MAX_OUTPUT_BYTES = 2**20  # bytes that a program may print


def final(result: object) -> str:
    """The marked answer in a text: in <answer> tags, \\boxed{}, after "####" or "Answer:"; the
    whole text if none is marked; empty if two different answers are marked, so giving both earns
    nothing.

    >>> final("6 + 10 = 16, so <answer>16</answer>"), final("Answer: **16**"), final(" 16 ")
    ('16', '16', '16')
    >>> final("<answer>15</answer> or <answer>16</answer>")
    ''
    """
    return marked_answer(str(result)[-MAX_ANSWER_CHARS:])


def number(
    result: object, answer: float | str, *, tolerance: float = 0.0, units: Sequence[str] = ()
) -> bool:
    """Whether the answer is this number, with separators of thousands, a dollar sign and one of
    `units`. tolerance: largest difference, as a share of the right number; 0: equal.

    >>> number("1,225", 1225), number("$16.00.", 16), number("2.5 km", 2.5, units=["km", "m"])
    (True, True, True)
    >>> number("0.333", 1 / 3, tolerance=0.01), number("1.225", 1225), number("16 17", 16)
    (True, False, False)
    >>> number("nan", 16), number("not 16", 16), number("2.5 mi", 2.5, units=["km"])
    (False, False, False)
    """
    unit = "|".join(map(re.escape, sorted(units, key=len, reverse=True)))
    form = rf"\$?\s*({NUMBER})\s*(?:{unit})?\s*\.?" if units else rf"\$?\s*({NUMBER})\s*\.?"
    said = re.fullmatch(form, _plain(result))
    return said is not None and _equal(said[1], answer, tolerance)


def number_in_text(result: object, answer: float | str, *, given: str = "") -> bool:
    """Whether the last number of a text is this number, all other numbers occur in the question
    `given`, and no sentence with the number contains a negation.

    >>> number_in_text("12 + 4 = 16.", 16, given="What is 12 plus 4?")
    True
    >>> number_in_text("15 16", 16), number_in_text("It is not 16.", 16), number_in_text("6", 16)
    (False, False, False)
    """
    text = str(result)[:MAX_ANSWER_CHARS]
    *others, last = re.findall(NUMBER, text) or [""]
    known = {_size(one) for one in re.findall(NUMBER, given)}
    if not (last and _equal(last, answer, 0.0)):
        return False
    if any(_size(one) not in known for one in others):  # several guesses, even if equal
        return False
    sentences = re.split(r"[.!?](?:\s|$)|\n", text)
    return not any(last in one and DENIAL.search(one) for one in sentences)


def text(result: object, answer: str) -> bool:
    """Whether the answer is this text, ignoring case, spaces, quotation marks and a final full
    stop.

    >>> text(" paris. ", "Paris"), text('"New  York"', "New York"), text("not Paris", "Paris")
    (True, True, False)
    """
    return _words(result) == _words(answer)


def choice(result: object, answer: str, options: Iterable[str] = "ABCDE") -> bool:
    """Whether the answer chooses this one of several options, alone or in a plain sentence.

    >>> choice("(b)", "B"), choice("The answer is B.", "B"), choice("yes", "yes", ["yes", "no"])
    (True, True, True)
    >>> choice("A or B", "B"), choice("not B", "B"), choice("Because of that", "B")
    (False, False, False)
    """
    some = "|".join(map(re.escape, sorted(options, key=len, reverse=True)))
    form = rf"(?:(?:the )?(?:correct )?(?:answer|option|choice)(?: is|:)? )?\(?({some})[).:]*"
    said = re.fullmatch(form, _plain(result), re.IGNORECASE)
    return said is not None and said[1].casefold() == answer.casefold()


def items(result: object, answer: Sequence[Any]) -> bool:
    """Whether the answer lists these items in this order: as JSON, or separated by commas,
    semicolons or lines. Numbers are equal by value.

    >>> items("[1, 2.0, 3]", [1, 2, 3]), items("Red, blue", ["red", "blue"]), items("", [])
    (True, True, True)
    >>> items("blue, red", ["red", "blue"]), items("red", ["red", "blue"])
    (False, False)
    """
    said = _items(result)
    return len(said) == len(answer) and all(map(_same, said, answer))


def item_set(result: object, answer: Iterable[Any]) -> bool:
    """Whether the answer lists exactly these items, each once, in any order.

    >>> item_set("blue, red", ["red", "blue"]), item_set("{2, 1}", [1, 2])
    (True, True)
    >>> item_set("red, blue, green", ["red", "blue"]), item_set("red, red", ["red", "blue"])
    (False, False)
    """
    left = list(answer)
    for one in _items(result):
        at = next((i for i, other in enumerate(left) if _same(one, other)), None)
        if at is None:
            return False
        del left[at]
    return not left


def json_value(result: object, answer: Any) -> bool:
    """Whether the answer is this JSON, alone, in one code fence or already read: the same names and
    values, 1 and 1.0 equal, true and 1 not.

    >>> json_value('{"a": 1.0}', {"a": 1}), json_value('```json\\n[1]\\n```', [1])
    (True, True)
    >>> json_value("{}", {"a": 1}), json_value('{"a": 1, "b": 2}', {"a": 1})
    (False, False)
    >>> json_value('{"a": 2, "a": 1}', {"a": 1}), json_value("[NaN]", [1]), json_value("1", True)
    (False, False, False)
    """
    try:
        said = _json(result) if isinstance(result, str) else result
    except (ValueError, RecursionError):
        return False
    return _same_json(said, answer)


def latex(result: object, answer: str) -> bool:
    """Whether the marked answer (see `final`) is mathematically equal, by math-verify (`pip install
    math-verify`). Also rejects words, lists, and intervals in place of sets, which math-verify
    would accept, and answers that take longer than a few seconds, such as 9^{9^{9}}. Raises
    ImportError without math-verify."""
    if find_spec("math_verify") is None:
        raise ImportError("verify.latex needs math-verify: pip install math-verify")
    said, right = (_bare_math(one) for one in (final(result), answer))
    is_one = "," in right or "," not in re.sub(r"(?<=\d),(?=\d{3}\b)", "", said)
    words = re.sub(r"\\[a-zA-Z]+", " ", said)
    if not said or len(said) > 2000 or not is_one or re.search(r"[A-Za-z]{3,}", words):
        return False
    if _brackets(said) != _brackets(right):
        return False
    return _mathematics.are_equal(right, said)


COMPARE = """\
import json, resource, signal, sys
import math_verify
answers, sys.stdout = sys.stdout, sys.stderr
answers.write("ready\\n")
answers.flush()
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
for line in sys.stdin:
    signal.alarm(5)
    read = [math_verify.parse(f"${one}$", parsing_timeout=None) for one in json.loads(line)]
    equal = all(read) and math_verify.verify(*read, timeout_seconds=None)
    answers.write(json.dumps(bool(equal)) + "\\n")
    answers.flush()
    signal.alarm(0)
"""


class _Mathematics:
    """A process that compares, because math-verify's time limit does not work in threads. After a
    time-out the process ends, and the next comparison starts a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._parent = 0  # a forked child needs its own process

    def are_equal(self, right: str, said: str) -> bool:
        with self._lock, suppress(BrokenPipeError):
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([right, said]) + "\n")
            process.stdin.flush()
            if answer := process.stdout.readline():
                return answer == "true\n"
            self.close()  # its alarm has ended the process
        return False

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._parent == os.getpid():
            if self._process.poll() is None:
                return self._process
            self.close()
        command = [sys.executable, "-P", "-c", COMPARE]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=nothing, text=True, encoding="utf-8"
        )
        self._parent = os.getpid()
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.close()
            raise ImportError("math-verify cannot be imported: python -c 'import math_verify'")
        return self._process

    def close(self) -> None:
        if self._process is not None and self._parent == os.getpid():
            self._process.kill()
            with suppress(BrokenPipeError):
                self._process.communicate()
        self._process = None


_mathematics = _Mathematics()
atexit.register(_mathematics.close)


async def code(
    result: object,
    function: str,
    cases: Iterable[tuple[Sequence[Any], Any]],
    *,
    workspace: Any = None,
    timeout: float = 10.0,
) -> bool:
    """Whether a Python program defines a function that returns these values: cases of (arguments,
    value), in JSON's types. The program may be in one code fence. It runs in another process, which
    never gets the right values and is killed after `timeout` seconds with all its children: with
    `workspace` in the run's sandbox, else in an empty folder of this machine, without this
    process's environment. A program is rejected if it raises, ends early, or returns an object that
    is equal to everything."""
    rows = [(list(arguments), value) for arguments, value in cases]
    request = json.dumps([function, [arguments for arguments, _ in rows]])
    files = {"answer.py": _program(str(result)), "ask.py": ASK, "request.json": request}
    if workspace is not None:
        copy = await workspace.fresh(files)
        try:
            printed = (await copy.run(["python3", "-I", "ask.py"], timeout=timeout)).stdout
        except TimeoutError:
            return False
    else:
        printed = await _run(files, timeout)
    last = printed.rstrip("\n").rpartition("\n")[2]
    return bool(rows) and json_value(last, [value for _, value in rows])


ASK = """\
import json, runpy, sys
name, cases = json.load(open("request.json"))
found = runpy.run_path("answer.py")[name]
values = [found(*arguments) for arguments in cases]
sys.stdout.write("\\n" + json.dumps(values) + "\\n")
"""


async def _run(files: Mapping[str, str], timeout: float) -> str:
    """The output of a program; empty if it fails."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        _write(Path(folder), files)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "ask.py", cwd=folder, env={"PATH": os.environ.get("PATH", "")},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(timeout):
                printed = await _read(process)
        except TimeoutError:
            return ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return printed.decode("utf-8", "replace") if process.returncode == 0 else ""


async def _read(process: asyncio.subprocess.Process) -> bytes:
    """The output of a process until it ends; empty if it prints too much."""
    assert process.stdout is not None
    printed = b""
    while part := await process.stdout.read(65_536):
        printed = printed + part if len(printed) <= MAX_OUTPUT_BYTES else b""
    await process.wait()
    return printed


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8", errors="replace")


def _program(text: str) -> str:
    fences = re.findall(r"```(?:python|py)?\s*\n(.*?)```", text, re.DOTALL)
    return fences[0] if len(fences) == 1 else text


def _plain(result: object) -> str:
    """One line without markup around it."""
    return re.sub(r"\s+", " ", str(result)[:MAX_ANSWER_CHARS]).strip().strip("*`_").strip()


def _words(value: object) -> str:
    return _plain(value).strip("\"'\u201c\u201d\u2018\u2019").rstrip(".").strip("\"'").casefold()


def _value(text: object) -> Decimal | None:
    """The exact value of a number; None if the text is not a finite number."""
    try:
        found = Decimal(str(text).replace(",", "").strip())
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def _size(text: object) -> Decimal | None:
    """A number without its sign, because the sign in "12-4" may be a minus."""
    found = _value(text)
    return None if found is None else abs(found)


def _equal(said: object, answer: object, tolerance: float) -> bool:
    one, other = _value(said), _value(answer)
    if one is None or other is None:
        return False
    if not tolerance:
        return one == other or (isinstance(answer, float) and float(one) == answer)
    return math.isclose(float(one), float(other), rel_tol=tolerance, abs_tol=1e-12)


def _items(result: object) -> list[Any]:
    written = _plain_lines(result)
    with suppress(ValueError, RecursionError):
        said = _json(written)
        if isinstance(said, list):
            return said
    inner = written.strip().strip("[](){}")
    parts = re.split(r"[,;\n]", inner) if inner.strip() else []
    return [
        re.sub(r"^\s*(?:[-*\u2022]|\d+[.)])\s+", "", one).strip() for one in parts if one.strip()
    ]


def _plain_lines(result: object) -> str:
    return str(result)[:MAX_ANSWER_CHARS].strip().strip("*`_").strip()


def _same(said: Any, right: Any) -> bool:
    if isinstance(said, bool) or isinstance(right, bool):
        return said is right or _words(said) == _words(right)
    if _value(right) is not None:
        return _equal(said, right, 0.0)
    if isinstance(right, list | dict):
        return _same_json(said, right)
    return _words(said) == _words(right)


def _json(text: str) -> Any:
    fences = re.findall(r"```(?:json)?\s*\n(.*?)```", text, re.DOTALL)
    if len(fences) == 1:
        text = fences[0]
    return json.loads(text[:MAX_ANSWER_CHARS], object_pairs_hook=_unique, parse_constant=_refused)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def _refused(name: str) -> Any:
    raise ValueError(name)


def _same_json(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_json(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same_json, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def _bare_math(text: str) -> str:
    found = text.strip().strip("$").strip()
    return found.removeprefix("\\(").removesuffix("\\)").strip().rstrip(".")


def _brackets(text: str) -> tuple[str, str]:
    """The kind of brackets around a whole expression: of a set, an interval or a pair."""
    plain = text.replace("\\left", "").replace("\\right", "").replace("\\{", "{").strip()
    first, last = plain[:1], plain[-1:]
    return (first, last) if first in "([{" and last in ")]}" and "," in plain else ("", "")
