"""One rollout of a Harbor task in its containers: set up as the task says, judged by its tests.

Owns: the agent's container, and that of a separate verifier while it judges. Both are discarded at
the end, and never used for another rollout.
"""

from __future__ import annotations

import asyncio
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from types import TracebackType

from agentrl.base import threads
from agentrl.errors import AgentRLError
from agentrl.runners.containers.cli import ContainerError
from agentrl.runners.containers.pool import Container, Containers, ContainerSpec, Finished
from agentrl.tasks.harbor_format import ContainerImage, HarborStep, HarborTask, resolved
from agentrl.tasks.harbor_tables import Artifact, Healthcheck, Machine, Network
from agentrl.tasks.rewards import NoRewardError, read_rewards

VERIFIER, TESTS = "/logs/verifier", "/tests"
LOGS = ("/logs/agent", VERIFIER, "/logs/artifacts")
REWARDS = ("reward.json", "reward.txt")
ROOT = "0"
MOST_PROCESSES = 4096  # of a container; a build may need many
SETUP_SECONDS = 120.0  # for each command that is neither the agent's nor of the tests
LARGEST_REWARDS = 2**16  # bytes
READ = f'for f; do if [ -f "$f" ]; then echo "$f"; head -c {LARGEST_REWARDS} "$f"; exit; fi; done'
BASH = 'if command -v bash >/dev/null; then exec bash "$0"; else exec sh "$0"; fi'
# An image's entry point may start its services; all that it prints is lost.
BEHIND = '"$0" "$@" </dev/null >/dev/null 2>&1 &'
EMPTY = 'for d; do mkdir -p "$d" && rm -rf -- "$d"/* "$d"/.[!.]* "$d"/..?*; done'


class HarborError(AgentRLError):
    """A rollout cannot be set up or judged. The message is a sentence with the task's id."""


class Trial:
    """`async with Trial(...)` starts the agent's container; its end discards it."""

    def __init__(
        self, task: HarborTask, containers: Containers, public: str, limits: tuple[int, int]
    ) -> None:
        """`public`: the network of tasks that ask for a public one. `limits`: megabytes of memory
        and of disk where the task names none; 0: no limit."""
        self.task, self._containers, self._public, self._limits = task, containers, public, limits
        self._agent: Container | None = None
        self._judged: list[dict[str, float]] = []
        self._folder = ""

    async def __aenter__(self) -> Trial:
        about = self.task.about.environment
        try:
            self._agent = await self._start(self.task.image, about, self.task.network)
            await self._sh(f"mkdir -p {' '.join(LOGS)} && chmod 777 {' '.join(LOGS)}")
            if self.task.image.files:
                await self._agent.copy_in(self.task.image.files, await self.folder())
            if about.healthcheck:
                await self._wait_until_healthy(about.healthcheck)
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
        """Prepare the container for what a step asks of the agent. Raises HarborError."""
        if self._judged:  # what the tests of the last one left
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
        """Run the tests of a step, and return its rewards by the names that they give them. Raises
        HarborError if they say nothing."""
        for hook in step.verifier.collect:
            with suppress(TimeoutError):  # the artifacts say what it could save
                await self._run(["sh", "-c", hook.command], hook.timeout_sec, hook.user)
        if step.judge is None:
            rewards = await self._tested(self.container, step, copied=True)
        else:
            rewards = await self._judged_apart(step)
        self._judged.append(rewards)
        return rewards

    def is_over(self, step: HarborStep) -> bool:
        """Whether a step that was judged is the last one: later ones need its `min_reward`."""
        rewards = self._judged[-1]
        missed = any(rewards.get(k, float("-inf")) < v for k, v in step.min_reward.items())
        return missed or step is self.task.steps[-1]

    def rewards(self) -> dict[str, float]:
        """Those of the task: of its last step, or the means of all steps that were judged."""
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
            pids=MOST_PROCESSES,
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
        """Judge a step in a fresh container that gets the artifacts and nothing else."""
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
        kind = await threads.call(clean, copy, artifact.exclude)
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
            said = f"its tests wrote {error}, and ended with status {done.status}{_last_line(done)}"
            raise self._error(said) from None

    async def _written(self, container: Container) -> dict[str, str]:
        """The file with rewards that the tests have written, the more detailed one of both."""
        command = ["sh", "-c", READ, "sh", *REWARDS]
        found = await container.run(command, folder=VERIFIER, user=ROOT, timeout=SETUP_SECONDS)
        name, _, text = found.stdout.partition("\n")
        return {name: text} if name in REWARDS else {}

    async def _wait_until_healthy(self, check: Healthcheck) -> None:
        lenient, failures = time.monotonic() + check.start_period_sec, 0
        while True:
            early = time.monotonic() < lenient
            try:
                done = await self._run(["sh", "-c", check.command], check.timeout_sec)
                if done.status == 0:
                    return
                why = f"ended with status {done.status}{_last_line(done)}"
            except TimeoutError:
                why = f"ran longer than {check.timeout_sec:g} s"
            failures += not early
            if failures >= check.retries:
                raise self._error(f"its container is not healthy: {check.command!r:.80} {why}")
            await asyncio.sleep(check.start_interval_sec if early else check.interval_sec)

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
        """Run a script of our own as root."""
        command = ["sh", "-c", script, "sh", *arguments]
        done = await self._run(command, SETUP_SECONDS, ROOT)
        if done.status:
            raise self._error(f"its container cannot be prepared: {script!r}{_last_line(done)}")

    def _error(self, why: str) -> HarborError:
        return HarborError(f"the Harbor task {self.task.id!r}: {why}")


def clean(copy: Path, exclude: Sequence[str] = ()) -> str:
    """Remove from a copy of the agent's files what `exclude` names, and what could reach into the
    verifier's container: links that lead out of it, special files, and bits such as setuid. Return
    what is left: a "folder", a "file" or ""."""
    root = copy.resolve() if copy.is_dir() and not copy.is_symlink() else None
    for path in [copy] if root is None else sorted(copy.rglob("*")):
        mode = path.lstat().st_mode if path.is_symlink() or path.exists() else 0
        inside = root is not None and path.resolve().is_relative_to(root)
        link_out = stat.S_ISLNK(mode) and (path.readlink().is_absolute() or not inside)
        usual = stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        if not mode:
            continue  # below a folder that is gone
        if link_out or not usual or _is_excluded(path.relative_to(copy).as_posix(), exclude):
            _remove(path)
        elif not stat.S_ISLNK(mode):
            path.chmod(mode & 0o1777)
    return "folder" if copy.is_dir() else "file" if copy.exists() else ""


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """As `tar --exclude`: the name or its end after any slash matches."""
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
