"""Settings that follow from others of a run file: what an environment's name stands for, and how a
live run trains.

What an environment contributes to a run is a reference, `environment:WHICH:PLUGIN:WHAT {...}`, as
which a run's settings have it: `agent.path`, `tasks.train`, `tasks.heldout` and `verifier.path`. So
all that reads these needs to know no environments. WHICH is agent, train, heldout or verifier; the
JSON at the end has `[environment_options]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError

SCHEME = "environment"
SPLITS = ("train", "heldout")
UNBOUNDED = 10**9  # steps of a live run, which trains until it is stopped


class Named(msgspec.Struct, frozen=True):
    """An environment as the run file names it."""

    plugin: str  # of an entry point, or "file.py:Class"
    what: str
    options: str = "{}"  # JSON, with `python`
    root: str = "."  # the run file's folder

    @classmethod
    def read(cls, name: str, options: dict[str, Any], root: str | Path = ".") -> Named:
        """Raises ConfigError for a name without a plug-in."""
        plugin, colon, what = name.partition(":")
        if plugin.endswith(".py"):
            class_, colon, what = what.partition(":")
            plugin = f"{plugin}:{class_}"
        if not (colon and plugin):
            raise ConfigError(f'environment = {name!r}: write it as "PLUGIN:WHAT"')
        return cls(plugin, what, msgspec.json.encode(options, order="sorted").decode(), str(root))

    @property
    def name(self) -> str:
        """For messages, and in the result of a rollout."""
        return f"{self.plugin}:{self.what}"

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of the plug-in's constructor."""
        return {key: value for key, value in self.all_options.items() if key != "python"}

    @property
    def all_options(self) -> dict[str, Any]:
        return msgspec.json.decode(self.options, type=dict[str, Any])

    @property
    def folder(self) -> str:
        """Of its own interpreter, by default."""
        return f".venv-{Path(self.plugin.partition(':')[0]).stem}"

    @property
    def python(self) -> str:
        """Its own interpreter, or "" if it runs in this one."""
        root, given = Path(self.root), self.all_options.get("python")
        if given is not None:
            return str((root / given).absolute())  # a link into a venv stays one
        found = (folder / self.folder / "bin/python" for folder in (root, Path()))
        return next((str(python.absolute()) for python in found if python.is_file()), "")

    @property
    def cure(self) -> str:
        return f"`agentrl env install {self.plugin}` makes {self.folder} with all that it needs"

    def part(self, which: str) -> str:
        """The reference to what it contributes."""
        options = "" if self.options == "{}" else f" {self.options}"
        return f"{SCHEME}:{which}:{self.plugin}:{self.what}{options}"


def derive(config: RunConfig) -> RunConfig:
    """The settings with those that follow from others. Raises ConfigError."""
    return _of_live_run(_of_environment(config))


def _of_environment(config: RunConfig) -> RunConfig:
    """The settings with what the environment stands for, where the run file has nothing else."""
    if not config.environment:
        if config.environment_options:
            raise ConfigError("[environment_options] has no effect without environment")
        return config
    named = Named.read(config.environment, config.environment_options)
    agent, tasks, verifier = config.agent, config.tasks, config.verifier
    if not (agent.path or agent.command or agent.harness):
        agent = replace(agent, path=named.part("agent"))
    missing = {split: named.part(split) for split in SPLITS if not getattr(tasks, split)}
    if not verifier.path:
        verifier = replace(verifier, path=named.part("verifier"))
    return replace(config, agent=agent, tasks=replace(tasks, **missing), verifier=verifier)


def _of_live_run(config: RunConfig) -> RunConfig:
    """The settings of a live run that follow from its sessions: each is a group of its own, calls
    go on during updates, and every step has its checkpoint."""
    live = config.live
    if not live.running:
        return config
    algorithm = replace(
        config.algorithm,
        groups=live.sessions,
        group_size=1,
        min_group=1,
        max_staleness=config.algorithm.max_staleness or 4.0,
        async_sampling="in_flight",
    )
    return replace(
        config,
        steps=UNBOUNDED,
        max_empty_steps=UNBOUNDED,
        algorithm=algorithm,
        checkpoint=replace(config.checkpoint, every=1),
        sessions=replace(config.sessions, idle=live.idle),
    )


def without_interpreter(config: RunConfig) -> RunConfig:
    """The settings without where the environment's interpreter is, for comparison."""
    given = dict(config.environment_options)
    if given.pop("python", None) is None:
        return config
    here = Named.read(config.environment, config.environment_options)
    anywhere = Named.read(config.environment, given)
    same = {here.part(which): anywhere.part(which) for which in ("agent", "verifier", *SPLITS)}
    paths = {split: getattr(config.tasks, split) for split in SPLITS}
    agent, verifier = config.agent.path, config.verifier.path
    return replace(
        config,
        environment_options=given,
        agent=replace(config.agent, path=same.get(agent, agent)),
        tasks=replace(config.tasks, **{key: same.get(path, path) for key, path in paths.items()}),
        verifier=replace(config.verifier, path=same.get(verifier, verifier)),
    )
