"""Values of `agent.env` reach the agent, and nothing that others read."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import RunConfig, agent_env, resolve
from agentrl.errors import ConfigError


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(agent_env.VARIABLE, "{}")


def config(tmp_path: Path, **env: str) -> RunConfig:
    data = {"agent": {"command": ["true"], "env": env}, "output": str(tmp_path)}
    return resolve(data, source="test")


@pytest.mark.part
def test_hidden_values_are_found_by_processes_of_the_run(tmp_path: Path) -> None:
    given = config(tmp_path, SECRET_KEY="hush", EMPTY="")
    hidden = agent_env.without_values(agent_env.without_values(given))
    assert hidden.agent.env == {"SECRET_KEY": "", "EMPTY": ""}
    assert agent_env.with_values(hidden) == given


@pytest.mark.part
def test_a_runner_elsewhere_has_its_own_or_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = config(tmp_path, SECRET_KEY="")
    with pytest.raises(ConfigError, match="SECRET_KEY has no value on this machine"):
        agent_env.with_values(hidden)
    monkeypatch.setenv("SECRET_KEY", "of this machine")
    assert agent_env.with_values(hidden).agent.env == {"SECRET_KEY": "of this machine"}
