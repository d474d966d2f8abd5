"""Kinds of [runner] whose agents have processes of their own, and the table [runner.pool]."""

from __future__ import annotations

from typing import ClassVar, Literal

from agentrl.config.base import Count, Natural, Section
from agentrl.config.infrastructure import RunnerConfig


class PoolConfig(Section, frozen=True):
    """Warm processes, for `executor = "pool"`."""

    processes: Natural = 0  # Processes; 0: one per core.
    rollouts: Count = 1  # concurrent rollouts per process
    recycle_after: Count = 1000  # rollouts after which a process is replaced
    recycle_mb: Natural = 0  # resident size (MB) above which a process is replaced; 0: unlimited
    # Start of processes. fork: import the agent once; spawn: in each process.
    start: Literal["fork", "spawn"] = "fork"


class CommandRunnerConfig(RunnerConfig, frozen=True, tag="command"):
    """`agent.command` runs in a process for each rollout."""

    runs_commands: ClassVar[bool] = True


class PoolRunnerConfig(RunnerConfig, frozen=True, tag="pool"):
    """The agent runs in warm processes."""

    runs_paths: ClassVar[bool] = True

    pool: PoolConfig = PoolConfig()
