"""The plug-in of Harbor's tasks: `environment = "harbor:FOLDER"`."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from agentrl.base import threads
from agentrl.environments import Endpoint, Environment
from agentrl.errors import ConfigError
from agentrl.harbor.agent import CommandInside, HarnessInside, ModelWithShell, play, solution
from agentrl.harbor.trial import Trial
from agentrl.runners.containers.pool import Containers
from agentrl.runners.harnesses.preset import load_preset
from agentrl.tasks.harbor_format import HarborTask, UnfitTask, digest_of, read_task, task_folders
from agentrl.tasks.rewards import with_outcome
from agentrl.types import Json

log = logging.getLogger("agentrl.harbor")
EVERY = 5  # of the tasks is held out by default


class Harbor(Environment):
    """Each rollout has a container of its own, which is made, worked in and judged as the task's
    folder says. FOLDER is relative to the run file."""

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
        `agent.harness` with `args` and `context`; default: the policy itself with a shell, with at
        most `turns` calls per step, `command_timeout` seconds per command of which it sees `output`
        characters, told `system` at first. `network`: of tasks with a public one. `outcome`: the
        reward that counts, if there are several. `memory_mb`, `disk_mb`: limits of containers whose
        task has none; 0: no limit. `warm`: containers of each kind that are kept ready. `cli`:
        docker or podman; default: what is there. `variables`: patterns of this machine's variables
        that tasks may read as `${NAME}`; default: none."""
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
        """Those that can be run here, by id."""
        found, unfit = {}, []
        for id, folder in task_folders(self._folder).items():
            try:
                found[id] = read_task(folder, id, self._variables)
            except UnfitTask as error:
                unfit.append(str(error))
                log.warning("left out: %s", error)
        if not found:
            raise ConfigError(f"{self._folder} has no Harbor task that can be run here: {unfit[0]}")
        return found

    def tasks(self, split: str) -> Iterable[dict[str, Json]]:
        held_out = self._held_out()
        for id, task in self._tasks.items():
            if (id in held_out) == (split == "heldout"):
                about = {"task": id, "digest": task.digest, "text": task.steps[0].instruction}
                yield {"id": id, "input": about}

    def _held_out(self) -> set[str]:
        ids = list(self._tasks)
        if self._heldout is None:
            return {*ids[EVERY - 1 :: EVERY]} or {*ids[1:][-1:]}
        return {id for id in ids for pattern in self._heldout if fnmatchcase(id, pattern)}

    async def run(self, input: dict[str, Any], endpoint: Endpoint) -> dict[str, float]:
        task = self._task(input)
        if await threads.call(digest_of, task.folder) != input["digest"]:
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
        """This process's containers, by event loop; their keeper ends with the process."""
        loop = asyncio.get_running_loop()
        if loop not in self._started:
            self._started[loop] = asyncio.create_task(_start(self._cli, endpoint, self._warm))
        try:
            return await asyncio.shield(self._started[loop])
        except Exception:  # such as a daemon that is down: the next rollout tries again
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
