"""The executor that a run file asks for."""

from __future__ import annotations

from pathlib import Path

from agentrl.addresses import is_loopback
from agentrl.config import (
    ContainerRunnerConfig,
    KubernetesRunnerConfig,
    PoolRunnerConfig,
    RunConfig,
)
from agentrl.errors import ConfigError
from agentrl.runners.executors import Executor, agents
from agentrl.runners.executors.command import Command
from agentrl.runners.executors.container import Container
from agentrl.runners.executors.inprocess import InProcess
from agentrl.runners.executors.pool import Pool


def choose(
    config: RunConfig, *, root: Path, gateway: str, runner: str, agent: object = None
) -> Executor:
    """`agent` is an object of this process, or "file.py:name", that takes the place of the run
    file's; `gateway` is the base URL for agents on this machine, `runner` this runner's name.

    Raises ConfigError or AgentError when agent and executor do not fit."""
    runner_settings = config.runner
    kind = runner_settings.executor
    path = agent if isinstance(agent, str) else config.agent.path
    command = "" if agent else config.agent.command
    if path and command:
        raise ConfigError("agent.path and agent.command: which of the two is the agent?")
    if kind == "auto":
        kind = "command" if command else "async"
    if kind in ("async", "threads", "pool"):
        if not is_loopback(config.runner.host):
            raise ConfigError(
                f"runner.host = {config.runner.host!r}: agents of this process have no key of their"
                f" own, so with runner.executor = {kind!r} the gateway listens to this machine only"
            )
        if command:
            raise ConfigError(f"runner.executor = {kind!r} runs agent.path, not agent.command")
        if agent is None or isinstance(agent, str):
            return _python(config, kind, path, root)
        if kind != "pool":
            return InProcess(agents.as_agent(agent), threaded=kind == "threads")
    if agent or path:
        raise ConfigError(
            f"runner.executor = {kind!r}: the agent runs in a process of its own; give it in the"
            f" run file as {'agent.path' if kind == 'pool' else 'agent.command'}"
        )
    if kind == "command":
        return Command(config.agent, config.runner, root=root, gateway=gateway)
    if isinstance(runner_settings, ContainerRunnerConfig):
        return Container(config.agent, runner_settings, gateway=gateway)
    if not isinstance(runner_settings, KubernetesRunnerConfig):
        raise ConfigError(f"runner.executor = {kind!r} cannot be loaded here")
    from agentrl.runners.executors.kubernetes import Kubernetes  # an extra

    return Kubernetes(
        config.agent,
        runner_settings,
        root=root,
        gateway=gateway,
        name=runner,
        run=f"{config.name} {config.store} {config.output}",  # rollouts are named alike elsewhere
    )


def _python(config: RunConfig, kind: str, path: str, root: Path) -> Executor:
    if not path:
        raise ConfigError("agent.path is missing: write it as file.py:name")
    if isinstance(config.runner, PoolRunnerConfig):
        return Pool(path, config.agent, config.runner, root=root)
    return InProcess(agents.as_agent(agents.load(path, root)), threaded=kind == "threads")
