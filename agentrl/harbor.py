"""The environment plug-in of Harbor's tasks: `environment = "harbor:FOLDER"`.

A model with a shell works on a task, or a command or a harness in the container. A `Trial` is one
rollout: set up as the task specifies, judged by its tests. It owns the agent's container, and that
of a separate verifier while it judges. Both are removed at the end and never reused for another
rollout.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import shlex
import shutil
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

from agentrl.core import processes
from agentrl.core.errors import AgentError, AgentRLError, ConfigError
from agentrl.core.loading import model_variables
from agentrl.core.types import Json
from agentrl.environments import Endpoint, Environment
from agentrl.runners.executors.command import private_folders
from agentrl.runners.executors.container_engine import ContainerError
from agentrl.runners.executors.containers import Container, Containers, ContainerSpec, Finished
from agentrl.runners.harness import Preset, load_preset
from agentrl.tasks.harbor_format import (
    Artifact,
    ContainerImage,
    HarborStep,
    HarborTask,
    Healthcheck,
    Machine,
    Network,
    UnsupportedTask,
    digest_of,
    read_task,
    resolved,
    task_folders,
)
from agentrl.tasks.rewards import NoRewardError, read_rewards, with_outcome

log = logging.getLogger("agentrl.harbor")
EVERY = 5  # every fifth task is held out by default


class Harbor(Environment):
    """Harbor's tasks: each rollout has its own container, which is built and judged as the task's
    folder specifies. FOLDER is relative to the run file."""

    def __init__(
        self,
        what: str,
        *,
        heldout: list[str] | None = None,
        command: str | list[str] = "",
        harness: str = "",
        args: list[str] | None = None,
        context: int = 32_768,
        turns: int = 50,
        command_timeout: float = 120.0,
        output: int = 10_000,
        system: str | None = None,
        network: str = "bridge",
        outcome: str = "reward",
        memory_mb: int = 4096,
        disk_mb: int = 10_240,
        warm: int = 1,
        cli: str = "",
        variables: list[str] | None = None,
    ) -> None:
        """`heldout`: patterns of ids, such as "heldout/*"; default: every fifth task, or the last
        of fewer. `command`: the agent, a program of the image; `harness`: the same, as a preset of
        `agent.harness` with `args` and `context`; default: the policy itself with a shell: at most
        `turns` calls per step, `command_timeout` seconds per command, of which it sees `output`
        characters, and the system prompt `system`. `network`: of tasks with a public one.
        `outcome`: the reward that counts, if there are several. `memory_mb`, `disk_mb`: limits of
        containers whose task has none; 0: no limit. `warm`: containers of each kind that are kept
        ready. `cli`: docker or podman; default: the installed one. `variables`: patterns of this
        machine's variables that tasks may read as `${NAME}`; default: none."""
        self._variables = variables or []
        self._folder = (self.root / what).resolve()
        self._heldout, self._network, self._outcome, self._cli = heldout, network, outcome, cli
        self._warm, self._limits = warm, (memory_mb, disk_mb)
        if harness and command:
            raise ConfigError("`command` and `harness` are both set: leave one out")
        if args and not harness:
            raise ConfigError("`args` are those of a `harness`; set it, or leave them out")
        self._args, self._context = args or [], context
        self._preset = load_preset(harness, self.root) if harness else None
        self.role_rules = self._preset.match if self._preset else ()
        self._argv = shlex.split(command) if isinstance(command, str) else list(command)
        self._shell: dict[str, Any] = {"turns": turns, "seconds": command_timeout, "output": output}
        self._shell |= {} if system is None else {"system": system}
        self._started: dict[asyncio.AbstractEventLoop, asyncio.Task[Containers]] = {}

    @cached_property
    def _tasks(self) -> dict[str, HarborTask]:
        """The tasks that can be run here, by id."""
        tasks, unsupported = {}, []
        for id, folder in task_folders(self._folder).items():
            try:
                tasks[id] = read_task(folder, id, self._variables)
            except UnsupportedTask as error:
                unsupported.append(str(error))
                log.warning("left out: %s", error)
        if not tasks:
            raise ConfigError(
                f"{self._folder} has no Harbor task that can be run here: {unsupported[0]}"
            )
        return tasks

    def tasks(self, split: str) -> Iterable[dict[str, Json]]:
        held_out = self._held_out()
        for id, task in self._tasks.items():
            if (id in held_out) == (split == "heldout"):
                task_input = {"task": id, "digest": task.digest, "text": task.steps[0].instruction}
                yield {"id": id, "input": task_input}

    def _held_out(self) -> set[str]:
        ids = list(self._tasks)
        if self._heldout is None:
            return {*ids[EVERY - 1 :: EVERY]} or {*ids[1:][-1:]}
        return {id for id in ids for pattern in self._heldout if fnmatchcase(id, pattern)}

    async def run(self, input: dict[str, Any], endpoint: Endpoint) -> dict[str, float]:
        task = self._task(input)
        if await processes.call(digest_of, task.folder) != input["digest"]:
            raise ConfigError(f"{task.folder} has changed since the run read its tasks")
        containers = await self._containers(endpoint)
        async with Trial(task, containers, self._network, self._limits) as trial:
            return with_outcome(await play(trial, self._agent(), endpoint), self._outcome)

    def solution(self, input: dict[str, Any]) -> list[dict[str, Any]] | None:
        return None if self._argv or self._preset else solution(self._task(input))

    def _agent(self) -> ModelWithShell | CommandInside | HarnessInside:
        if self._preset is not None:
            return HarnessInside(self._preset, self._args, self._context)
        return CommandInside(self._argv) if self._argv else ModelWithShell(**self._shell)

    def _task(self, input: dict[str, Any]) -> HarborTask:
        if (task := self._tasks.get(input["task"])) is None:
            raise ConfigError(f"{self._folder} has no Harbor task {input['task']!r} any more")
        return task

    async def _containers(self, endpoint: Endpoint) -> Containers:
        """This process's containers, by event loop; their keeper process ends with this one."""
        loop = asyncio.get_running_loop()
        if loop not in self._started:
            self._started[loop] = asyncio.create_task(_start(self._cli, endpoint, self._warm))
        try:
            return await asyncio.shield(self._started[loop])
        except Exception:  # such as a stopped daemon: the next rollout tries again
            self._started.pop(loop, None)
            raise


