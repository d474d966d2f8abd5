"""Creates environments from references, in the process that fits them, and gets their tasks and
rewards.

A reference (`agentrl.core.config.derived`) stands for an environment's agent, tasks and verifier.
An environment with its own interpreter, or with a process for each rollout, is created in processes
of the pool, which play its rollouts (`runner`), and in a `helper`, which answers everything else;
any other is created in this process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

import agentrl
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import SCHEME, SPLITS, EnvironmentName, policy_by_role
from agentrl.core.errors import ConfigError
from agentrl.core.loading import load_attribute
from agentrl.core.plugins import load_plugin
from agentrl.core.types import Json, Reward, Trace
from agentrl.core.user_code import cause_of, contained, text_of
from agentrl.core.values import NotJsonError, check_json
from agentrl.environments.base import KINDS, Environment
from agentrl.environments.playing import called, endpoint, play_task, scores_of, with_outcome
from agentrl.runners.tracing import attempt_log

MAX_TASKS = 1_000_000  # tasks of a split; all are held in memory


_making = threading.RLock()


def parse(reference: str, root: Path) -> tuple[str, EnvironmentName]:
    """Split a reference into the part (agent, tasks or verifier) and the environment."""
    _, which, name = reference.split(":", 2)
    name, brace, options = name.partition(" {")
    parsed_options = msgspec.json.decode(f"{{{options}", type=dict[str, Any]) if brace else {}
    return which, EnvironmentName.read(name, parsed_options, root.resolve())


def load_reference(reference: str, root: Path, key: str) -> Any:
    """The agent, tasks or verifier that a reference names. Raises ConfigError."""
    which, named = parse(reference, root)
    if which == "agent":
        return lambda: agent(named)  # created by each process itself
    if which == "verifier":
        return verifier(named)
    return tasks(named, which)


def load_class(named: EnvironmentName) -> type[Environment]:
    """The plug-in's class. Raises ConfigError."""
    key, plugin = "environment", named.plugin
    if plugin.partition(":")[0].endswith(".py"):
        class_ = load_attribute(plugin, Path(named.root), key=key)
    else:
        class_ = load_plugin("environments", plugin, (), Path(named.root), key=key)
    if not (isinstance(class_, type) and issubclass(class_, Environment)):
        raise ConfigError(
            f"environment = {named.name!r}: {class_!r:.80} is not a class that inherits from"
            " agentrl.environments.Environment"
        )
    has = [kind for kind in KINDS if callable(getattr(class_, kind, None))]
    if len(has) != 1:
        raise ConfigError(
            f"environment = {named.name!r}: {class_.__name__} has {' and '.join(has) or 'none'} of"
            " run, open and verify; it needs exactly one"
        )
    return class_


def kind_of(class_: type[Environment]) -> str:
    return next(kind for kind in KINDS if hasattr(class_, kind))


@cache
def _made(named: EnvironmentName) -> Environment:
    class_ = load_class(named)
    environment = class_.__new__(class_)
    environment.root = Path(named.root)
    with explained(named, "cannot be made"):
        environment.__init__(named.what, **named.arguments)  # type: ignore[misc]
    return environment


def made(named: EnvironmentName) -> Environment:
    """The instance of this environment in this process. Raises ConfigError."""
    with _making:
        return _made(named)


@contextmanager
def explained(named: EnvironmentName, what: str) -> Iterator[None]:
    """Converts exceptions of a plug-in to a ConfigError with the environment's name and a fix."""
    prefix = f"environment = {named.name!r}"
    try:
        with contained():
            yield
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{prefix}: there is no module {error.name!r} for {sys.executable}; {named.fix_hint}"
        ) from error
    except Exception as error:  # a plug-in may raise anything
        last = traceback.extract_tb(cause_of(error).__traceback__)[-1]
        raise ConfigError(
            f"{prefix} {what}: {text_of(error)} ({last.filename}:{last.lineno})"
        ) from error


