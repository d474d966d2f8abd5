"""The tables [runner.container] and [runner.kubernetes] of the run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from agentrl.base.parts import missing
from agentrl.config.base import Natural, Section
from agentrl.config.infrastructure import Enclosure, RunnerConfig

# Variables of docker's command line, and of podman's
CLIENT = ("DOCKER_*", "CONTAINER_*", "CONTAINERS_*", "BUILDAH_*", "REGISTRY_*", "XDG_RUNTIME_DIR")


class ContainerConfig(Section, frozen=True):
    """A container for each rollout, for `executor = "container"`."""

    image: str  # image with the agent
    network: str = ""  # of `docker run`; "host" gives access to the gateway's loopback address
    options: list[str] = []  # additional arguments of `docker run`
    cli: str = "docker"  # or podman


class KubernetesConfig(Section, frozen=True):
    """A Job for each rollout, for `executor = "kubernetes"`."""

    image: str = ""  # image with the agent; default: the template's
    namespace: str = "default"  # of the Jobs
    context: str = ""  # of the kubeconfig; default: the current one, or the runner's own pod
    template: str = ""  # YAML or JSON file of a Job to start from, relative to the run file
    ttl: Natural = 300  # seconds for which a finished Job is kept


class SandboxRunnerConfig(RunnerConfig, frozen=True):
    """Settings of both."""

    runs_commands: ClassVar[bool] = True

    def problems(self, config: Any) -> Iterator[str]:
        if why := missing("executors", "command"):
            yield f"runner.executor = {self.executor!r} starts commands; {why}"


class ContainerRunnerConfig(SandboxRunnerConfig, frozen=True, kw_only=True, tag="container"):
    """The agent runs in a container for each rollout."""

    container: ContainerConfig  # image and options

    def enclosure(self, name: str, folder: str, env: Mapping[str, str]) -> Enclosure | None:
        """A container of the agent's image without network."""
        own = self.container
        argv = [own.cli, "run", "--rm", "--init", "--name", name, "--network", "none"]
        argv += ["--volume", f"{folder}:{folder}", "--workdir", env["PWD"]]
        for key, value in env.items():
            argv += ["--env", f"{key}={value}"]
        prefix = [*argv, *own.options, own.image]
        return Enclosure(prefix, CLIENT, [own.cli, "rm", "--force", name])


class KubernetesRunnerConfig(SandboxRunnerConfig, frozen=True, tag="kubernetes"):
    """The agent runs in a Job for each rollout."""

    kubernetes: KubernetesConfig = KubernetesConfig()
