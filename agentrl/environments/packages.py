"""Packages of environments: `agentrl env install`, `show` and `check`.

`install` makes an interpreter for a plug-in, with all that it needs; `show` prints tasks and plays
a rollout in the terminal; `check` tests whether a run can rely on an environment.
"""

from __future__ import annotations

import ast
import asyncio
import math
import os
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import unquote, urlsplit

import click
import msgspec

from agentrl.core import processes
from agentrl.core.config.derived import SPLITS, EnvironmentName
from agentrl.core.errors import AgentRLError, ConfigError, nearest
from agentrl.core.types import Json
from agentrl.environments import hosted
from agentrl.environments.hosted import Message, Reply, Request, check_unique, load_class
from agentrl.environments.plugins.verdicts import question_in
from agentrl.environments.runner import Played, stage
from agentrl.environments.toolbox import NUMBER

APART = "--no-deps "  # prefix of requirements that are installed without their dependencies
CPU = "https://download.pytorch.org/whl/cpu"  # package index of torch without CUDA, 3 GB smaller


def install(plugin: str, into: Path | None, python: str, say: Callable[[str], None]) -> Path:
    """Make or repair the plug-in's interpreter, and return its folder. Raises ConfigError."""
    named = EnvironmentName.read(f"{plugin}:", {})
    folder, requires = into or Path(named.folder), load_class(named).requires
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise ConfigError(f"{folder} exists and is not a virtual environment; give another --into")
    if not (folder / "bin/python").exists():
        say(f"making {folder}")
        _run([python, "-m", "venv", str(folder)], f"{folder} cannot be made with {python}")
    plain = [line for line in requires if not line.startswith(APART)]
    apart = [line.removeprefix(APART) for line in requires if line.startswith(APART)]
    agentrl_requirement = own_requirement()
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    bound = torch_first(pip, plain, say) if plain else []
    say(f"installing {', '.join([*agentrl_requirement[-1:], *plain])}")
    _run([*pip, *bound, *agentrl_requirement, *plain], f"what {plugin} needs cannot be installed")
    if apart:
        say(f"installing {', '.join(apart)} without what they require")
        _run([*pip, "--no-deps", *apart], f"what {plugin} needs cannot be installed")
    code = "import agentrl.environments.helper"
    _run([str(folder / "bin/python"), "-P", "-c", code], f"agentrl does not work in {folder}")
    return folder


def own_requirement() -> list[str]:
    """Arguments of pip to install agentrl from the same checkout, file or version as here."""
    installed = distribution("agentrl")
    origin: dict[str, Any] = msgspec.json.decode(installed.read_text("direct_url.json") or "{}")
    url = urlsplit(origin.get("url", ""))
    if url.scheme != "file":
        return [f"agentrl=={installed.version}"] if not origin else [f"agentrl @ {origin['url']}"]
    path = unquote(url.path)
    if not Path(path).exists():
        raise ConfigError(f"agentrl was installed from {path}, which is gone; install it again")
    return ["-e", path] if origin.get("dir_info", {}).get("editable") else [path]


