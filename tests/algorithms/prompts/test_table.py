"""The table [prompts]: what is refused, and what evaluations make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl import crossplay, evaluation, trainer
from agentrl.core.config import RunConfig, load, resolve
from agentrl.core.errors import ConfigError
from agentrl.crossplay import EvaluationPlan
from agentrl.trainer import checkpoint_at

TABLE = {"components": {"a": "a.txt"}, "reflector": "policy", "algorithm": "apo"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[prompts]\nbudget = 9", r"\[prompts\] has no effect without prompts\.components"),
        (
            "[prompts]\nreflector = 'x'\n[prompts.components]\na = 'a.txt'",
            r"prompts\.reflector = 'x'; name the model that proposes texts: policy",
        ),
        (
            "[prompts]\nreflector = 'policy'\nbudget = 56\n[prompts.components]\na = 'a.txt'",
            r"prompts\.budget = 56 rollouts .* at least 57",
        ),
        (
            "[prompts]\nreflector = 'policy'\nschedule = 5\n"
            "[prompts.components]\na = 'a.txt'\n[algorithm]\nmax_staleness = 1",
            r"prompts\.schedule = 5 with algorithm\.max_staleness",
        ),
        (
            "[prompts]\nreflector = 'policy'\n[prompts.components]\na = { file = 'a', rol = 'b' }",
            r"prompts\.components\.a",
        ),
    ],
)
def test_every_mistake_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path / "run.toml")
    assert "\n" not in str(caught.value)


def test_a_run_on_data_plays_with_no_texts() -> None:
    with pytest.raises(ConfigError, match=r"\[prompts\] has no effect in a run on \[data\]"):
        resolve({"data": {"name": "likes"}, "prompts": TABLE}, source="test")


def test_texts_decide_games_which_are_played_again_with_others(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "checkpoints" / "000001"
    folder.mkdir(parents=True)
    for file in ("state.json", "config.json"):
        (folder / file).write_text("{}")
    plan = EvaluationPlan(players={}, lineups={}, tasks=[], temperature=1.0, steps=1)

    def name(**settings: Any) -> str:
        config = resolve({"name": "r", "output": str(tmp_path / "runs"), **settings}, source="test")
        of = checkpoint_at(folder)
        return crossplay.plan_run(config, of, plan, "crossplay").name

    other = {"prompts": TABLE | {"directory": "other"}}
    assert len({name(), name(prompts=TABLE), name(**other)}) == 3
    assert name(**other) == name(**other)


@pytest.mark.parametrize("given", ["", "mine"])
def test_an_evaluation_uses_the_texts_that_were_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    found: list[RunConfig] = []
    monkeypatch.setattr(trainer, "check", found.append)
    monkeypatch.setattr(evaluation, "_score", lambda config, level: config)
    monkeypatch.setattr(evaluation, "run_blocking", lambda config: config)
    settings: dict[str, Any] = {
        "output": str(tmp_path / "runs"), "upstreams": {"teacher": {"text": "x"}},
        "prompts": TABLE | {"reflector": "teacher", "schedule": "before", "directory": given},
    }  # fmt: skip
    config = resolve(settings, source="test")
    evaluation.evaluate(config, None, None)
    folder = given or str(tmp_path / "runs" / "prompts")
    assert found[0].prompts == replace(config.prompts, schedule="off", directory=folder)
    plain = resolve(settings | {"prompts": {}}, source="test")
    evaluation.evaluate(plain, None, None)
    assert found[1].prompts == plain.prompts
