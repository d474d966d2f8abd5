"""`agentrl prompts --find`: what could be components of a run's agent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentrl import evaluation
from agentrl.algorithms.prompt_search import prompt_texts
from agentrl.cli import how_to_continue
from agentrl.cli.main import cli
from agentrl.cli.models import prompts
from agentrl.core.config import RunConfig, load
from agentrl.core.types import NewRollout, Outcome, Reward, Transition, float32, int32
from agentrl.store import open_store

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks."}}]


def call(attempt: Any, index: int, role: str, messages: list[Any], **more: Any) -> Transition:
    base: Any = {"prompt": int32(), "completion": int32(), "logprobs": float32(), "exact": False}
    own = {"id": f"{attempt.id}-{index}", "attempt": attempt.id, "index": index, "role": role}
    return Transition(messages=messages, answer={"content": "a"}, **base | own | more)


async def fill(url: str) -> None:
    async with open_store(url) as store:
        await store.open_run("old", {})
        rows = [
            NewRollout(id=f"r{i}", run="old", group="g", index=i, task={"input": str(i)})
            for i in range(3)
        ]
        await store.enqueue(rows)
        for attempt in await store.claim(3, runner="test", lease=60.0, run="old", timeout=5.0):
            i = attempt.rollout.index
            parts = [{"type": "text", "text": f"Solve it.\nShow your work.\n\nNumber {i}."}]
            user = {"role": "user", "content": "go"}
            said = [
                call(attempt, 0, "solver", [{"role": "developer", "content": parts}, user]),
                call(attempt, 1, "critic", [user], tools=TOOLS),
            ]
            await store.add_transitions(said)
            done = Outcome(attempt=attempt.id, fence=attempt.fence, rewards=[Reward(value=1.0)])
            await store.finish([done])


def run_file(folder: Path) -> str:
    file = folder / "old.toml"
    file.write_text(f'name = "old"\nstore = "sqlite:///{folder / "store.db"}"\n')
    return str(file)


def test_what_calls_share_is_printed_as_a_part_of_the_run_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    asyncio.run(fill(url))
    ran = CliRunner().invoke(prompts, [run_file(tmp_path), "--find"])
    assert ran.exit_code == 0, ran.output
    critic, solver = ran.output.strip().split("\n\n")
    assert critic.splitlines() == [
        "# critic: 3 calls, tools: look",
        'critic = { file = "prompts/critic.txt", insert = true }  # has no text',
    ]
    lines = solver.splitlines()
    assert lines[0] == "# solver: 3 calls, tools: none"
    assert lines[2:5] == ["# Solve it.", "# Show your work.", "# "]
    assert lines[-1] == 'solver = "prompts/solver.txt"'


def test_what_is_printed_can_be_put_into_a_run_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    asyncio.run(fill(url))
    printed = CliRunner().invoke(prompts, [run_file(tmp_path), "--find"]).output
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "solver.txt").write_text("Solve it.")
    (tmp_path / "prompts" / "critic.txt").write_text("Judge.")
    (tmp_path / "agent.py").write_text("def agent(task): ...\ndef verify(task): return 1.0\n")
    (tmp_path / "run.toml").write_text(
        f"""
[agent]
path = "agent.py:agent"
[tasks]
train = "agent.py:agent"
[verifier]
path = "agent.py:verify"
[policy]
model = "x"
[prompts]
reflector = "policy"
[prompts.components]
{printed}
"""
    )
    found = prompt_texts(load(tmp_path / "run.toml", ()))
    assert {(text.role, text.seed) for text in found} == {("critic", ""), ("solver", "Solve it.")}


def test_a_run_without_calls_is_a_sentence(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    asyncio.run(fill(url))
    ran = CliRunner().invoke(prompts, [run_file(tmp_path), "name=other", "--find"])
    assert "has no calls" in str(ran.exception)


def test_the_folder_of_an_evaluation_is_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    file = tmp_path / "run.toml"
    file.write_text(
        "[upstreams.t]\ntext = 'x'\n[prompts]\nreflector = 't'\nalgorithm = 'apo'\n"
        "[prompts.components]\na = 'a.txt'\n"
    )
    seen: list[RunConfig] = []
    monkeypatch.setattr(evaluation, "evaluate", lambda config, *_, **__: seen.append(config))
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(cli, ["eval", str(file), "--prompts", "texts"])
    assert ran.exit_code == 0, ran.output
    assert seen[0].prompts.directory == str(tmp_path / "texts")
    file.write_text("[upstreams.t]\ntext = 'x'\n")
    ran = CliRunner().invoke(cli, ["eval", str(file), "--prompts", "texts"])
    assert "[prompts] has no effect without prompts.components" in str(ran.exception)


def test_a_stopped_search_says_that_it_goes_on() -> None:
    assert how_to_continue(cli, ["prompts", "x"]) == " The same command continues the search."
