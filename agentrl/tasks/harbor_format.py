"""Harbor's task folders, in the format of Harbor 0.25 (`schema_version` 1.4).

A folder has `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`, and `steps/NAME/`
for each of several steps. Keys of `task.toml` that are not named here do not change how a task
runs. Only paths and settings are read here; files stay where they are, so they may be binary.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentrl.core.errors import ConfigError

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
    memory: str | int | None = None  # in older tasks: "2G"
    storage: str | int | None = None
    os: str = "linux"
    gpus: int | None = None
    tpu: Any = None
    healthcheck: Healthcheck | None = None
    build_timeout_sec: float = 600.0
    network_mode: Network | None = None
    allow_internet: bool | None = None  # in older tasks
    mcp_servers: list[Any] = []

    def __post_init__(self) -> None:
        if min(self.limits) < 0:
            raise ValueError("memory and storage of a container must not be below 0")

    @property
    def network(self) -> Network:
        return self.network_mode or ("no-network" if self.allow_internet is False else "public")

    @property
    def limits(self) -> tuple[int, int]:
        """Megabytes of memory and of disk; 0: not set. Raises ValueError."""
        memory = _megabytes("memory", self.memory) if self.memory_mb is None else self.memory_mb
        disk = _megabytes("storage", self.storage) if self.storage_mb is None else self.storage_mb
        return memory, disk


def _megabytes(key: str, size: str | int | None) -> int:
    if size is None:
        return 0
    if (match := SIZE.fullmatch(str(size).strip())) is None:
        raise ValueError(f"[environment] {key} = {size!r}: write it as '2G' or '512M'")
    return int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2].upper()])


class Artifact(msgspec.Struct, frozen=True):
    """A path that is copied from the agent's container to a separate verifier."""

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
    name: str = ""  # name of the task's folder
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[str | Artifact] = []


class SolutionTable(msgspec.Struct, frozen=True):
    env: dict[str, str] = {}


class TaskFile(msgspec.Struct, frozen=True):
    """The whole of task.toml."""

    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: Machine = Machine()
    solution: SolutionTable = SolutionTable()
    steps: list[StepTable] = []
    artifacts: list[str | Artifact] = []
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"


TASK, DOCKERFILE = "task.toml", "Dockerfile"
COMPOSE = ("docker-compose.yaml", "docker-compose.yml")
IGNORED = {".git", "__pycache__", ".DS_Store"}  # names that do not change a task
CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
ARTIFACTS = "/logs/artifacts"  # always an artifact
VERIFIER_SECONDS = 600.0


@dataclass(frozen=True)
class ContainerImage:
    """The source of a container: an image's name, or a folder to build."""

    name: str = ""
    folder: Path | None = None
    files: Path | None = None  # copied into the working directory of a named image


@dataclass(frozen=True)
class Judge:
    """A verifier's own container, which the agent never touches."""

    image: ContainerImage
    machine: Machine
    network: Network
    has_tests: bool  # whether the image contains /tests


@dataclass(frozen=True)
class HarborStep:
    """An instruction to the agent, and its verifier. A task without `[[steps]]` is one step without
    a name."""

    name: str
    instruction: str
    files: Path | None  # copied into the working directory before the agent begins
    tests: tuple[Path, ...]  # copied to /tests in this order
    solution: Path
    seconds: float | None  # for the agent
    user: User
    healthcheck: Healthcheck | None
    min_reward: Mapping[str, float]  # below it, later steps are skipped
    verifier: VerifierTable  # with the task's settings where the step has none
    judge: Judge | None  # None: the tests run in the agent's container
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True)
class HarborTask:
    """A task that can be run."""

    id: str  # path below the folder of tasks
    folder: Path
    about: TaskFile
    image: ContainerImage
    network: Network  # of the agent's container
    steps: tuple[HarborStep, ...]
    variables: tuple[str, ...] = ()  # patterns of the environment variables that it may read

    @property
    def digest(self) -> str:
        return digest_of(self.folder)


class UnsupportedTask(ConfigError):
    """The task is valid, but cannot be run here."""


def task_folders(folder: Path) -> dict[str, Path]:
    """The tasks in a folder by their ids: their paths below it. Raises ConfigError if there is
    none."""
    files = sorted(folder.glob(f"**/{TASK}")) if folder.is_dir() else []
    tasks: dict[str, Path] = {}
    for parent in (file.parent for file in files):
        if not any(above in tasks.values() for above in parent.parents):  # a task's own files
            tasks[parent.relative_to(folder).as_posix() if parent != folder else parent.name] = (
                parent
            )
    if not tasks:
        raise ConfigError(f"{folder} has no Harbor task: a folder with a {TASK}")
    return tasks


