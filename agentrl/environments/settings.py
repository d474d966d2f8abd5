"""The environment of a run, and what is checked of it before the run."""

from __future__ import annotations

from functools import cache
from inspect import signature
from pathlib import Path

from rich.console import Console

from agentrl.config import RunConfig
from agentrl.config.derived import SCHEME, SPLITS, Named
from agentrl.config.policies import policy_by_role
from agentrl.environments.reference import check_unique, load_class
from agentrl.errors import ConfigError


def named_in(config: RunConfig) -> Named | None:
    """The environment of a run's settings."""
    name = config.environment
    return Named.read(name, config.environment_options, Path(config.root)) if name else None


def check(config: RunConfig) -> None:
    """Look at the environment before anything else is built. Raises ConfigError."""
    from agentrl.environments import hosted

    if (named := named_in(config)) is None:
        return
    if named.python and "python" not in config.environment_options:
        _say(f"environment {named.name} runs in its own interpreter, {named.python}")
    about = hosted.describe(named)
    known = f"environment = {named.name!r}"
    own = config.agent.path.startswith(f"{SCHEME}:")
    if not own and about.kind != "verify":
        cure = "remove agent.path, agent.command or agent.harness"
        if config.agent.harness and "harness" in signature(load_class(named)).parameters:
            cure = f"move harness = {config.agent.harness!r} to [environment_options]"
        raise ConfigError(f"{known} plays its rollouts itself; {cure}")
    executor = config.runner.executor
    if own and hosted.is_hosted(named) and executor not in ("auto", "pool"):
        raise ConfigError(
            f"{known} runs in processes of its own; set runner.executor = 'pool' instead of"
            f" {executor!r}, or leave it out"
        )
    answered = policy_by_role(config)
    unanswered = [role for role in about.roles if not answered.keys() & {role, "*"}]
    if unanswered:
        role = unanswered[0]
        raise ConfigError(
            f"{known} asks models in the role {role!r}, and the run file does not say who answers:"
            f' write {role} = "NAME" below [roles], of one of [upstreams] or "policy"'
        )
    if all(getattr(config.tasks, split).startswith(f"{SCHEME}:") for split in SPLITS):
        check_unique(named, (hosted.tasks(named, split) for split in SPLITS))


@cache
def _say(line: str) -> None:
    """Once per process."""
    Console().print(line, highlight=False, markup=False, soft_wrap=True)
