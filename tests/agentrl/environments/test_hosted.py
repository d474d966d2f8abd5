"""Environments in processes of their own: another interpreter, or one rollout in a process."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from agentrl.audit.scoring import trace_of
from agentrl.audit.subjects import audit_run
from agentrl.core.config.derived import EnvironmentName
from agentrl.core.errors import ConfigError
from agentrl.core.types import ErrorKind, RolloutState
from agentrl.environments import hosted
from agentrl.environments.hosted import Helper, Request
from agentrl.environments.runner import played_environment
from tests.agentrl.environments.conftest import HERE, Play, settings
from tests.runners.conftest import Bench


def right(body: Any) -> Any:
    return {"role": "assistant", "content": "right"}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another interpreter, in which agentrl is installed as here, and a package that is not."""
    folder = tmp_path_factory.mktemp("elsewhere") / ".venv-worlds"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text("\n".join(path for path in sys.path if path) + "\n")
    (packages / "no_such_package.py").write_text("fault = ''\n")
    return folder / "bin/python"


async def test_its_own_interpreter_has_packages_that_this_one_lacks(
    bench: Bench, play: Play, elsewhere: Path
) -> None:
    bench.model.answer = right
    config = settings("Missing:x", environment_options={"python": str(elsewhere)})
    with pytest.raises(ConfigError, match="invalid literal"):  # the package is there
        await play(config)


@pytest.mark.parametrize("world", ["Line:4", "Alone:4", "Driver:x", "Blocking:x", "Duel:x"])
async def test_rollouts_are_the_same_in_another_interpreter(
    bench: Bench, play: Play, elsewhere: Path, world: str
) -> None:
    bench.model.answer = right
    roles = dict.fromkeys(("user", "black", "white"), "policy")
    here = await play(settings(world, roles=roles))
    python = {"python": str(elsewhere)}
    there = await play(settings(world, roles=roles, environment_options=python))
    assert here
    for one, other in zip(here, there, strict=True):
        assert (one.state, one.task) == (other.state, other.task)
        assert one.state is RolloutState.SUCCEEDED
        positions = [
            {call.id: index for index, call in enumerate(each.transitions)} for each in (one, other)
        ]
        rows = [
            [(r.name, r.value, r.scope, where.get(r.target or "", r.target)) for r in each.rewards]
            for each, where in zip((one, other), positions, strict=True)
        ]
        assert rows[0] == rows[1]
        assert [call.role for call in one.transitions] == [call.role for call in other.transitions]


async def test_isolation_gives_each_rollout_a_process(bench: Bench, play: Play) -> None:
    bench.model.answer = right
    rollouts = await play(settings("Alone:8"), concurrency=8)
    assert [rollout.state for rollout in rollouts] == [RolloutState.SUCCEEDED] * 8
    config = settings("Alone:8", runner={"executor": "pool", "pool": {"rollouts": 2}})
    with pytest.raises(ConfigError, match=r"rollouts = 2.*plays one rollout at a time"):
        await play(config)


async def test_others_stay_in_the_runners_process() -> None:
    config = settings("Line:2")
    environment = played_environment(config, HERE)
    assert environment is not None
    assert environment.make_executor is None


@pytest.mark.parametrize("own", [True, False])
async def test_verifiers_run_in_the_interpreter_too(
    bench: Bench, play: Play, elsewhere: Path, own: bool
) -> None:
    agent = {"path": "own_agent.py:agent"} if own else {}
    python = {"python": str(elsewhere)}
    rollouts = await play(settings("Questions:x", agent=agent, environment_options=python))
    for rollout in rollouts:
        values = {row.name: row.value for row in rollout.rewards}
        assert values["outcome"] == float(not own)
        assert values["process"] != os.getpid()
    assert len({row.value for r in rollouts for row in r.rewards if row.name == "process"}) == 1


async def test_an_audit_scores_in_the_interpreter_too(elsewhere: Path) -> None:
    config = settings("Questions:x", environment_options={"python": str(elsewhere)})
    report = await audit_run(config, 60.0)
    assert report.verdict == "exploitable", report  # it looks for the answer in the text
    assert report.answer == "answer"


async def test_a_verifiers_judge_is_reached_from_there(
    bench: Bench, play: Play, elsewhere: Path
) -> None:
    for python in ({}, {"python": str(elsewhere)}):
        config = settings("Questions:x", environment_options={"fault": "asks", **python})
        for rollout in await play(config):
            assert rollout.failure.kind is ErrorKind.VERIFIER
            # A policy is no judge, which the gateway says to every verifier.
            assert "policy" in rollout.failure.message


