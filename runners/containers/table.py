"""The tables [runner.container] and [runner.kubernetes] of the run file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from agentrl.base.parts import missing
from agentrl.config.base import Natural, NonNegative, Section
from agentrl.config.infrastructure import Enclosure, RunnerConfig

# Variables of docker's command line, and of podman's
CLIENT = ("DOCKER_*", "CONTAINER_*", "CONTAINERS_*", "BUILDAH_*", "REGISTRY_*", "XDG_RUNTIME_DIR")


class ContainerConfig(Section, frozen=True):
    """A container for each rollout, for `executor = "container"`."""

    image: str  # image with the agent and a shell, `sh`
    # Network of `docker run`. none: nothing but the gateway; bridge: the internet; host: this
    # machine's
    network: str = "none"
    options: list[str] = []  # additional arguments of `docker run`
    # Program that runs containers: docker, podman or a compatible one; default: the first of both
    # that works.
    cli: str = ""
    warm: Natural = 8  # containers that are ready before rollouts need them
    pids: Natural = 512  # processes and threads in a container; 0: no limit
    cpus: NonNegative = 0.0  # cores that a container may use; 0: no limit
    disk_mb: Natural = 10_000  # Disk in MB that a rollout may write; 0: no limit.


class KubernetesConfig(Section, frozen=True):
    """A Job for each rollout, for `executor = "kubernetes"`."""

    image: str = ""  # image with the agent; default: the template's
    namespace: str = "default"  # Namespace of the Jobs.
    # Context of the kubeconfig; default: the current one, or the runner's own pod.
    context: str = ""
    template: str = ""  # YAML or JSON file of a Job to start from, relative to the run file
    ttl: Natural = 300  # seconds for which a finished Job is kept


class SandboxRunnerConfig(RunnerConfig, frozen=True):
    """Settings of both."""

    runs_commands: ClassVar[bool] = True

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if why := missing("executors", "command"):
            yield f"runner.executor = {self.executor!r} starts commands; {why}"


class ContainerRunnerConfig(SandboxRunnerConfig, frozen=True, kw_only=True, tag="container"):
    """The agent runs in a container for each rollout."""

    container: ContainerConfig  # image and options

    def enclosure(self, name: str, folder: str, env: Mapping[str, str]) -> Enclosure | None:
        """A container of the agent's image without network. If this process is killed, and nobody
        removes it, the next keeper does."""
        from agentrl.runners.containers.cli import working_program  # only in runners
        from agentrl.runners.containers.keeper import LABEL, owner_of

        own = self.container
        cli = own.cli or working_program("")
        argv = [cli, "run", "--rm", "--init", "--name", name, "--network", "none"]
        argv += ["--label", f"{LABEL}={owner_of(os.getpid())}"]
        argv += limits(self.memory_mb, own.cpus, own.pids)
        argv += ["--volume", f"{folder}:{folder}", "--workdir", env["PWD"]]
        for key, value in env.items():
            argv += ["--env", f"{key}={value}"]
        prefix = [*argv, *own.options, own.image]
        return Enclosure(prefix, CLIENT, [cli, "rm", "--force", name])


def limits(memory_mb: int, cpus: float, pids: int) -> list[str]:
    """Return the options of `docker run` for these; 0 is no limit."""
    memory = [f"--memory={memory_mb}m", f"--memory-swap={memory_mb}m"] if memory_mb else []
    more = [f"--cpus={cpus:g}"] if cpus else []
    return [*memory, *more, *([f"--pids-limit={pids}"] if pids else [])]


class KubernetesRunnerConfig(SandboxRunnerConfig, frozen=True, tag="kubernetes"):
    """The agent runs in a Job for each rollout."""

    kubernetes: KubernetesConfig = KubernetesConfig()