async def _start(cli: str, endpoint: Endpoint, warm: int) -> Containers:
    containers = Containers(cli, gateway=f"{endpoint.url.partition('/a/')[0]}/v1", warm=warm)
    try:
        await containers.start()
    except BaseException:
        await containers.close()
        raise
    return containers


NO_LIMIT = 86_400.0  # seconds for the agent of a task without a limit
MAX_COMMAND_BYTES = 100_000  # Linux rejects arguments above 128 KiB
PIECE = 60_000  # characters of a solution in one command
SHELL = 'if command -v bash >/dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'
SYSTEM = (
    "You work in a Linux container. Use the tool `bash` until the task is done; then answer without"
    " a tool call. Each command runs in a new shell, in the working directory."
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command and return its output and exit status.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


@dataclass(frozen=True)
class ModelWithShell:
    """Runs the policy's shell commands until it answers without a tool call or its time is up."""

    turns: int  # model calls of a step
    seconds: float  # seconds of a command
    output: int  # characters of a command's output that the model sees
    system: str = SYSTEM

    def begin(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    async def work(
        self, trial: Trial, step: HarborStep, endpoint: Endpoint, conversation: list[dict[str, Any]]
    ) -> None:
        """`conversation`: that of earlier steps, which continues."""
        deadline = time.monotonic() + (step.seconds or NO_LIMIT)
        conversation.append({"role": "user", "content": step.instruction})
        for _ in range(self.turns):
            reply = await endpoint.chat(conversation, TOOLS)
            conversation.append(reply)
            calls = reply.get("tool_calls") or []
            for call in calls:
                output = await self._run(trial, step, call, deadline)
                conversation.append(
                    {"role": "tool", "tool_call_id": call.get("id", ""), "content": output}
                )
            if not calls or time.monotonic() >= deadline:
                return

    async def _run(self, trial: Trial, step: HarborStep, call: Any, deadline: float) -> str:
        command = _command(call)
        if command is None:
            return "There is one tool, bash, with one argument, command: a string."
        if "\0" in command or len(command.encode()) > MAX_COMMAND_BYTES:
            return f"The command has a NUL or more than {MAX_COMMAND_BYTES} bytes; make it shorter."
        left = deadline - time.monotonic()
        if left <= 0:
            return "The time is up."
        seconds = min(self.seconds, left)
        try:
            done = await trial.run(["sh", "-c", SHELL, command], step, seconds)
        except TimeoutError:
            return f"It ran longer than {seconds:.4g} s; it and all other processes were ended."
        output = done.stdout + (f"\n{done.stderr}" if done.stderr else "")
        if len(output) > self.output:
            half = self.output // 2
            left_out = len(output) - 2 * half
            output = f"{output[:half]}\n... ({left_out} characters are left out)\n{output[-half:]}"
        status = f"\n(exit status {done.status})" if done.status else ""
        return f"{output.rstrip()}{status}".strip()


@dataclass(frozen=True)
class CommandInside:
    """A program of the image. It gets the model's address in variables such as OPENAI_BASE_URL, and
    the instruction in HARBOR_INSTRUCTION and on its stdin."""

    command: list[str]

    def begin(self) -> list[dict[str, Any]]:
        return []

    async def work(
        self, trial: Trial, step: HarborStep, endpoint: Endpoint, conversation: list[dict[str, Any]]
    ) -> None:
        env = model_variables(endpoint.url, endpoint.key)
        if len(stdin := step.instruction.encode()) <= MAX_COMMAND_BYTES:
            env["HARBOR_INSTRUCTION"] = step.instruction
        await _run_agent(trial, step, self.command, env, stdin)


@dataclass(frozen=True)
class HarnessInside:
    """A coding harness that is installed in the image. Each step has its own HOME with the
    harness's configuration files."""

    preset: Preset
    args: list[str]
    context: int

    def begin(self) -> list[dict[str, Any]]:
        return []

    async def work(
        self, trial: Trial, step: HarborStep, endpoint: Endpoint, conversation: list[dict[str, Any]]
    ) -> None:
        prompt, home = step.instruction, f"/tmp/.agentrl-home-{step.name or 'task'}"
        if "\0" in prompt or len(prompt.encode()) > MAX_COMMAND_BYTES:
            raise AgentError(f"the task is too long for an argument of {self.preset.program}")
        variables = {"url": endpoint.url, "key": endpoint.key, "prompt": prompt}
        preset = self.preset.filled(home=Path(home), context=self.context, **variables)
        with tempfile.TemporaryDirectory(prefix="agentrl-") as files:
            await processes.call(preset.write_files, Path(files))
            await trial.give(Path(files), home)
        env = model_variables(endpoint.url, endpoint.key)
        env |= private_folders(home, Path(await trial.folder())) | preset.env
        await _run_agent(trial, step, [preset.program, *preset.argv, *self.args], env)


async def _run_agent(
    trial: Trial, step: HarborStep, command: list[str], env: dict[str, str], stdin: bytes = b""
) -> None:
    try:
        done = await trial.run(command, step, step.seconds or NO_LIMIT, env, stdin)
    except TimeoutError:
        return  # the work so far is judged
    if done.status:
        last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise AgentError(f"the agent ended with exit status {done.status}: {last[:300]}")


async def play(
    trial: Trial, agent: ModelWithShell | CommandInside | HarnessInside, endpoint: Endpoint
) -> dict[str, float]:
    """Let the agent work on all steps of a task; return the rewards."""
    conversation = agent.begin()
    for step in trial.task.steps:
        await trial.begin(step)
        await agent.work(trial, step, endpoint, conversation)
        await trial.judge(step)
        if trial.is_over(step):
            break
    return trial.rewards()


def solution(task: HarborTask) -> list[dict[str, Any]] | None:
    """The replies that run each step's `solve.sh`; None if there is none."""
    if not all((step.solution / "solve.sh").is_file() for step in task.steps):
        return None
    task_variables = resolved(task.about.solution.env, task.variables)
    environment = {"DEBIAN_FRONTEND": "noninteractive", **task_variables}
    variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
    replies = []
    for step in task.steps:
        replies += [_asks(command) for command in _copied(step)]
        replies.append(_asks(f"chmod +x /solution/solve.sh && {variables} /solution/solve.sh"))
        replies.append({"role": "assistant", "content": "Done."})
    return replies


def _copied(step: HarborStep) -> Iterator[str]:
    """Commands that write the step's solution to /solution."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(step.solution, ".")
    text = base64.b64encode(packed.getvalue()).decode()
    yield "rm -rf /solution && mkdir -p /solution && : > /tmp/.solution"
    for start in range(0, len(text), PIECE):
        yield f"printf %s {text[start : start + PIECE]} >> /tmp/.solution"
    yield "base64 -d /tmp/.solution | tar -xz -C /solution && rm /tmp/.solution"


def _asks(command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    call = {"id": "call_0", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _command(call: Any) -> str | None:
    try:
        command = json.loads(call["function"]["arguments"])["command"]
        command.encode()  # half an emoji is not valid text
        return command if call["function"]["name"] == "bash" and isinstance(command, str) else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


VERIFIER, TESTS = "/logs/verifier", "/tests"
LOGS = ("/logs/agent", VERIFIER, "/logs/artifacts")
REWARDS = ("reward.json", "reward.txt")
ROOT = "0"
MAX_PROCESSES = 4096  # of a container; a build may need many
SETUP_SECONDS = 120.0  # for each command that belongs neither to the agent nor to the tests
MAX_REWARDS_BYTES = 2**16  # bytes
READ = f'for f; do if [ -f "$f" ]; then echo "$f"; head -c {MAX_REWARDS_BYTES} "$f"; exit; fi; done'
BASH = 'if command -v bash >/dev/null; then exec bash "$0"; else exec sh "$0"; fi'
# An image's entry point may start its services; its output is discarded.
BEHIND = '"$0" "$@" </dev/null >/dev/null 2>&1 &'
EMPTY = 'for d; do mkdir -p "$d" && rm -rf -- "$d"/* "$d"/.[!.]* "$d"/..?*; done'


class HarborError(AgentRLError):
    """A rollout cannot be set up or judged. The message is a sentence with the task's id."""


class Trial:
    """`async with Trial(...)` starts the agent's container; its end discards it."""

    def __init__(
        self, task: HarborTask, containers: Containers, public: str, limits: tuple[int, int]
    ) -> None:
        """`public`: the network for tasks that request a public one. `limits`: megabytes of memory
        and of disk for tasks without limits; 0: no limit."""
        self.task, self._containers, self._public, self._limits = task, containers, public, limits
        self._agent: Container | None = None
        self._judged: list[dict[str, float]] = []
        self._folder = ""

    async def __aenter__(self) -> Trial:
        settings = self.task.about.environment
        try:
            self._agent = await self._start(self.task.image, settings, self.task.network)
            await self._sh(f"mkdir -p {' '.join(LOGS)} && chmod 777 {' '.join(LOGS)}")
            if self.task.image.files:
                await self._agent.copy_in(self.task.image.files, await self.folder())
            if settings.healthcheck:
                await self._wait_until_healthy(settings.healthcheck)
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._agent is not None:
            await self._agent.discard()
        if isinstance(error, ContainerError):
            raise self._error(str(error)) from error

    async def folder(self) -> str:
        """The working directory in the agent's container."""
        if not self._folder:
            self._folder = (await self.container.run(["pwd"], timeout=SETUP_SECONDS)).stdout.strip()
        return self._folder or "/"

    @property
    def container(self) -> Container:
        assert self._agent is not None
        return self._agent

    async def begin(self, step: HarborStep) -> None:
        """Prepare the container for a step. Raises HarborError."""
        if self._judged:  # remove files of the previous step's tests
            await self._sh(f"{EMPTY}; chmod 777 {VERIFIER}", TESTS, VERIFIER)
        if step.files and step.files.is_dir():
            await self.container.copy_in(step.files, await self.folder())
        if step.files and (step.files / "setup.sh").is_file():
            done = await self._run(["sh", "-c", BASH, "setup.sh"], SETUP_SECONDS, step.user)
            if done.status:
                raise self._error(f"setup.sh of its step {step.name!r} failed{_last_line(done)}")
        if step.healthcheck:
            await self._wait_until_healthy(step.healthcheck)

    async def run(
        self,
        command: Sequence[str],
        step: HarborStep,
        timeout: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Finished:
        """Run a command of the agent. Raises TimeoutError; all its processes are ended then."""
        return await self._run(command, timeout, step.user, env, stdin)

    async def give(self, source: Path, inside: str) -> None:
        """Copy a folder into the agent's container, where every user may write to it."""
        await self._sh('mkdir -p "$1"', inside)
        await self.container.copy_in(source, inside)
        await self._sh('chmod -R a+rwX "$1"', inside)

    async def judge(self, step: HarborStep) -> dict[str, float]:
        """Run the tests of a step and return its rewards by name. Raises HarborError if they wrote
        no reward."""
        for hook in step.verifier.collect:
            with suppress(TimeoutError):  # missing artifacts show what was not saved
                await self._run(["sh", "-c", hook.command], hook.timeout_sec, hook.user)
        if step.judge is None:
            rewards = await self._tested(self.container, step, copied=True)
        else:
            rewards = await self._judged_apart(step)
        self._judged.append(rewards)
        return rewards

    def is_over(self, step: HarborStep) -> bool:
        """Whether no step follows a judged step, because it was the last or below its
        `min_reward`."""
        rewards = self._judged[-1]
        missed = any(rewards.get(k, float("-inf")) < v for k, v in step.min_reward.items())
        return missed or step is self.task.steps[-1]

    def rewards(self) -> dict[str, float]:
        """The rewards of the task: those of the last step, or the means over all judged steps."""
        if self.task.about.multi_step_reward_strategy == "final":
            return self._judged[-1]
        names = dict.fromkeys(name for rewards in self._judged for name in rewards)
        return {name: fmean(rewards.get(name, 0.0) for rewards in self._judged) for name in names}

    def _variables(self, step: HarborStep) -> dict[str, str]:
        return resolved(step.verifier.env, self.task.variables)

    async def _start(self, image: ContainerImage, machine: Machine, network: Network) -> Container:
        name = image.name
        if image.folder is not None:
            name = await self._containers.build(image.folder, timeout=machine.build_timeout_sec)
        spec = ContainerSpec(
            name,
            network="none" if network == "no-network" else self._public,
            memory_mb=machine.limits[0] or self._limits[0],
            disk_mb=machine.limits[1] or self._limits[1],
            cpus=machine.cpus or 0.0,
            pids=MAX_PROCESSES,
            env=tuple(sorted(resolved(machine.env, self.task.variables).items())),
            folder=machine.workdir or "",
        )
        container = await self._containers.take(spec, timeout=machine.build_timeout_sec)
        try:
            entry, _ = await self._containers.command(name)
            if entry:
                command = ["sh", "-c", BEHIND, *entry, "sh", "-c", "sleep infinity"]
                await container.run(command, timeout=SETUP_SECONDS)
        except BaseException:
            await container.discard()
            raise
        return container

    async def _judged_apart(self, step: HarborStep) -> dict[str, float]:
        """Judge a step in a new container that gets only the artifacts."""
        assert step.judge is not None
        judge = await self._start(step.judge.image, step.judge.machine, step.judge.network)
        try:
            with tempfile.TemporaryDirectory(prefix="agentrl-", ignore_cleanup_errors=True) as name:
                for number, artifact in enumerate(step.artifacts):
                    await self._hand_over(artifact, judge, Path(name, str(number)))
            return await self._tested(judge, step, copied=not step.judge.has_tests)
        finally:
            await judge.discard()

    async def _hand_over(self, artifact: Artifact, judge: Container, copy: Path) -> None:
        """Copy an artifact, if there is one, to the same place in the verifier's container."""
        source = artifact.source
        if not source.startswith("/"):
            source = f"{(await self.folder()).rstrip('/')}/{source}"
        if not await self.container.copy_out(source, copy):
            return
        kind = await processes.call(clean, copy, artifact.exclude)
        if kind == "folder":
            await judge.run(["sh", "-c", EMPTY, "sh", source], user=ROOT, timeout=SETUP_SECONDS)
        if kind:
            await judge.copy_in(copy, source)

    async def _tested(
        self, container: Container, step: HarborStep, *, copied: bool
    ) -> dict[str, float]:
        for folder in step.tests if copied else ():
            if folder.is_dir():
                await container.copy_in(folder, TESTS)
        old = " ".join(f"{VERIFIER}/{name}" for name in REWARDS)
        prepare = f"mkdir -p {VERIFIER} && chmod 777 {VERIFIER} && rm -rf {old}"
        prepare += f" && chmod +x {TESTS}/test.sh"
        ready = await container.run(["sh", "-c", prepare], user=ROOT, timeout=SETUP_SECONDS)
        if ready.status:
            raise self._error(f"its tests cannot be put into its container{_last_line(ready)}")
        seconds, env = step.verifier.timeout_sec or 0.0, self._variables(step)
        user = _user(step.verifier.user)
        try:
            done = await container.run([f"{TESTS}/test.sh"], env=env, user=user, timeout=seconds)
        except TimeoutError:
            raise self._error(f"its tests ran longer than {seconds:g} s") from None
        texts = await self._written(container)
        try:
            return read_rewards(texts)
        except NoRewardError as error:
            problem = (
                f"its tests wrote {error}, and ended with status {done.status}{_last_line(done)}"
            )
            raise self._error(problem) from None

    async def _written(self, container: Container) -> dict[str, str]:
        """The file with rewards that the tests have written; if there are two, the more detailed
        one."""
        command = ["sh", "-c", READ, "sh", *REWARDS]
        result = await container.run(command, folder=VERIFIER, user=ROOT, timeout=SETUP_SECONDS)
        name, _, text = result.stdout.partition("\n")
        return {name: text} if name in REWARDS else {}

    async def _wait_until_healthy(self, check: Healthcheck) -> None:
        start_deadline, failures = time.monotonic() + check.start_period_sec, 0
        while True:
            starting = time.monotonic() < start_deadline
            try:
                done = await self._run(["sh", "-c", check.command], check.timeout_sec)
                if done.status == 0:
                    return
                problem = f"ended with status {done.status}{_last_line(done)}"
            except TimeoutError:
                problem = f"ran longer than {check.timeout_sec:g} s"
            failures += not starting
            if failures >= check.retries:
                raise self._error(f"its container is not healthy: {check.command!r:.80} {problem}")
            await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)

    async def _run(
        self,
        command: Sequence[str],
        timeout: float,
        user: str | int | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Finished:
        return await self.container.run(
            list(command), env=dict(env or {}), user=_user(user), stdin=stdin, timeout=timeout
        )

    async def _sh(self, script: str, *arguments: str) -> None:
        """Run a trusted script as root."""
        command = ["sh", "-c", script, "sh", *arguments]
        done = await self._run(command, SETUP_SECONDS, ROOT)
        if done.status:
            raise self._error(f"its container cannot be prepared: {script!r}{_last_line(done)}")

    def _error(self, why: str) -> HarborError:
        return HarborError(f"the Harbor task {self.task.id!r}: {why}")


def clean(copy: Path, exclude: Sequence[str] = ()) -> str:
    """Remove excluded files from a copy of the agent's files, and anything that could affect the
    verifier's container: links that lead out of the copy, special files, and bits such as setuid.
    Return what remains: a "folder", a "file" or ""."""
    root = copy.resolve() if copy.is_dir() and not copy.is_symlink() else None
    for path in [copy] if root is None else sorted(copy.rglob("*")):
        mode = path.lstat().st_mode if path.is_symlink() or path.exists() else 0
        inside = root is not None and path.resolve().is_relative_to(root)
        link_out = stat.S_ISLNK(mode) and (path.readlink().is_absolute() or not inside)
        usual = stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        if not mode:
            continue  # its folder was removed
        if link_out or not usual or _is_excluded(path.relative_to(copy).as_posix(), exclude):
            _remove(path)
        elif not stat.S_ISLNK(mode):
            path.chmod(mode & 0o1777)
    return "folder" if copy.is_dir() else "file" if copy.exists() else ""


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is excluded, as with `tar --exclude`: the name, or its part after any slash,
    matches."""
    ends = [name, *(name[i + 1 :] for i, letter in enumerate(name) if letter == "/")]
    return any(fnmatchcase(end, p.removeprefix("./").rstrip("/")) for p in patterns for end in ends)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _user(user: str | int | None) -> str:
    return "" if user is None else str(user)


def _last_line(done: Finished) -> str:
    last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2].strip()
    return f": {last[:300]}" if last else ""
