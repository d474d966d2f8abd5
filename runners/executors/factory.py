"""The executor of a run file.

Only the selected one is imported, and only by runners: the client of Kubernetes is an extra.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn, cast

from msgspec.structs import replace

from agentrl.core.access import is_loopback
from agentrl.core.config import RunConfig
from agentrl.core.config.infrastructure import (
    EXECUTORS,
    ContainerRunnerConfig,
    KubernetesRunnerConfig,
    PoolRunnerConfig,
)
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import check_call, check_protocol, load_plugin, where
from agentrl.runners.executors import Executor
from agentrl.runners.executors.inprocess import InProcessExecutor, as_agent, load


def command(config: RunConfig, root: Path, gateway: str, runner: str) -> Executor:
    from agentrl.runners.executors.command import CommandExecutor

    return CommandExecutor(config.agent, config.runner, root=root, gateway=gateway)


def pool(config: RunConfig, root: Path, gateway: str, runner: str) -> Executor:
    from agentrl.runners.executors.pool import PoolExecutor

    assert isinstance(config.runner, PoolRunnerConfig)
    return PoolExecutor(config.agent.path, config.agent, config.runner, root=root)


def container(config: RunConfig, root: Path, gateway: str, runner: str) -> Executor:
    from agentrl.runners.executors.containers import ContainerExecutor

    assert isinstance(config.runner, ContainerRunnerConfig)
    return ContainerExecutor(config.agent, config.runner, root=root, gateway=gateway)


def kubernetes(config: RunConfig, root: Path, gateway: str, runner: str) -> Executor:
    from agentrl.runners.executors.kubernetes import KubernetesExecutor

    assert isinstance(config.runner, KubernetesRunnerConfig)
    run = f"{config.name} {config.store} {config.output}"  # rollout ids are not unique across runs
    return KubernetesExecutor(
        config.agent, config.runner, root=root, gateway=gateway, name=runner, run=run
    )


KEY = "runner.executor"
COMMAND = "command"  # executor of agents that are commands, by default


def make_executor(
    config: RunConfig,
    *,
    root: Path,
    gateway: str,
    runner: str,
    agent: object = None,
    given: Executor | None = None,
) -> Executor:
    """Create the run's executor. `agent`: an object or "file.py:name" that replaces the run file's
    agent. `gateway`: base URL for agents on this machine. `runner`: this runner's name. `given`:
    the executor of an environment or harness, for the run file's agent.

    Raises ConfigError or AgentError if agent and executor do not fit."""
    settings = config.runner
    path = agent if isinstance(agent, str) else config.agent.path
    agent_object = None if isinstance(agent, str) else agent
    command = "" if agent else config.agent.harness or config.agent.command
    kind, paths, commands = settings.executor, settings.runs_paths, settings.runs_commands
    if kind == "auto":
        kind, paths, commands = COMMAND if command else "async", not command, bool(command)
    make = load_plugin("executors", kind, EXECUTORS, root, key=KEY)
    if path and command and (paths or commands):
        setting = "harness" if config.agent.harness else "command"
        raise ConfigError(f"agent.path and agent.{setting} are both set: leave one out")
    if commands and (agent or path):
        _refuse(config, "command")
    if paths:
        _refuse_network(config)
        if command:
            raise ConfigError(f"{KEY} = {kind!r} runs agent.path, not agent.command")
        if agent_object is None and not path:
            raise ConfigError("agent.path is missing: write it as file.py:name")
    if given is not None and not agent:
        return given
    if paths:
        if make is None:
            loaded = load(path, root) if agent_object is None else agent_object
            return InProcessExecutor(as_agent(loaded), threaded=kind == "threads")
        if agent_object is not None:
            _refuse(config, "path")
    return _plugin(make, config, root, gateway, runner, agent)


def _plugin(
    make: Any, config: RunConfig, root: Path, gateway: str, runner: str, agent: object
) -> Executor:
    """Call a user's or plug-in's factory `make(config, root, gateway, runner)`, and check the
    executor that it returns."""
    check_call(make, "config", "root", "gateway", "runner", key=KEY)
    if isinstance(agent, str):
        config = replace(config, agent=replace(config.agent, path=agent))
    elif agent is not None:
        raise ConfigError(f"{KEY} = {config.runner.executor!r}: give the agent in the run file")
    executor = make(config, root, gateway, runner)
    check_protocol(executor, Executor, source=make, key=KEY)
    for name in ("sealed", "limit"):
        if not hasattr(executor, name):
            raise ConfigError(f"{KEY}: {where(make)} returned an executor without {name!r}")
    if not executor.sealed:
        _refuse_network(config)
    return cast("Executor", executor)


def _refuse(config: RunConfig, instead: str) -> NoReturn:
    """Raise ConfigError for an agent that is an object or a path, and has to be a process."""
    raise ConfigError(
        f"runner.executor = {config.runner.executor!r}: the agent runs in a process of its own;"
        f" give it in the run file as agent.{instead}"
    )


def _refuse_network(config: RunConfig) -> None:
    """Refuse a gateway on the network for agents without keys: it could not distinguish calls."""
    if not is_loopback(config.runner.host):
        raise ConfigError(
            f"runner.host = {config.runner.host!r}: with {KEY} = {config.runner.executor!r} agents"
            " have no key of their own, so the gateway may serve this machine only"
        )
