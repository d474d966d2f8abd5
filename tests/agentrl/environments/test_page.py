"""The page "write an environment": its examples are plug-ins, and one of them trains."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import load
from agentrl.core.config.derived import EnvironmentName
from agentrl.core.types import Scope
from agentrl.environments import hosted
from agentrl.environments.runner import stage
from agentrl.store import open_store
from agentrl.trainer import run_training

PAGE = Path(__file__).parents[3] / "docs/how-to/write-an-environment.md"
CODE = re.compile(
    r"^```python\n((?:(?!^```).)*?class (\w+)\(Environment\).*?)^```", re.DOTALL | re.MULTILINE
)
EXAMPLES = {name: text for text, name in CODE.findall(PAGE.read_text(encoding="utf-8"))}
RIGHT = {
    "Sums": lambda role, messages: str(int(messages[-1]["content"][0]) + 1),
    "Guess": lambda role, messages: {"Guess a digit.": "4"}.get(messages[-1]["content"], "7"),
    "Debate": lambda role, messages: "Yes." if role == "opponent" else "It is good.",
}
BUILD = """
import random


def build(directory, seed):
    from agentrl.tiny import imitator

    rng, talks = random.Random(seed), []
    for _ in range(200):
        digit, said, talk = rng.randrange(10), "Guess a digit.", []
        for _ in range(4):
            guess = rng.randrange(10)
            talk += [{"role": "user", "content": said}]
            talk += [{"role": "assistant", "content": str(guess)}]
            said = "Higher." if guess < digit else "Lower."
        talks.append(talk)
    imitator(directory, talks, seed=seed, steps=40)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in EXAMPLES.items():
        (tmp_path / f"{name.lower()}.py").write_text(text)
    return tmp_path


def test_the_page_has_an_example_of_each_way_to_play(folder: Path) -> None:
    kinds = {
        name: hosted.describe(
            EnvironmentName(f"{name.lower()}.py:{name}", "x", root=str(folder))
        ).kind
        for name in EXAMPLES
    }
    assert kinds == {"Sums": "verify", "Guess": "open", "Debate": "run"}
    code = [line for line in EXAMPLES["Sums"].splitlines() if line.strip()]
    assert len(code) <= 10


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_is_played(folder: Path, name: str) -> None:
    named = EnvironmentName(f"{name.lower()}.py:{name}", "x", root=str(folder))

    async def reply(role: str, messages: Any, tools: Any) -> Any:
        return {"role": "assistant", "content": RIGHT[name](role, messages)}

    async with stage(named) as playing:
        for split in ("train", "heldout"):
            for task in hosted.tasks(named, split):
                if name == "Guess" and task["input"] not in (4, 7):
                    continue
                played = await playing.play(task, reply)
                assert (played.outcome, played.problem) == (1.0, "")


@pytest.mark.timeout(300)
def test_an_example_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "policy.py").write_text(BUILD)
    (folder / "run.toml").write_text("""
environment = "guess.py:Guess:x"
steps = 2
[policy]
build = "policy.py:build"
[sampling]
max_tokens = 2
[algorithm]
groups = 2
group_size = 4
dynamic_sampling = false
lr = 1e-3
[eval]
tasks = 2
samples = 0
[learner]
threads = 1
""")
    config = load(folder / "run.toml")
    result = run_training(config)
    assert result.checkpoint is not None

    async def look() -> Any:
        async with open_store(config.store, readonly=True) as store:
            rollouts = await store.rollouts(config.name)
            return [await store.trace(one.id) for one in rollouts]

    traces = asyncio.run(look())
    assert len(traces) >= 2 * 2 * 4
    for trace in traces:
        steps = [row for row in trace.rollout.rewards if row.scope is Scope.TRANSITION]
        (outcome,) = (row for row in trace.rollout.rewards if row.scope is Scope.ROLLOUT)
        assert [row.target for row in steps] == [call.id for call in trace.transitions]
        assert sum(row.value for row in steps) == outcome.value
    assert json.loads((Path(config.output) / "run.json").read_bytes())["environment"]