def checked_tasks(named: EnvironmentName, split: str) -> list[dict[str, Json]]:
    """The tasks of a split, each with an id and an input that survive JSON. Raises ConfigError."""
    environment = made(named)
    with explained(named, f"raised in tasks({split!r})"):
        rows = list(islice(environment.tasks(split), MAX_TASKS + 1))
    prefix, ids = f"environment = {named.name!r}", set[str]()
    if not rows:
        raise ConfigError(f"{prefix}: tasks({split!r}) has none; set tasks.{split} to others")
    if len(rows) > MAX_TASKS:
        raise ConfigError(f"{prefix}: tasks({split!r}) has more than {MAX_TASKS:,}; let it end")
    for index, row in enumerate(rows):
        where = f"{prefix}: task {index} of {split!r}"
        if not isinstance(row, dict) or not {"id", "input"} <= row.keys():
            raise ConfigError(f"{where} is {row!r:.80}; it needs an 'id' and an 'input'")
        id = row["id"]
        if not (isinstance(id, str) and id) or id in ids:
            why = "is there twice" if isinstance(id, str) and id else "is no text"
            raise ConfigError(f"{where} has the id {id!r:.80}, which {why}")
        ids.add(id)
        try:
            check_json(row)
        except NotJsonError as error:
            raise ConfigError(
                f"{prefix}: {error.at(f'task {id!r}')}: it would change when it is stored, so"
                " keep an index or a seed in it instead"
            ) from None
    return rows


def check_unique(named: EnvironmentName, splits: Iterable[list[dict[str, Json]]]) -> None:
    """Raises ConfigError if two splits have the same id."""
    first, second = ({str(row["id"]) for row in rows} for rows in splits)
    if both := sorted(first & second):
        raise ConfigError(
            f"environment = {named.name!r}: {len(both)} ids, such as {both[0]!r}, are in"
            " 'train' and in 'heldout'; a task is trained on, or held out"
        )


PROGRAM = ("-P", "-m", "agentrl.environments.helper")


MAX_ANSWER_BYTES = 2**28  # bytes


# Hash seed of environments' processes: sampling from a set of strings gives the same result in all
# of them.
SAME = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}


class About(msgspec.Struct, frozen=True):
    """Properties of an environment that the rest of the run needs."""

    kind: str  # run, open or verify
    roles: tuple[str, ...] = ()
    limit: int = 50
    alone: bool = False  # whether a process plays one rollout at a time
    version: str = ""  # version of agentrl in the environment's interpreter


class Request(msgspec.Struct, frozen=True):
    """A request to the helper."""

    do: str  # describe, tasks, verify or solution
    named: EnvironmentName
    given: Json = None
    result: Json = None
    attempt: str = ""  # if a rollout is scored: the attempt whose trace the verifier extends


class HelperAnswer(msgspec.Struct, frozen=True):
    """An answer of the helper. `problem`: a sentence for the user."""

    value: Any = None
    problem: str = ""


def is_hosted(named: EnvironmentName) -> bool:
    """Whether the environment runs in separate processes. Raises ConfigError."""
    return bool(named.python) or load_class(named).isolation == "process"


@cache
def describe(named: EnvironmentName) -> About:
    """The properties of an environment. Raises ConfigError if it cannot be made."""
    if not is_hosted(named):
        return about(named)
    description = msgspec.convert(ask(Request("describe", named)), About)
    if description.version != agentrl.__version__:
        raise ConfigError(
            f"environment = {named.name!r}: {named.python} has agentrl {description.version}, and"
            f" this is {agentrl.__version__}; {named.fix_hint}"
        )
    return description


def tasks(named: EnvironmentName, split: str) -> list[dict[str, Json]]:
    """The tasks of a split; held-out tasks that ask the question of a training task are left out.
    Raises ConfigError."""
    rows = every_task(named, split)
    if split != "heldout" or not (trained := trained_questions(named)):
        return rows
    return [row for row in rows if str(row["id"]) not in trained] or rows