def torch_first(pip: Sequence[str], wanted: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Install torch without CUDA if something requires it; return arguments that keep it."""
    command = [*pip, "--dry-run", "--ignore-installed", "--report", "-", *wanted]
    report = _run(command, "what the plug-in needs cannot be resolved")
    try:
        planned = msgspec.json.decode(report)["install"]
        names = {package["metadata"]["name"].lower() for package in planned}
    except (msgspec.DecodeError, LookupError, TypeError):
        raise ConfigError("pip gave no report of what it would install; update it") from None
    if "torch" not in names:
        return []
    pin = f"torch=={torch_version()}" if torch_version() else "torch"
    say(f"installing {pin} without CUDA")
    # A user who has set another index decides where torch comes from.
    pip_config = _run([*pip[:3], "config", "list"], "pip has no configuration")
    index = (
        {}
        if "index-url" in pip_config + " ".join(os.environ).lower().replace("_", "-")
        else {"PIP_EXTRA_INDEX_URL": CPU}
    )
    _run([*pip, pin], f"{pin} cannot be installed", **index)
    return [pin]


def torch_version() -> str:
    """The version of torch here, without its build; empty if there is none."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return ""


def _run(command: Sequence[str], problem: str, **variables: str) -> str:
    """Return the output of a program. Raises ConfigError with the last line of its errors."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | variables, check=False
        )
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["?"]
        raise ConfigError(f"{problem}: {errors[-1].removeprefix('ERROR: ')}")
    return done.stdout


SHOWN = 5  # tasks
MAX_INPUT_CHARS = 300  # characters of an input
BY_HAND = 24 * 3600.0  # seconds of a rollout


def print_tasks(named: EnvironmentName, id: str | None) -> dict[str, Json]:
    """Print the environment's tasks; return the task to play. Raises ConfigError."""
    about = hosted.describe(named)
    where = f"in processes of {named.python}" if named.python else "in this interpreter"
    roles = f", asks {', '.join(about.roles)}" if about.roles else ""
    click.echo(f"{named.name}: {about.kind}{roles}, {where}")
    rows = {name: hosted.tasks(named, name) for name in ("train", "heldout")}
    click.echo(", ".join(f"{len(split_rows)} tasks of {name}" for name, split_rows in rows.items()))
    both = [*rows["train"], *rows["heldout"]]
    for row in both[:SHOWN]:
        click.echo(f"  {row['id']}  {_short(row['input'])}")
    matching = [row for row in both if id in (None, row["id"])]
    if not matching:
        hint = nearest(str(id), (str(row["id"]) for row in both[:100]))
        raise ConfigError(f"{named.name} has no task {id!r}; {hint}")
    return matching[0]


async def play_by_hand(named: EnvironmentName, task: dict[str, Json]) -> None:
    """Play a task with replies from the terminal. Raises click.Abort at the end of the input."""
    left = asyncio.Event()
    async with stage(named, BY_HAND) as on:
        click.echo(f"\ntask {task['id']}")
        playing = asyncio.create_task(on.play(task, _hand(left)))
        leaving = asyncio.create_task(left.wait())
        await asyncio.wait({playing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if left.is_set():
            playing.cancel()
            raise click.Abort
        _print_ending(playing.result())


def _print_ending(played: Played) -> None:
    """Print how a rollout ended."""
    if played.problem:
        click.echo(f"\nfailed: {played.problem}")
        return
    scores = ", ".join(f"{name} {value:g}" for name, value in played.rewards.items())
    steps = f"; rewards of steps: {', '.join(f'{value:g}' for value in played.steps)}"
    click.echo(
        f"\n{scores or 'no reward'} after {len(played.calls)} calls" + steps * bool(played.steps)
    )


def _hand(left: asyncio.Event) -> Reply:
    """Print the messages since the role's last answer and read a reply from the terminal. Sets
    `left` at the end of the input."""
    seen: dict[str, int] = {}
    turn = asyncio.Lock()

    async def reply(role: str, messages: list[Message], tools: list[Any]) -> Message:
        async with turn:
            shown_count = seen.get(role, 0)
            for message in messages[shown_count if shown_count < len(messages) else 0 :]:
                if message.get("role") != "assistant" or not shown_count:
                    click.echo(f"\n{message.get('role')}: {_text(message)}")
            if tools and not shown_count:
                names = (tool.get("function", tool).get("name") for tool in tools)
                click.echo(f"tools: {', '.join(map(str, names))}  (/call NAME {{...}})")
            seen[role] = len(messages)
            ask = partial(
                click.prompt, f"{role}>", default="", show_default=False, prompt_suffix=" "
            )
            while True:
                try:
                    line = await processes.call(ask)
                except click.Abort:
                    left.set()
                    await asyncio.Event().wait()  # until the rollout is cancelled
                try:
                    return message_of(line)
                except ValueError as error:
                    click.echo(f"{error}")

    return reply


def message_of(line: str) -> Message:
    """The assistant's message that a line means. Raises ValueError with a sentence."""
    if line.startswith("/call "):
        name, _, arguments = line.removeprefix("/call ").strip().partition(" ")
        arguments = arguments.strip() or "{}"
        _object(arguments)
        function = {"name": name, "arguments": arguments}
        call = {"id": "call_by_hand", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if line.startswith('{"role"'):
        return _object(line)
    return {"role": "assistant", "content": line}


def _object(text: str) -> dict[str, Json]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{text} is not a JSON object: {error}") from None


def _text(message: Message) -> str:
    calls = message.get("tool_calls")
    content = message.get("content")
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return f"{text} {msgspec.json.encode(calls).decode()}" if calls else text


def _short(value: Json) -> str:
    text = " ".join(
        (value if isinstance(value, str) else msgspec.json.encode(value).decode()).split()
    )
    return text if len(text) <= MAX_INPUT_CHARS else f"{text[:MAX_INPUT_CHARS]} ..."


IGNORANT = "I do not know."
TIMEOUT = 120.0  # seconds of a rollout
Say = Callable[[str], None]
Rows = dict[str, list[dict[str, Json]]]


class CheckReport(msgspec.Struct):
    """The result of the checks."""

    environment: str
    ok: bool = True
    tasks: dict[str, int] = {}
    ground_truth: float | None = None  # mean outcome of the plug-in's solutions; None: unknown
    solved: int = 0  # tasks whose solution was played
    rollouts_per_s: float | None = None  # sequential rollouts per second
    lines: list[str] = []


async def examine(named: EnvironmentName, count: int, say: Say) -> CheckReport:
    """Check an environment; `say` gets each finding as soon as it is known."""
    report = CheckReport(named.name)

    def add_line(status: str, sentence: str) -> None:
        report.ok = report.ok and status != "fail"
        report.lines.append(f"{status:<5}{sentence}")
        say(report.lines[-1])

    try:
        about = hosted.describe(named)
        roles = f", and asks {', '.join(about.roles)}" if about.roles else ""
        where = f" in {named.python}" if named.python else ""
        add_line("ok", f"it can be made{where}: it has {about.kind}{roles}")
        rows = {split: hosted.every_task(named, split) for split in SPLITS}
        report.tasks = {split: len(split_rows) for split, split_rows in rows.items()}
        counts = " and ".join(f"{len(split_rows)} of {split}" for split, split_rows in rows.items())
        add_line("ok", f"{counts} tasks survive JSON")
        for split in [split for split, split_rows in rows.items() if not split_rows]:
            add_line("fail", f"tasks({split!r}) has none; a run needs both splits")
        check_unique(named, rows.values())
        add_line(*_repeated(named, rows))
        if text := hosted.trained_text(named):
            add_line("warn", text)
        for text in contradictions([row for split_rows in rows.values() for row in split_rows]):
            add_line("warn", text)
        await _play(named, rows, count, report, add_line)
    except AgentRLError as error:
        add_line("fail", str(error))
    return report


def _repeated(named: EnvironmentName, rows: Rows) -> tuple[str, str]:
    """Whether another process generates the same tasks."""
    for split, ours in rows.items():
        theirs = hosted.ask(Request("tasks", named, split))
        if theirs != ours:
            pairs = zip(ours, theirs, strict=False)
            changed_id = next((task["id"] for task, again in pairs if task != again), None)
            what = (
                f"task {changed_id!r} is another" if changed_id else f"it has {len(theirs)} tasks"
            )
            return "fail", (
                f"tasks({split!r}) is not the same in another process, where {what}: draw from"
                " random.Random(seed), and sort what comes from a set or folder"
            )
    return "ok", "ids are unique, and another process makes the same tasks"


EXPRESSION = re.compile(r"(?<![\w.^=(-])(?:-?\(\s*)*-?\d[\d.\s()+*/-]*\d(?:\s*\))*(?![\w(^]|\.\d)")
EQUAL = 1e-6  # relative and absolute tolerance
MIN_WRONG = 0.05  # share of answers; a smaller share may be rounding


def contradictions(rows: Sequence[dict[str, Json]]) -> Iterator[str]:
    """A sentence if answers contradict each other, or arithmetic: for questions with one
    expression, some answers equal its value and others do not."""
    by_question: dict[str, set[str]] = defaultdict(set)
    wrong, right = list[str](), 0
    with_answer = (row for row in rows if isinstance(row.get("answer"), str | int | float))
    for row in (row for row in with_answer if isinstance(row["input"], str | list)):
        question, answer = question_in(row["input"]), str(row["answer"]).strip()
        by_question[question].add(answer)
        values = [
            value for text in EXPRESSION.findall(question) if (value := _value(text)) is not None
        ]
        if len(values) == 1 and re.fullmatch(NUMBER, answer):
            agrees = math.isclose(values[0], float(answer), rel_tol=EQUAL, abs_tol=EQUAL)
            right += agrees
            wrong += (
                [] if agrees else [f"{_short(question)!r} is {values[0]:g}, and the key {answer}"]
            )
    several = [question for question, answers in by_question.items() if len(answers) > 1]
    if several:
        yield (
            f"{len(several)} questions have several answers, such as {_short(several[0])!r}:"
            f" {', '.join(sorted(by_question[several[0]])[:3])}"
        )
    if right and len(wrong) > MIN_WRONG * (len(wrong) + right):
        total = len(wrong) + right
        yield f"{len(wrong)} of {total} answers contradict arithmetic, such as {wrong[0]}"


def _value(text: str) -> float | None:
    """The value of an arithmetic expression of two numbers or more; None of any other text."""
    allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
    with suppress(SyntaxError, ZeroDivisionError, OverflowError, ValueError):
        tree = ast.parse(text.strip(), mode="eval")
        nodes = [*ast.walk(tree)]
        plain = all(isinstance(node, allowed) and not isinstance(node, ast.Pow) for node in nodes)
        if plain and any(isinstance(node, ast.BinOp) for node in nodes):
            return float(eval(compile(tree, "question", "eval"), {"__builtins__": {}}))
    return None


async def _play(
    named: EnvironmentName, rows: Rows, count: int, report: CheckReport, add_line: Any
) -> None:
    async with stage(named, TIMEOUT) as on:
        tasks = next(filter(None, rows.values()), [])
        if not tasks:
            return
        played = await on.play(tasks[0], _says([]))
        if played.problem:
            add_line("warn", f"a model that only says {IGNORANT!r} fails: {played.problem}")
        else:
            add_line("ok", f"a model that only says {IGNORANT!r} gets {_scores(played)}")
        outcomes, spent = list[float](), 0.0
        for task in [task for split in rows.values() for task in split[:count]]:
            solution = hosted.solution(named, task["input"])
            if solution is None:
                continue
            script, began = SolutionScript(solution), time.monotonic()
            done = await on.play(task, script.reply)
            spent += time.monotonic() - began
            outcomes.append(_best(done) or 0.0)
            if why := done.problem or script.problem(done) or _unscored(done):
                add_line("fail", f"ground truth of task {task['id']!r}: {why}")
        if not outcomes:
            add_line(
                "warn", "the plug-in has no ground truth (solution); its scoring is not checked"
            )
            return
        report.solved, report.ground_truth = len(outcomes), fmean(outcomes)
        report.rollouts_per_s = len(outcomes) / spent
        baseline = _best(played)
        base = baseline if baseline is not None else float("-inf")
        text = f"ground truth of {len(outcomes)} tasks scores {report.ground_truth:g}"
        if report.ground_truth > base:
            add_line("ok", text)
        else:
            add_line("fail", f"{text}, no more than a model that knows nothing")


def _best(played: Played) -> float | None:
    """The outcome; with several roles the best role's, because not all can win a game."""
    return max(played.by_role.values(), default=played.outcome)


def _unscored(played: Played) -> str:
    return "" if played.outcome is not None else "it has no outcome"


def _scores(played: Played) -> str:
    scores = ", ".join(f"{name} {value:g}" for name, value in played.rewards.items())
    return f"{scores or 'no reward'} after {len(played.calls)} calls"


class SolutionScript:
    """Answers with the replies of a solution; other roles get an empty script."""

    def __init__(self, solution: Iterable[str | Message] | dict[str, Any]) -> None:
        by_role = solution if isinstance(solution, dict) else {"agent": solution}
        self._left = {role: list(replies) for role, replies in by_role.items()}
        self._requested = dict.fromkeys(self._left, 0)
        self._counts = {role: len(replies) for role, replies in self._left.items()}

    async def reply(self, role: str, messages: list[Message], tools: list[Any]) -> Message:
        if role in self._requested:
            self._requested[role] += 1
        replies = self._left.get(role)
        return _message(replies.pop(0) if replies else IGNORANT)

    def problem(self, played: Played) -> str:
        """Why the replies do not match the requests; empty if they do."""
        for role, requested in self._requested.items():
            if requested > (count := self._counts[role]):
                return f"{requested} replies of {role!r} were asked for, and solution has {count}"
        return ""


def _says(replies: list[str | Message]) -> Reply:
    return SolutionScript(replies).reply


def _message(reply: str | Message) -> Message:
    message: Message = {"content": reply} if isinstance(reply, str) else dict(reply)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", **call} if isinstance(call, dict) else call
            for index, call in enumerate(calls)
        ]
    return {"role": "assistant", "content": None, **message}
