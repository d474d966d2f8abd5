"""Joins a run whose environment has processes of its own."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentrl.config import RunConfig
from agentrl.config.derived import SCHEME, Named
from agentrl.config.infrastructure import RunnerConfig
from agentrl.environments import hosted
from agentrl.environments.reference import made, parse
from agentrl.errors import ConfigError
from agentrl.runners.executors import Executor
from agentrl.runners.hooks import RunnerHooks

LEAST_PROCESSES = 8  # of one rollout each, even on a machine with fewer cores: they wait for calls


class EnvironmentHooks(RunnerHooks):
    """Runs its rollouts in a pool of processes of its interpreter."""

    def __init__(self, config: RunConfig, root: Path, named: Named) -> None:
        self._config, self._root, self._named = config, root, named
        self.environment = named.name

    def executor(self, gateway: str) -> Executor:
        from agentrl.runners.processes.pool import PoolExecutor

        named, agent = self._named, self._config.agent
        own: Any = {"root": self._root, "python": named.python or sys.executable}
        agent = replace(agent, env=hosted.SAME | agent.env)
        return PoolExecutor(agent.path, agent, self._pool(), **own)

    def _pool(self) -> Any:
        from agentrl.config.infrastructure import PoolConfig, PoolRunnerConfig

        runner: Any = self._config.runner
        alone = hosted.describe(self._named).alone
        if isinstance(runner, PoolRunnerConfig):
            if alone and runner.pool.rollouts > 1:
                raise ConfigError(
                    f"runner.pool.rollouts = {runner.pool.rollouts}: the environment"
                    f" {self._named.name} plays one rollout at a time in a process; set 1"
                )
            return runner
        cores = os.cpu_count() or 1
        most = max(cores, LEAST_PROCESSES) if alone else cores
        processes = min(most, runner.concurrency)
        rollouts = 1 if alone else math.ceil(runner.concurrency / processes)
        known = {key: getattr(runner, key) for key in RunnerConfig.__struct_fields__}
        return PoolRunnerConfig(**known, pool=PoolConfig(processes=processes, rollouts=rollouts))


def join(config: RunConfig, root: Path) -> RunnerHooks | None:
    """Raises ConfigError if the environment cannot be made here."""
    if not config.agent.path.startswith(f"{SCHEME}:"):
        return None
    _, named = parse(config.agent.path, root)
    hosted.describe(named)
    if hosted.is_hosted(named):
        return EnvironmentHooks(config, root, named)
    hooks = RunnerHooks()
    hooks.role_rules, hooks.environment = made(named).role_rules, named.name
    return hooks