@cache
def trained_questions(named: EnvironmentName) -> frozenset[str]:
    """The ids of held-out tasks with the question of a training task; none if all tasks have the
    same question, as in a game, or if there are no training tasks."""
    try:
        trained = {_question(row) for row in every_task(named, "train")}
    except ConfigError:  # there may be none if the run file has its own training tasks
        return frozenset()
    rows = every_task(named, "heldout")
    if len(trained | {*map(_question, rows)}) < 2:
        return frozenset()
    return frozenset(str(row["id"]) for row in rows if _question(row) in trained)


def trained_text(named: EnvironmentName) -> str:
    """A sentence about `trained_questions`; empty if there are none."""
    repeated, total = len(trained_questions(named)), len(every_task(named, "heldout"))
    if not repeated:
        return ""
    text = f"{repeated} of {total} held-out tasks ask what a training task asks"
    if repeated == total:
        return f"{text}: held-out scores show memory; the environment's options may give it others"
    return f"{text}: they are left out, and {total - repeated} are left"


def _question(row: dict[str, Json]) -> str:
    return msgspec.json.encode(row.get("question", row["input"]), order="sorted").decode()


@cache
def every_task(named: EnvironmentName, split: str) -> list[dict[str, Json]]:
    """The unfiltered tasks of a split. Raises ConfigError."""
    if not is_hosted(named):
        return checked_tasks(named, split)
    rows: list[dict[str, Json]] = ask(Request("tasks", named, split))
    return rows


def solution(named: EnvironmentName, task_input: Json) -> Any:
    """The plug-in's ground truth of an input. Raises ConfigError."""
    if is_hosted(named):
        return ask(Request("solution", named, task_input))
    environment = made(named)
    with explained(named, "raised in solution"):
        return environment.solution(task_input)


def agent(named: EnvironmentName) -> Callable[[Json], Awaitable[Any]]:
    """The agent that plays the environment's rollouts in this process. Raises ConfigError."""
    environment = made(named)

    async def play(task_input: Json) -> Any:
        return await play_task(environment, named.name, task_input, endpoint())

    return play


def verifier(named: EnvironmentName) -> Callable[..., Awaitable[list[Reward]]]:
    """The verifier of the environment's rollouts."""
    helper, scores_itself = Helper(named), describe(named).kind != "verify"

    async def verify(task: dict[str, Json], result: Json, trace: Trace) -> list[Reward]:
        if scores_itself and isinstance(result, dict) and result.get("environment") == named.name:
            # The environment has scored the rollout.
            rows = msgspec.convert(result["rewards"], list[Reward])
            return with_outcome(rows, trace.transitions)
        if is_hosted(named):
            log = attempt_log.current()
            attempt = "" if log is None else log.attempt
            rows = await helper.ask(Request("verify", named, task, result, attempt))
            return msgspec.convert(rows, list[Reward])
        return await verified(named, task, result)

    return verify


def about(named: EnvironmentName) -> About:
    environment = made(named)
    kind = kind_of(type(environment))
    return About(
        kind=kind, roles=tuple(environment.roles), limit=environment.limit,
        alone=environment.isolation == "process", version=agentrl.__version__,
    )  # fmt: skip


async def verified(named: EnvironmentName, task: dict[str, Json], result: Json) -> list[Reward]:
    """Score an agent's result with the environment in this process."""
    environment: Any = made(named)
    returned = await called(named.name, "verify", environment.verify, task, result)
    return scores_of(returned, named.name)


def ask(request: Request) -> Any:
    """Start a helper for one request and return its answer. Raises ConfigError."""
    python = request.named.python or sys.executable
    with tempfile.TemporaryFile() as printed:
        try:
            started = subprocess.Popen(
                [python, *PROGRAM],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed,
                env=os.environ | SAME,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"environment = {request.named.name!r}: the interpreter {python} cannot be started"
                f" ({error.strerror}); {request.named.fix_hint}"
            ) from None
        with started as helper:
            assert helper.stdin is not None
            assert helper.stdout is not None
            with suppress(BrokenPipeError):
                helper.stdin.write(msgspec.json.encode(request) + b"\n")
                helper.stdin.flush()
            line = helper.stdout.readline()
            with suppress(BrokenPipeError):
                helper.stdin.close()
        printed.seek(0)
        return _value(request.named, python, line, printed.read().decode(errors="replace"))


