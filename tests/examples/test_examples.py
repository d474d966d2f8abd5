"""Every example does what its files say, in the real runner."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.types import RolloutState, Scope
from agentrl.store import open_store
from tests.examples.parts import EXAMPLES, train_once

AGENTS = sorted(EXAMPLES.glob("*/agent.*"))
CODE = (".py", ".mjs", ".toml")


def last(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def said(text: str) -> dict[str, Any]:
    return {"content": text}


def test_agents_know_nothing_of_agentrl_and_are_short() -> None:
    assert {file.parent.name for file in AGENTS} >= {"staff", "solver_critic", "node_cli"}
    for file in AGENTS:
        text = file.read_text().replace("AGENTRL_TASK", "")
        assert not re.search(r"\bagentrl\b", text), file
        for part in file.parent.iterdir():
            if part.suffix in CODE and not (file.parent / "policy.py").exists():
                assert len(part.read_text().splitlines()) < 80, part
    listed = re.findall(r"\]\((\w+)\)", (EXAMPLES / "README.md").read_text())
    runs = {file.parent.name for file in EXAMPLES.glob("*/run.toml")}
    assert sorted(listed) == sorted(runs | {file.parent.name for file in AGENTS} | {"plugins"})


@pytest.mark.parametrize(
    ("agent", "settings"),
    [
        ("agent.py:agent", []),
        ("rewarding.py:agent", ["runner.executor=pool", "runner.pool.start=spawn"]),
    ],
)
async def test_solver_and_critic(run_example: Any, agent: str, settings: list[str]) -> None:
    pytest.importorskip("langgraph")
    seen: list[str] = []

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if "You check sums" in str(body["messages"][0]["content"]):
            a, b, proposed = map(int, re.findall(r"\d+", last(body)))
            return said("right" if a + b == proposed else "Wrong")
        a, b = map(int, re.findall(r"\d+", last(body)))
        seen.append(last(body))
        return said(str(a + b) if seen.count(last(body)) > 1 else "0")

    for trace in await run_example("solver_critic", answer, f"agent.path={agent}", *settings):
        calls = {call.id: call.role for call in trace.transitions}
        assert list(calls.values()) == ["solver", "critic", "solver", "critic"]
        assert all(call.exact for call in trace.transitions)
        rows = trace.rollout.rewards
        steps = [(calls[row.target or ""], row.value) for row in rows if row.name == "step"]
        assert steps == [("solver", 0.0), ("critic", 1.0), ("solver", 1.0), ("critic", 1.0)]
        (record,) = [row for row in rows if row.scope is Scope.ROLE]
        assert (record.target, record.value, trace.rollout.reward()) == ("critic", 1.0, 1.0)
        brief = [calls[row.target or ""] for row in rows if row.source == "agent"]
        assert brief == (["critic", "critic"] if "rewarding" in agent else [])
        assert {"solver", "critic"} <= {span.name for span in trace.spans if span.kind == "chain"}


async def test_openai_sdk(run_example: Any) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return said({"higher": "2", "lower": "1"}.get(last(body), "It is 1!"))

    first, second = await run_example("openai_sdk", answer)
    assert (first.rollout.result, first.rollout.reward()) == (2, 0.5)
    assert (second.rollout.result, second.rollout.reward()) == (0, 0.0)
    assert [call.role for call in first.transitions] == ["agent", "agent"]
    assert len(second.transitions) == 5


async def test_streaming(run_example: Any) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        subject = last(body).removeprefix("Describe ").partition(" in one")[0]
        return said(f"There is nothing as large and calm as {subject}." + " And more" * 20_000)

    for trace in await run_example("streaming", answer):
        subject = trace.rollout.task["input"]
        assert trace.rollout.result == f"There is nothing as large and calm as {subject}."
        assert trace.rollout.reward() > 0.5
        (call,) = trace.transitions
        assert (call.exact, call.finish) == (True, "cut")  # nobody waited for the rest
        assert bytes(call.completion.tolist()).decode().startswith(trace.rollout.result)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
async def test_node_command_line(run_example: Any) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        word = re.findall(r'"(\w+)"', str(body["messages"][0]["content"]))[0]
        return said(word[::-1] if len(body["messages"]) > 1 else word)

    for trace in await run_example("node_cli", answer):
        word = trace.rollout.task["input"]
        assert trace.rollout.result == {"first": word, "final": word[::-1]}
        assert trace.rollout.reward() == 1.0
        assert len(trace.transitions) == 2


async def test_training_from_the_command_line_with_a_real_policy(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """What the tiny model says is noise; everything around it is as in any training."""
    await train_once("openai_sdk", tiny_model_dir, tmp_path, "agent.error_reward=0.0")
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        rollouts = await store.rollouts("openai_sdk", step=0)
        assert {rollout.state for rollout in rollouts} == {RolloutState.SUCCEEDED}
        trace = await store.trace(rollouts[0].id)
        assert trace is not None
        assert all(call.exact and call.version == 0 for call in trace.transitions)