async def test_a_verifier_that_dies_fails_its_rollout_and_no_other(
    bench: Bench, play: Play, elsewhere: Path
) -> None:
    options = {"python": str(elsewhere)}
    config = settings("Questions:x", environment_options={"fault": "dies", **options})
    for rollout in await play(config):
        assert rollout.failure.kind is ErrorKind.VERIFIER
        assert "worlds.py:Questions:x" in rollout.failure.message
        assert "ended without an answer" in rollout.failure.message


async def test_a_verifier_that_hangs_is_ended_and_others_go_on(bench: Bench, play: Play) -> None:
    rollouts = await play(settings("Slow:x"), timeout=8.0, max_attempts=1, concurrency=1)
    states = [rollout.state for rollout in rollouts]
    assert states == [RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.SUCCEEDED]
    assert "longer than 8 s" in rollouts[1].failure.message


async def test_results_are_scored_there_outside_of_rollouts(elsewhere: Path) -> None:
    """As an audit and `agentrl rescore` do."""
    named = EnvironmentName.read("worlds.py:Questions:x", {"python": str(elsewhere)}, HERE)
    task: dict[str, Any] = {"input": "train 1", "answer": "1"}
    for result, outcome in (("1", 1.0), ("2", 0.0)):
        rows = await hosted.verifier(named)(task, result, trace_of(task, result))
        assert {row.name: row.value for row in rows}["outcome"] == outcome


async def test_a_helper_ends_with_its_starter() -> None:
    helper = Helper(EnvironmentName("worlds.py:Questions", "x", root=str(HERE)))
    await helper.ask(Request("describe", helper.named))
    process = helper.process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert await process.wait() == 0


def test_tasks_and_ground_truth_come_from_there(elsewhere: Path) -> None:
    options = f'{{"python":"{elsewhere}"}}'
    there = EnvironmentName("worlds.py:Line", "3", options, str(HERE))
    here = EnvironmentName("worlds.py:Line", "3", root=str(HERE))
    for split in ("train", "heldout"):
        assert hosted.tasks(there, split) == hosted.tasks(here, split)
    assert hosted.solution(there, {"goal": 2}) == ["right", "right"]
    assert hosted.describe(there) == hosted.describe(here)


def test_what_is_drawn_from_a_set_of_texts_is_the_same_in_each_process(elsewhere: Path) -> None:
    named = EnvironmentName("worlds.py:Drawn", "3", f'{{"python":"{elsewhere}"}}', str(HERE))
    first, second = (hosted.ask(Request("tasks", named, "train")) for _ in range(2))
    assert first == second


def test_the_interpreter_beside_the_run_file_is_taken(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = EnvironmentName("worlds.py:Line", "3", root=str(elsewhere.parents[2]))
    assert named.python == str(elsewhere)
    monkeypatch.chdir(elsewhere.parents[2])
    assert EnvironmentName("worlds.py:Line", "3", root=str(HERE)).python == str(elsewhere)
    assert EnvironmentName("other.py:Line", "3", root=str(HERE)).python == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("#!/bin/sh\nexit 3", "ended without an answer"),
        ("#!/bin/sh\necho No module named agentrl >&2; exit 1", "has no agentrl that can play it"),
        (None, "cannot be started"),
    ],
)
def test_an_interpreter_that_cannot_help_is_a_sentence(
    tmp_path: Path, text: str | None, why: str
) -> None:
    python = tmp_path / "python"
    if text:
        python.write_text(text)
        python.chmod(0o755)
    named = EnvironmentName("worlds.py:Line", "3", f'{{"python":"{python}"}}', str(HERE))
    with pytest.raises(ConfigError) as raised:
        hosted.describe(named)
    assert str(raised.value).startswith("environment = 'worlds.py:Line:3'")
    assert str(python) in str(raised.value)
    assert why in str(raised.value)


def test_another_version_of_agentrl_there_is_refused(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.__version__", "9.9")
    named = EnvironmentName("worlds.py:Line", "5", f'{{"python":"{elsewhere}"}}', str(HERE))
    with pytest.raises(ConfigError, match=r"has agentrl 0.*, and this is 9\.9; `agentrl env inst"):
        hosted.describe(named)