def _value(named: EnvironmentName, python: str, line: bytes, printed: str = "") -> Any:
    if line:
        answer = msgspec.json.decode(line, type=HelperAnswer)
        if answer.problem:
            raise ConfigError(answer.problem)
        return answer.value
    last = printed.strip().rpartition("\n")[2]
    prefix = f"environment = {named.name!r}"
    if "No module named" in last and "agentrl" in last:
        raise ConfigError(f"{prefix}: {python} has no agentrl that can play it; {named.fix_hint}")
    raise ConfigError(f"{prefix}: its process of {python} ended without an answer: {last}")


class Helper:
    """A helper process that answers requests one after another, started at the first request. It
    ends with this process, and if a request is cancelled."""

    def __init__(self, named: EnvironmentName) -> None:
        self.named, self._python = named, named.python or sys.executable
        self.process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def ask(self, request: Request) -> Any:
        """Send a request and return its answer. Raises ConfigError with the helper's sentence."""
        async with self._turn:
            process = self.process = self.process or await self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(msgspec.json.encode(request) + b"\n")
                line = await process.stdout.readline()
            except BaseException:
                self._end()
                raise
            if not line:
                self._end()
            return _value(self.named, self._python, line, "see its output above")

    async def _start(self) -> asyncio.subprocess.Process:
        piped: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return await asyncio.create_subprocess_exec(
            self._python, *PROGRAM, **piped, env=os.environ | SAME, limit=MAX_ANSWER_BYTES
        )

    def _end(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
        self.process = None


def named_in(config: RunConfig) -> EnvironmentName | None:
    """The environment of a run's settings."""
    name = config.environment
    return (
        EnvironmentName.read(name, config.environment_options, Path(config.root)) if name else None
    )


def check(config: RunConfig) -> None:
    """Check the environment before anything else is built. Raises ConfigError."""
    if (named := named_in(config)) is None:
        return
    if named.python and "python" not in config.environment_options:
        _say(f"environment {named.name} runs in its own interpreter, {named.python}")
    about = describe(named)
    prefix = f"environment = {named.name!r}"
    plays_itself = config.agent.path.startswith(f"{SCHEME}:")
    if not plays_itself and about.kind != "verify":
        fix = "remove agent.path, agent.command or agent.harness"
        if config.agent.harness and "harness" in signature(load_class(named)).parameters:
            fix = f"move harness = {config.agent.harness!r} to [environment_options]"
        raise ConfigError(f"{prefix} plays its rollouts itself; {fix}")
    executor = config.runner.executor
    if plays_itself and is_hosted(named) and executor not in ("auto", "pool"):
        raise ConfigError(
            f"{prefix} runs in processes of its own; set runner.executor = 'pool' instead of"
            f" {executor!r}, or leave it out"
        )
    answered = policy_by_role(config)
    unanswered = [role for role in about.roles if not answered.keys() & {role, "*"}]
    if unanswered:
        role = unanswered[0]
        raise ConfigError(
            f"{prefix} asks models in the role {role!r}, and the run file does not say who answers:"
            f' write {role} = "NAME" below [roles], of one of [upstreams] or "policy"'
        )
    if all(getattr(config.tasks, split).startswith(f"{SCHEME}:") for split in SPLITS):
        check_unique(named, (every_task(named, split) for split in SPLITS))
        if text := trained_text(named):
            _say(text)


@cache
def _say(line: str) -> None:
    """Print a line once per process."""
    Console().print(line, highlight=False, markup=False, soft_wrap=True)


Message = dict[str, Json]


Reply = Callable[[str, list[Message], list[Any]], Awaitable[Message]]


"""Maps role, messages and tools of a call to the assistant's message."""
