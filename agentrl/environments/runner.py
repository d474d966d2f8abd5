"""How a runner plays the rollouts of an environment."""

from __future__ import annotations

import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentrl.config import RunConfig
from agentrl.config.derived import SCHEME, Named
from agentrl.config.infrastructure import PoolConfig, PoolRunnerConfig, RunnerConfig
from agentrl.environments import hosted
from agentrl.environments.reference import made, parse
from agentrl.errors import ConfigError
from agentrl.runners.executors import Executor
from agentrl.runners.main import PlayedEnvironment

LEAST_PROCESSES = 8  # of one rollout each, even on a machine with fewer cores: they wait for calls


def played_environment(config: RunConfig, root: Path) -> PlayedEnvironment | None:
    """The environment that plays the rollouts of a run, or None if an agent does. Raises
    ConfigError if it cannot be made here."""
    if not config.agent.path.startswith(f"{SCHEME}:"):
        return None
    _, named = parse(config.agent.path, root)
    hosted.describe(named)
    if hosted.is_hosted(named):
        return PlayedEnvironment(named.name, make_executor=partial(_executor, config, root, named))
    return PlayedEnvironment(named.name, role_rules=made(named).role_rules)


def _executor(config: RunConfig, root: Path, named: Named) -> Executor:
    """A pool of processes of the environment's interpreter."""
    from agentrl.runners.processes.pool import PoolExecutor

    agent = replace(config.agent, env=hosted.SAME | config.agent.env)
    own: Any = {"root": root, "python": named.python or sys.executable}
    return PoolExecutor(agent.path, agent, _pool(config, named), **own)


def _pool(config: RunConfig, named: Named) -> PoolRunnerConfig:
    runner, alone = config.runner, hosted.describe(named).alone
    if isinstance(runner, PoolRunnerConfig):
        if alone and runner.pool.rollouts > 1:
            raise ConfigError(
                f"runner.pool.rollouts = {runner.pool.rollouts}: the environment {named.name}"
                " plays one rollout at a time in a process; set 1"
            )
        return runner
    cores = os.cpu_count() or 1
    most = max(cores, LEAST_PROCESSES) if alone else cores
    processes = min(most, runner.concurrency)
    rollouts = 1 if alone else math.ceil(runner.concurrency / processes)
    known = {key: getattr(runner, key) for key in RunnerConfig.__struct_fields__}
    return PoolRunnerConfig(**known, pool=PoolConfig(processes=processes, rollouts=rollouts))