def read_task(folder: Path, id: str, variables: Collection[str] = ()) -> HarborTask:
    """`variables`: patterns of this machine's environment variables that the task may read. Raises
    ConfigError for an invalid task, and its subclass UnsupportedTask for a valid one that cannot be
    run here."""
    try:
        _check_links(folder)
        about = _table(folder)
        if about.environment.os.lower() != "linux":
            raise UnsupportedTask(
                f"the Harbor task {id!r} is for {about.environment.os}, not for Linux"
            )
        tables = about.steps or [StepTable()]
        steps = tuple(_step(folder, about, table) for table in tables)
        network = next(iter(_networks(about, steps)))
        for reason in _unsupported(folder, about, steps):
            raise UnsupportedTask(f"the Harbor task {id!r} {reason}")
        image = _image(folder, about)
        return HarborTask(id, folder, about, image, network, steps, tuple(variables))
    except (OSError, ValueError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{folder} is not a Harbor task: {error}") from None


def _check_links(folder: Path) -> None:
    """Raises ValueError for a link that leads out of the folder: this machine's own files would be
    read as the task's."""
    root = folder.resolve()
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise ValueError(f"the link {path.relative_to(folder)} leads out of its folder")


def digest_of(folder: Path) -> str:
    """A digest of the names, the executable bits and the bytes of a folder's files."""
    hasher = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not IGNORED.intersection(path.relative_to(folder).parts):
            with path.open("rb") as file:
                file_digest = hashlib.file_digest(file, "sha256").hexdigest()
            hasher.update(f"{name}\0{os.access(path, os.X_OK)}\0{file_digest}\0".encode())
    return hasher.hexdigest()


def resolved(variables: Mapping[str, str], allowed: Collection[str]) -> dict[str, str]:
    """Variables with `${NAME}` and `${NAME:-default}` replaced by those of this machine that match
    one of the patterns `allowed`; others have their default. Raises ConfigError for one without a
    default that is not set, or not allowed."""
    result = {}
    for key, value in variables.items():
        if match := VARIABLE.fullmatch(value):
            default: str | None = match[2]
            name = match[1]
            is_allowed = any(fnmatchcase(name, pattern) for pattern in allowed)
            if default is None and not is_allowed:
                raise ConfigError(
                    f"the task asks for the variable {name} of this machine; to allow it, set"
                    f" environment_options.variables = [{json.dumps(name)}]"
                )
            if default is None and name not in os.environ:
                raise ConfigError(f"the task needs the variable {name}, which is not set here")
            value = (os.environ.get(name, default) if is_allowed else default) or ""
        result[key] = value
    return result


def _table(folder: Path) -> TaskFile:
    data = tomllib.loads((folder / TASK).read_text(encoding="utf-8"))
    return msgspec.convert(data, TaskFile, strict=False)


def _instruction(file: Path) -> str:
    """The text without a leading canary, which marks test data and is not for the agent."""
    lines = file.read_text(encoding="utf-8").split("\n")
    while lines and CANARY.match(lines[0].strip()):
        lines = lines[1:]
    return "\n".join(lines) if len(lines) < 2 or lines[0].strip() else "\n".join(lines).lstrip("\n")


def _step(folder: Path, about: TaskFile, step: StepTable) -> HarborStep:
    step_folder = folder
    if about.steps:
        if step.name in ("", ".", "..") or "/" in step.name or "\0" in step.name:
            raise ValueError(f"the name of a step must be that of a folder, not {step.name!r}")
        step_folder = folder / "steps" / step.name
    verifier = _verifier(about.verifier, step.verifier)
    judge = _judge(folder, step_folder, about, step, verifier)
    tests = tuple(dict.fromkeys((folder / "tests", step_folder / "tests")))
    if not (judge and judge.has_tests) and not any((test / "test.sh").is_file() for test in tests):
        raise ValueError(f"there is no {step_folder.relative_to(folder) / 'tests/test.sh'}")
    solution = step_folder / "solution"
    min_reward = {} if step.min_reward is None else step.min_reward
    entries = [*about.artifacts, *step.artifacts]
    listed = [Artifact(entry) if isinstance(entry, str) else entry for entry in entries]
    if not any(artifact.source.rstrip("/") == ARTIFACTS for artifact in listed):
        listed.insert(0, Artifact(ARTIFACTS))
    if wrong := next(
        (artifact.source for artifact in listed if ".." in artifact.source.split("/")), ""
    ):
        raise ValueError(f"an artifact leads out of its folder: {wrong!r}")
    return HarborStep(
        name=step.name,
        instruction=_instruction(step_folder / "instruction.md"),
        files=step_folder / "workdir" if step.name else None,
        tests=tests,
        solution=solution if solution.is_dir() else folder / "solution",
        seconds=_first(step.agent.timeout_sec, about.agent.timeout_sec),
        user=about.agent.user if step.agent.user is None else step.agent.user,
        healthcheck=step.healthcheck,
        min_reward=min_reward if isinstance(min_reward, dict) else {"reward": min_reward},
        verifier=verifier,
        judge=judge,
        artifacts=tuple(listed),
    )


def _verifier(task: VerifierTable, step: VerifierTable) -> VerifierTable:
    """A step's settings, with the task's where it has none."""
    return VerifierTable(
        timeout_sec=_first(step.timeout_sec, task.timeout_sec) or VERIFIER_SECONDS,
        env={**task.env, **step.env},
        user=task.user if step.user is None else step.user,
        environment_mode=step.mode or task.mode or "shared",
        environment=step.environment or task.environment,
        collect=[*task.collect, *step.collect],
        network_mode=step.network_mode or task.network_mode,
    )


def _judge(
    folder: Path, step_folder: Path, about: TaskFile, step: StepTable, verifier: VerifierTable
) -> Judge | None:
    """The separate container of the verifier. Its image is that of the step's or the task's
    verifier, or is built from their tests, or is that of the agent."""
    if verifier.environment_mode == "shared":
        return None
    machine = verifier.environment or about.environment
    network = verifier.network_mode or machine.network
    levels = [(about.verifier.environment, folder / "tests")]
    if step.name:
        levels.insert(0, (step.verifier.environment, step_folder / "tests"))
    for verifier_machine, tests in levels:
        if verifier_machine is not None and verifier_machine.docker_image:
            return Judge(
                ContainerImage(verifier_machine.docker_image), machine, network, has_tests=True
            )
        if (tests / DOCKERFILE).is_file():
            return Judge(ContainerImage(folder=tests), machine, network, has_tests=True)
    return Judge(_image(folder, about), machine, network, has_tests=False)


def _image(folder: Path, about: TaskFile) -> ContainerImage:
    environment = folder / "environment"
    built = (environment / DOCKERFILE).is_file()
    if name := about.environment.docker_image:
        files = environment.is_dir() and not built and any(environment.iterdir())
        return ContainerImage(name, files=environment if files else None)
    if not built and not any((environment / name).is_file() for name in COMPOSE):
        raise ValueError(
            f"it has no environment: write environment/{DOCKERFILE}, or docker_image in"
            " [environment]"
        )
    return ContainerImage(folder=environment)


def _networks(about: TaskFile, steps: tuple[HarborStep, ...]) -> set[Network]:
    """The networks that the agent's container would need one after another; a container has only
    one."""
    base = about.agent.network_mode or about.environment.network
    needed = {table.agent.network_mode or base for table in about.steps} or {base}
    for step in steps:
        if step.judge is None:
            needed.add(step.verifier.network_mode or about.environment.network)
        if (
            (step.files and step.files.is_dir())
            or step.healthcheck
            or about.environment.healthcheck
        ):
            needed.add(about.environment.network)
    return needed


def _unsupported(folder: Path, about: TaskFile, steps: tuple[HarborStep, ...]) -> Iterator[str]:
    """Why a task cannot be run here; each continues the sentence "the task ..."."""
    judges = [step.judge for step in steps if step.judge]
    folders = {folder / "environment", *(j.image.folder for j in judges if j.image.folder)}
    compose = [parent / name for parent in folders for name in COMPOSE if (parent / name).is_file()]
    services = {artifact.service for step in steps for artifact in step.artifacts} | {
        command.service for step in steps for command in step.verifier.collect
    }
    if compose or services - {None, "main"}:
        yield "needs several containers (docker-compose), which are not started here"
    for machine in (about.environment, *(judge.machine for judge in judges)):
        if machine.os.lower() != "linux":
            yield f"is judged in a container of {machine.os}, not of Linux"
        if machine.gpus or machine.tpu:
            yield "needs a GPU or TPU in its container, which is not passed on"
        if machine.mcp_servers:
            yield "offers its agent MCP servers, which are not passed on to agents here"
    networks = _networks(about, steps)
    if "allowlist" in networks | {judge.network for judge in judges}:
        yield "limits its network to some hosts; only 'public' and 'no-network' are supported here"
    if len(networks) > 1:
        yield (
            "needs another network for its verifier or its setup than for its agent, in one"
            " container; give the verifier its own (environment_mode = 'separate')"
        )
    if (folder / "trajectory.json").is_file():
        yield "begins with an earlier conversation (trajectory.json), which is not given to agents"


def _first(step: float | None, task: float | None) -> float | None:
    return task if step is None else step
