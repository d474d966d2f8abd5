"""`task.toml` of a Harbor task. Keys that are not named here do not change how a task runs."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

SIZE = re.compile(r"([\d.]+) *([GMK])B?", re.IGNORECASE)
Network = Literal["public", "no-network", "allowlist"]
User = str | int | None


class Healthcheck(msgspec.Struct, frozen=True):
    """A command that must succeed before the agent begins, as Docker's HEALTHCHECK."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class Machine(msgspec.Struct, frozen=True):
    """A container: `[environment]` or `[verifier.environment]`."""

    docker_image: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | int | None = None  # of older tasks: "2G"
    storage: str | int | None = None
    os: str = "linux"
    gpus: int | None = None
    tpu: Any = None
    healthcheck: Healthcheck | None = None
    build_timeout_sec: float = 600.0
    network_mode: Network | None = None
    allow_internet: bool | None = None  # of older tasks
    mcp_servers: list[Any] = []

    def __post_init__(self) -> None:
        if min(self.limits) < 0:
            raise ValueError("memory and storage of a container must not be below 0")

    @property
    def network(self) -> Network:
        return self.network_mode or ("no-network" if self.allow_internet is False else "public")

    @property
    def limits(self) -> tuple[int, int]:
        """Megabytes of memory and of disk; 0: it says nothing. Raises ValueError."""
        memory = _megabytes("memory", self.memory) if self.memory_mb is None else self.memory_mb
        disk = _megabytes("storage", self.storage) if self.storage_mb is None else self.storage_mb
        return memory, disk


def _megabytes(key: str, size: str | int | None) -> int:
    if size is None:
        return 0
    if (found := SIZE.fullmatch(str(size).strip())) is None:
        raise ValueError(f"[environment] {key} = {size!r}: write it as '2G' or '512M'")
    return int(float(found[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[found[2].upper()])


class Artifact(msgspec.Struct, frozen=True):
    """What a separate verifier gets from the agent's container."""

    source: str
    exclude: list[str] = []
    service: str | None = None


class Collect(msgspec.Struct, frozen=True):
    """A command that saves state before artifacts are collected."""

    command: str
    service: str = "main"
    timeout_sec: float = 60.0
    user: User = None


class AgentTable(msgspec.Struct, frozen=True):
    timeout_sec: float | None = None
    user: User = None
    network_mode: Network | None = None


class VerifierTable(msgspec.Struct, frozen=True):
    timeout_sec: float | None = None
    env: dict[str, str] = {}
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Machine | None = None
    collect: list[Collect] = []
    network_mode: Network | None = None

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        return self.environment_mode or ("separate" if self.environment else None)


class StepTable(msgspec.Struct, frozen=True):
    name: str = ""  # of its folder
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[str | Artifact] = []


class SolutionTable(msgspec.Struct, frozen=True):
    env: dict[str, str] = {}


class TaskFile(msgspec.Struct, frozen=True):
    """All of it."""

    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: Machine = Machine()
    solution: SolutionTable = SolutionTable()
    steps: list[StepTable] = []
    artifacts: list[str | Artifact] = []
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
