"""Values of `agent.env` reach the agent, and nothing that others read."""

from __future__ import annotations

import pytest

from agentrl.core.config import RunConfig
from agentrl.core.config.run_file import AGENT_ENV, with_env_values, without_env_values
from agentrl.core.errors import ConfigError
from tests import factories


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGENT_ENV, "{}")


def config(**env: str) -> RunConfig:
    return factories.config(agent={"command": ["true"], "env": env})


def test_hidden_values_are_found_by_processes_of_the_run() -> None:
    given = config(SECRET_KEY="hush", EMPTY="")
    hidden = without_env_values(without_env_values(given))
    assert hidden.agent.env == {"SECRET_KEY": "", "EMPTY": ""}
    assert with_env_values(hidden) == given


def test_a_runner_elsewhere_has_its_own_or_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = config(SECRET_KEY="")
    with pytest.raises(ConfigError, match="SECRET_KEY has no value on this machine"):
        with_env_values(hidden)
    monkeypatch.setenv("SECRET_KEY", "of this machine")
    assert with_env_values(hidden).agent.env == {"SECRET_KEY": "of this machine"}
