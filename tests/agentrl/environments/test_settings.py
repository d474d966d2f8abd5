"""`environment` in a run file: what it stands for, and what is refused before anything is built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from agentrl import trainer
from agentrl.cli.main import cli
from agentrl.core.config import differences, from_store, load, to_toml
from agentrl.core.config.derived import EnvironmentName
from agentrl.core.errors import ConfigError
from agentrl.core.loading import load_tasks
from agentrl.environments import hosted
from agentrl.environments.hosted import made, parse
from tests.agentrl.environments.conftest import HERE, settings
from tests.conftest import Register


def test_it_stands_for_agent_tasks_and_verifier(tmp_path: Path) -> None:
    config = settings("Line:3", environment_options={"goal": 1, "python": "x y"})
    end = 'worlds.py:Line:3 {"goal":1,"python":"x y"}'
    assert config.agent.path == f"environment:agent:{end}"
    assert config.tasks.train == f"environment:train:{end}"
    assert config.tasks.heldout == f"environment:heldout:{end}"
    assert config.verifier.path == f"environment:verifier:{end}"
    which, named = parse(config.tasks.train, HERE)
    assert (which, named.name) == ("train", "worlds.py:Line:3")
    assert named.arguments == {"goal": 1}
    assert named.python == str(HERE / "x y")
    assert from_store(msgspec.to_builtins(config)) == config
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert load(file, [f"root={HERE}"]) == config


def test_where_its_interpreter_is_changes_nothing_that_is_learned() -> None:
    own: dict[str, Any] = {"goal": 1, "python": "a/bin/python"}
    old = settings("Line:3", environment_options=own, tasks={"heldout": "mine.jsonl"})
    for moved in ({"goal": 1, "python": "b/bin/python"}, {"goal": 1}):
        new = settings("Line:3", environment_options=moved, tasks={"heldout": "mine.jsonl"})
        assert differences(old, new) == differences(new, old) == []
    other = settings("Line:3", environment_options=own | {"goal": 2})
    assert [line.partition(":")[0] for line in differences(old, other)] == [
        "agent.path", "environment_options.goal", "tasks.heldout", "tasks.train", "verifier.path"
    ]  # fmt: skip
    assert not any("python" in line for line in differences(old, other))


@pytest.mark.parametrize(
    ("tables", "kept"),
    [
        ({"tasks": {"train": "mine.jsonl"}}, "tasks.train"),
        ({"verifier": {"path": "mine.py:v"}}, "verifier.path"),
        ({"agent": {"path": "mine.py:a"}}, "agent.path"),
    ],
)
def test_what_the_run_file_says_itself_stays(tables: Any, kept: str) -> None:
    table, key = kept.split(".")
    config = settings("Questions:3", **tables)
    assert getattr(getattr(config, table), key) == tables[table][key]
    assert config.tasks.heldout.startswith("environment:heldout:")


@pytest.mark.parametrize(
    ("name", "tables", "why"),
    [
        ("Line", {}, 'write it as "PLUGIN:WHAT"'),
        ("Nobody:3", {}, "it has no 'Nobody'"),
        ("Walk:3", {}, "is not a class that inherits from agentrl.environments.Environment"),
        ("Two:3", {}, "Two has open and verify of run, open and verify; it needs exactly one"),
        ("Line:x", {}, "cannot be made: ValueError: invalid literal"),
        ("Line:3", {"environment_options": {"gaol": 1}}, "unexpected keyword argument 'gaol'"),
        ("Missing:3", {}, "there is no module 'no_such_package'"),
        ("Missing:3", {}, "`agentrl env install worlds.py:Missing` makes .venv-worlds with all"),
        ("Line:3", {"agent": {"path": "own_agent.py:agent"}}, "plays its rollouts itself; remove"),
        ("Driver:x", {}, "asks models in the role 'user', and the run file does not say who"),
        ("Alone:3", {"runner": {"executor": "threads"}}, "set runner.executor = 'pool' instead"),
        (
            "Questions:3",
            {"environment_options": {"python": "none/bin/python"}},
            "none/bin/python cannot be started (No such file",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_built(
    name: str, tables: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        trainer.check(settings(name, policy={"build": "none.py:none"}, **tables))
    assert why in str(raised.value)
    assert (
        f"environment = 'worlds.py:{name}" in str(raised.value) or "Nobody" in why or "write" in why
    )


TASK_FAULTS = {
    "twice": "task 1 of 'train' has the id 'a', which is there twice",
    "both": "1 ids, such as 'a', are in 'train' and in 'heldout'",
    "tuple": "task 'train'['input']['at'] ",
    "nan": "task 'train'['input'] ",
    "number": "task 0 of 'train' has the id 7, which is no text",
    "no input": "task 0 of 'train' is {'id': 'train'}; it needs an 'id' and an 'input'",
    "no id": "it needs an 'id' and an 'input'",
    "no task": "task 0 of 'train' is 1; it needs",
    "none": "tasks('train') has none",
    "raises": "raised in tasks('train'): RuntimeError: the file is gone",
    "exits": "raised in tasks('train'): SystemExit: no such set",
}
FROM_ELSEWHERE = ("tuple", "nan", "raises", "exits")  # what another process may hide


@pytest.mark.parametrize(
    ("fault", "python"),
    [
        *((fault, "") for fault in TASK_FAULTS),
        *((fault, sys.executable) for fault in FROM_ELSEWHERE),
    ],
)
def test_tasks_are_checked(fault: str, python: str) -> None:
    options = {"fault": fault} | ({"python": python} if python else {})
    with pytest.raises(ConfigError) as raised:
        trainer.check(
            settings("Tasks:1", policy={"build": "none.py:none"}, environment_options=options)
        )
    assert TASK_FAULTS[fault] in str(raised.value)
    assert "environment = 'worlds.py:Tasks:1'" in str(raised.value)


# What a user chooses about the device is not measured, which takes seconds.
UNMEASURED: dict[str, Any] = {"policy": "model", "policy.device": "cpu"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, Any]]:
    """The settings, agent and verifier of the runs that a Trainer has started."""
    runs = list[tuple[Any, Any]]()

    async def launch(config: Any, local: Any = None, callbacks: Any = ()) -> None:
        runs.append((config, local))

    monkeypatch.setattr(trainer, "launch", launch)
    monkeypatch.chdir(tmp_path)
    return runs


def test_a_trainer_needs_no_more_than_an_environment(started: list[Any]) -> None:
    known: Any = UNMEASURED | {"root": str(HERE), "environment_options": {"goal": 1}}
    trainer.Trainer(environment="worlds.py:Line:3", **known).fit()
    [(config, local)] = started
    assert local is None  # in runner processes, as of a run file
    end = 'worlds.py:Line:3 {"goal":1}'
    paths = (config.agent.path, config.tasks.train, config.tasks.heldout, config.verifier.path)
    parts = ("agent", "train", "heldout", "verifier")
    assert paths == tuple(f"environment:{part}:{end}" for part in parts)


def test_what_a_trainer_is_given_replaces_a_part_of_the_environment(started: list[Any]) -> None:
    def mine(text: str) -> str:
        return text

    def judged(task: Any, result: Any) -> float:
        return 1.0

    known: Any = UNMEASURED | {"root": str(HERE), "environment": "worlds.py:Questions:x"}
    trainer.Trainer(mine, **known).fit()
    trainer.Trainer(verifier=judged, tasks=[{"input": "a"}], **known).fit()
    (first, own), (second, others) = started
    assert own == (mine, "environment:verifier:worlds.py:Questions:x")
    assert (first.agent.path, first.tasks.train[:18]) == ("", "environment:train:")
    assert others == (None, judged)
    assert second.agent.path == "environment:agent:worlds.py:Questions:x"
    assert second.tasks.train.endswith("/train.jsonl")
    assert second.tasks.heldout.startswith("environment:heldout:")
    with pytest.raises(ConfigError, match="plays its rollouts itself"):
        trainer.Trainer(mine, **known | {"environment": "worlds.py:Line:3"}).fit()


def test_tasks_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "MAX_TASKS", 100)
    own = {"environment_options": {"fault": "never ends"}, "policy": {"build": "none.py:none"}}
    with pytest.raises(ConfigError, match=r"tasks\('train'\) has more than 100; let it end"):
        trainer.check(settings("Tasks:1", **own))


def test_an_upstream_that_answers_all_others_answers_every_role() -> None:
    stub = {"upstreams": {"stub": {"text": "yes"}}}
    trainer.check(settings("Driver:x", steps=0, roles={"*": "stub"}, **stub))


def test_options_without_an_environment_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no effect without environment"):
        settings("Line:3", environment="", environment_options={"seed": 1})


def test_another_package_registers_a_plug_in(register: Register) -> None:
    register("agentrl.environments", "theirs", "tests.agentrl.environments.worlds:Line")
    config = settings("", environment="theirs:2")
    rows = load_tasks(config.tasks.heldout, HERE, key="tasks.heldout")
    assert [row["id"] for row in rows] == ["heldout-0", "heldout-1"]
    with pytest.raises(ConfigError, match=r"environment = 'their'; did you mean 'theirs'"):
        trainer.check(settings("", environment="their:2"))


def test_its_own_interpreter_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".venv-worlds/bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to("/bin/false")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="ended without an answer"):
        trainer.check(settings("Line:9", policy={"build": "none.py:none"}))
    assert f"runs in its own interpreter, {folder / 'python'}" in capsys.readouterr().out


def test_paths_are_relative_to_the_run_file() -> None:
    assert made(EnvironmentName("worlds.py:Line", "3", root=str(HERE))).root == HERE


def test_a_dry_run_shows_what_it_stands_for(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'environment = "worlds.py:Line:3"\n[policy]\nmodel = "model"\n'
    )
    done = CliRunner().invoke(cli, ["train", str(tmp_path / "run.toml"), "--dry-run"])
    assert 'train = "environment:train:worlds.py:Line:3"' in done.output
