"""Keep the values of `agent.env` out of a run's store and files, which contain only the names.

The front passes the values to its runners in the environment; runners on other machines read them
from their own. `without_values` is idempotent.
"""

from __future__ import annotations

import os

import msgspec

from agentrl.config import RunConfig
from agentrl.errors import ConfigError

VARIABLE = "AGENTRL_AGENT_ENV"  # JSON object of the values


def without_values(config: RunConfig) -> RunConfig:
    """The settings with empty values; moves the values to this process's environment."""
    known = _known()
    values = {name: value for name, value in config.agent.env.items() if value or name not in known}
    if values:
        os.environ[VARIABLE] = msgspec.json.encode(known | values).decode()
    return _with(config, dict.fromkeys(config.agent.env, ""))


def with_values(config: RunConfig) -> RunConfig:
    """The settings with the values. Raises ConfigError for a variable without a value here."""
    given = {name: value for name, value in config.agent.env.items() if value}
    known = os.environ | _known() | given
    for name in config.agent.env:
        if name not in known:
            raise ConfigError(
                f"agent.env: {name} has no value on this machine, because the store does not keep"
                " values; set it in the environment of the runner"
            )
    return _with(config, {name: known[name] for name in config.agent.env})


def _known() -> dict[str, str]:
    return msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=dict[str, str])


def _with(config: RunConfig, env: dict[str, str]) -> RunConfig:
    return msgspec.structs.replace(config, agent=msgspec.structs.replace(config.agent, env=env))
