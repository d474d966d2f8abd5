"""A checkpoint is scored in a run's own store and folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl import trainer
from agentrl.config import RunConfig, resolve
from agentrl.errors import ConfigError
from agentrl.evaluation.checkpoint import score


def test_a_run_that_never_was_is_to_be_trained_first(tmp_path: Path) -> None:
    config = resolve({"name": "never", "output": str(tmp_path / "never")}, source="test")
    with pytest.raises(ConfigError, match="'never' has not been trained yet; train it first"):
        score.evaluate(config, None, None)
    assert not (tmp_path / "never").exists()


def test_what_is_scored_is_named_by_its_step(tmp_path: Path) -> None:
    assert score.scored_line(tmp_path / "000020.3").startswith("scoring the policy after step 20: ")
    assert score.scored_line(tmp_path / "mine") == f"scoring the policy: {tmp_path / 'mine'}"


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
