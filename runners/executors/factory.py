"""Creates the executor that a run file selects."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from agentrl.base.access import is_loopback
from agentrl.config import PoolRunnerConfig, RunConfig
from agentrl.config.infrastructure import EXECUTORS
from agentrl.errors import ConfigError
from agentrl.plugins import check_call, check_protocol, load_plugin, where
from agentrl.runners.executors import Executor, contract
from agentrl.runners.executors.command import CommandExecutor
from agentrl.runners.executors.inprocess import InProcessExecutor, as_agent, load
from agentrl.runners.executors.pool import PoolExecutor

KEY = "runner.executor"


def make_executor(
    config: RunConfig,
    *,
    root: Path,
    gateway: str,
    runner: str,
    agent: object = None,
    harness: Executor | None = None,
) -> Executor:
    """Create the run's executor. `agent`: an object or "file.py:name" that replaces the run file's
    agent. `gateway`: base URL for agents on this machine. `runner`: this runner's name. `harness`:
    runs `agent.harness` on this machine.

    Raises ConfigError or AgentError if agent and executor do not fit."""
    settings = config.runner
    kind = settings.executor
    make = load_plugin("executors", kind, EXECUTORS, root, key=KEY)
    path = agent if isinstance(agent, str) else config.agent.path
    own = None if isinstance(agent, str) else agent
    command = "" if agent else config.agent.harness or config.agent.command
    if path and command and (make is None or settings.runs_commands):
        other = "harness" if config.agent.harness else "command"
        raise ConfigError(f"agent.path and agent.{other} are both set: leave one out")
    if settings.runs_commands and (agent or path):
        contract.refuse_path(config)
    if make is not None:
        return _plugin(make, config, root, gateway, runner, agent)
    if kind == "auto":
        kind = "command" if command else "async"
    if kind in ("async", "threads", "pool"):
        _refuse_network(config)
        if command:
            raise ConfigError(f"runner.executor = {kind!r} runs agent.path, not agent.command")
        if own is None and not path:
            raise ConfigError("agent.path is missing: write it as file.py:name")
        if kind != "pool":
            loaded = load(path, root) if own is None else own
            return InProcessExecutor(as_agent(loaded), threaded=kind == "threads")
        if own is None:
            assert isinstance(settings, PoolRunnerConfig)
            return PoolExecutor(path, config.agent, settings, root=root)
        contract.refuse_path(config, "path")
    return harness or CommandExecutor(config.agent, settings, root=root, gateway=gateway)


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
    check_protocol(executor, Executor, by=make, key=KEY)
    for name in ("sealed", "limit"):
        if not hasattr(executor, name):
            raise ConfigError(f"{KEY}: {where(make)} returned an executor without {name!r}")
    if not executor.sealed:
        _refuse_network(config)
    return cast("Executor", executor)


def _refuse_network(config: RunConfig) -> None:
    """Refuse a gateway on the network for agents without keys: it could not tell calls apart."""
    if not is_loopback(config.runner.host):
        raise ConfigError(
            f"runner.host = {config.runner.host!r}: with {KEY} = {config.runner.executor!r} agents"
            " have no key of their own, so the gateway may listen to this machine only"
        )
