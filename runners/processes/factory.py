"""Make the executors, whose modules only their users import."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.infrastructure import PoolRunnerConfig
from agentrl.runners.executors import Executor


def command(config: RunConfig, root: Path, gateway: str, runner: str) -> Executor:
    from agentrl.runners.processes.command import CommandExecutor

    return CommandExecutor(config.agent, config.runner, root=root, gateway=gateway)


def pool(config: RunConfig, root: Path, gateway: str, runner: str) -> Executor:
    from agentrl.runners.processes.pool import PoolExecutor

    assert isinstance(config.runner, PoolRunnerConfig)
    return PoolExecutor(config.agent.path, config.agent, config.runner, root=root)
