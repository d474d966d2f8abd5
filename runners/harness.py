"""Coding harnesses: presets, which point an unmodified harness at the gateway, and their executor.

A preset is data: arguments and environment variables of the program, contents of its configuration
files, tested versions, and rules for auxiliary calls, which do not belong to the agent. The
built-in ones are `harnesses/NAME.toml`; a custom preset is a TOML file with the same keys, or a
`file.py:name` that is a `Preset` or a dict with these keys.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from agentrl.core import processes
from agentrl.core.config import RoleRule, RunConfig
from agentrl.core.errors import ConfigError, nearest
from agentrl.core.loading import load_attribute
from agentrl.core.types import INSTRUCTION_ROLES, ErrorKind, Json
from agentrl.runners.executors import command, input_of
from agentrl.runners.executors.command import CommandExecutor, FailedAttemptError
from agentrl.runners.gateway.attribution import ActiveAttempt

KEY = "agent.harness"
HERE = Path(__file__).with_name("harnesses")
HARNESSES = {file.stem: file for file in sorted(HERE.glob("*.toml"))}
INSTALLED = ".harnesses"  # folder in the working directory where tests install harnesses
VERSION = re.compile(r"\d+(\.\d+)+")
CONTEXT = 32_768  # tokens of the model's context that a harness assumes
VERSION_TIMEOUT = 30.0  # seconds
PLACEHOLDER = re.compile(r"\{(prompt|url|root|key|home|context)\}")


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Placeholders in texts: {prompt}, {url} (of the gateway, ending in /v1), {root} (the URL
    without /v1), {key} and {home} (of the attempt) and {context} (tokens)."""

    program: str
    argv: list[str]  # arguments of the program
    install: str = ""  # command that installs it
    tested: tuple[str, str] | None = None  # first and last tested version
    env: dict[str, str] = {}
    files: dict[str, str] = {}  # path below HOME -> text
    match: list[RoleRule] = []  # rules for roles of auxiliary calls

    def find_program(self, command: str = "") -> str:
        """Return the absolute path of `command`, by default the installed program. Raises
        ConfigError."""
        path = shutil.which(command or self.program)
        if path is None and command in ("", self.program):
            path = shutil.which(f"{INSTALLED}/bin/{self.program}")
        if path is None:
            how = f": {self.install}" if self.install else ""
            raise ConfigError(
                f"{KEY}: {command or self.program!r} is not installed on this machine{how}; or set"
                " agent.command to its path"
            )
        return str(Path(path).absolute())

    def filled(self, *, url: str, key: str, home: Path, prompt: str, context: int) -> Preset:
        """Return a copy with the placeholders replaced; `url` ends in /v1."""
        values = {"url": url, "root": url.removesuffix("/v1"), "key": key, "home": str(home)}
        values |= {"prompt": prompt, "context": str(context)}
        fill = partial(PLACEHOLDER.sub, lambda found: values[found[1]])
        env, files = ({k: fill(v) for k, v in texts.items()} for texts in (self.env, self.files))
        return replace(self, argv=[*map(fill, self.argv)], env=env, files=files)

    def write_files(self, home: Path) -> None:
        """Write the configuration files below `home`."""
        for name, text in self.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text, encoding="utf-8")

    def was_tested(self, version: str) -> bool:
        if self.tested is None:
            return True
        first, last = map(_numbers, self.tested)
        return first <= _numbers(version) <= last


def load_preset(name: str, root: Path) -> Preset:
    """Load a preset by name, or from a file relative to `root`. Raises ConfigError."""
    if name.endswith(".toml"):
        return _read(root / name)
    if ":" in name:
        loaded = load_attribute(name, root, key=KEY)
        return loaded if isinstance(loaded, Preset) else _typed(loaded, name)
    if name not in HARNESSES:
        near = nearest(name, HARNESSES)
        raise ConfigError(f"{KEY} = {name!r}; {near}, or your own as file.py:name")
    return _read(HARNESSES[name])


def prompt_of(task_input: Json) -> str:
    """Return the prompt for the harness: the task's input, or the texts of its chat messages if
    only a system and a user speak, else JSON."""
    if isinstance(task_input, str):
        return task_input
    if isinstance(task_input, list) and task_input and all(map(_asks, task_input)):
        return "\n\n".join(message["content"] for message in task_input)
    return msgspec.json.encode(task_input).decode()


def _asks(message: Json) -> bool:
    is_input = isinstance(message, dict) and message.get("role") in (*INSTRUCTION_ROLES, "user")
    return is_input and isinstance(message.get("content"), str)


async def version_of(program: str, home: Path) -> str:
    """Return the version that `program --version` prints; empty if it prints none in time."""
    env = {"PATH": os.environ.get("PATH", ""), "HOME": str(home)}
    how: Any = {"env": env, "timeout": VERSION_TIMEOUT, "stdin": subprocess.DEVNULL}
    how |= {"capture_output": True, "check": False, "errors": "replace"}
    try:
        completed = await processes.call(partial(subprocess.run, [program, "--version"], **how))
    except subprocess.TimeoutExpired:
        return ""
    version = VERSION.search(completed.stdout or completed.stderr)
    return version[0] if version else ""


def _read(file: Path) -> Preset:
    try:
        return _typed(tomllib.loads(file.read_text(encoding="utf-8")), str(file))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{KEY}: {file} is not a readable TOML file: {error}") from None


def _typed(data: Any, name: str) -> Preset:
    try:
        return msgspec.convert(data, Preset)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{KEY} = {name!r}: {error}") from None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


log = logging.getLogger("agentrl.runner")


class HarnessExecutor(CommandExecutor):
    """Starts the program of a preset for each attempt, with a separate HOME."""

    def __init__(self, config: RunConfig, preset: Preset, *, root: Path, gateway: str) -> None:
        super().__init__(config.agent, config.runner, root=root, gateway=gateway)
        self._preset = preset

    async def start(self) -> None:
        """Warn if the program's version is untested. Raises ConfigError if it is not installed."""
        preset = self._preset
        program = preset.find_program(*self.argv[:1])
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            version = await version_of(program, Path(home))
        if not preset.was_tested(version):
            log.warning(
                "%s is version %s, and its preset was tested with %s: check its requests with"
                " `agentrl harness %s`",
                *(program, version or "?", " to ".join(preset.tested or ()), self.agent.harness),
            )
        self._more, self.argv = self.argv[1:], [program]
        await super().start()

    def _command(
        self, active: ActiveAttempt, env: dict[str, str], home: Path, works_in: Path
    ) -> list[str]:
        prompt = prompt_of(input_of(active))
        if "\0" in prompt or len(prompt.encode()) > command.MAX_VARIABLE_BYTES:
            why = f"the task is too long for an argument of {self._preset.program}, or has a NUL"
            raise FailedAttemptError(ErrorKind.AGENT, why)
        values = {"url": self.gateway, "key": active.key, "prompt": prompt}
        preset = self._preset.filled(home=home, context=CONTEXT, **values)
        home.mkdir(parents=True, exist_ok=True)
        preset.write_files(home)
        env |= command.private_folders(str(home), works_in) | preset.env | self.agent.env
        return [*self.argv, *preset.argv, *self._more]
