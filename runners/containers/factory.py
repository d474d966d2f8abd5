"""Make the executors. Only the one that a run file selects is imported, by its runners alone: the
client of Kubernetes is an extra."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.infrastructure import ContainerRunnerConfig, KubernetesRunnerConfig
from agentrl.runners.executors import Executor


def container(config: RunConfig, root: Path, gateway: str, runner: str) -> Executor:
    from agentrl.runners.containers.container import ContainerExecutor

    assert isinstance(config.runner, ContainerRunnerConfig)
    return ContainerExecutor(config.agent, config.runner, root=root, gateway=gateway)


def kubernetes(config: RunConfig, root: Path, gateway: str, runner: str) -> Executor:
    from agentrl.runners.containers.kubernetes import KubernetesExecutor

    assert isinstance(config.runner, KubernetesRunnerConfig)
    run = f"{config.name} {config.store} {config.output}"  # rollout ids are not unique across runs
    return KubernetesExecutor(
        config.agent, config.runner, root=root, gateway=gateway, name=runner, run=run
    )
