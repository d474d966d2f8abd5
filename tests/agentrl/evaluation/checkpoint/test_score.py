"""A checkpoint is scored in a run's own store and folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl import trainer
from agentrl.config import PolicyConfig, RunConfig, resolve
from agentrl.errors import ConfigError
from agentrl.evaluation.checkpoint import score


def test_what_is_scored_is_named_by_its_step(tmp_path: Path) -> None:
    config = RunConfig(policy=PolicyConfig(model="base"))
    after = score.scored_line(config, tmp_path / "000020.3")
    assert after.startswith("scoring the policy after step 20: ")
    named = score.scored_line(config, tmp_path / "mine")
    assert named == f"scoring the policy: {tmp_path / 'mine'}"
    assert score.scored_line(config, None) == "scoring the policy before training: base"


@pytest.mark.parametrize(
    ("named", "used"),
    [
        ("", "sqlite:///{folder}/store.db"),
        ("sqlite:///other.db", "sqlite:///other.db"),
        ("postgresql://me:hush@host/db", "postgresql://me@host/db"),
    ],
)
def test_a_store_that_is_named_is_used_and_its_password_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, used: str
) -> None:
    monkeypatch.setenv("PGPASSWORD", "")
    made: dict[str, Any] = {"output": str(tmp_path / "out"), "roles": {"agent": "far"}}
    made |= {"upstreams": {"far": {"base_url": "http://127.0.0.1:1/v1"}}, "policy": {"model": ""}}
    config = resolve(made | ({"store": named} if named else {}), source="test")
    seen = list[RunConfig]()

    async def front(config: RunConfig, **_: Any) -> None:
        seen.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(trainer, "check", lambda config: None)
    monkeypatch.setattr(trainer, "front", front)
    with pytest.raises(ConfigError, match="enough"):
        score.evaluate(config, None, None)
    assert seen[0].store == used.format(folder=seen[0].output)
