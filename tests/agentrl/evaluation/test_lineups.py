"""From the command line: checkpoints of a trained run against each other, and its team without what
a role has learned."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.types import Rollout
from agentrl.store import open_store
from tests import warm
from tests.system.debate import written
from tests.system.test_run import agentrl

RUN = """
[selfplay]
seats = ["left", "right"]
[sampling]
max_tokens = 4
[algorithm]
preset = "grpo+per-role"
options = {{ reward = "role:outcome" }}
lr = 1e-2
groups = 2
group_size = 4
[runner]
lease = 3.0
"""
AGENT = """
import asyncio
from pathlib import Path

import openai

import agentrl


async def agent(question):
    if question == "Lima" and Path("hold").exists():
        await asyncio.Event().wait()
    said = []
    async with openai.AsyncOpenAI() as client:
        for name in ("left", "right", "judge"):
            with agentrl.role(name):
                answer = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": question}]
                )
            said.append(answer.choices[0].message.content or "")
    return said
"""
VERIFIER = """
from agentrl import Reward


def verify(task, result):
    left, right, judge = (float(len(said) % 7) for said in result)
    values = {"left": left - right, "right": right - left, "judge": judge}
    rows = [Reward(value=value, scope="role", target=role) for role, value in values.items()]
    return [*rows, Reward(value=judge)]
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """Two debaters and a judge, by two adapters, who are paid for the length of what they say."""
    return written(tmp_path, RUN, AGENT, VERIFIER, tiny_model_dir)


def answered(folder: Path, *command: str) -> Any:
    done = agentrl(folder, *command, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_what_was_learned_is_played_beside_the_run(folder: Path) -> None:
    trained = agentrl(folder, "train", "run.toml")
    assert trained.returncode == 0, trained.stderr

    matrix = answered(folder, "eval", "run.toml", "--crossplay", "--games", "4")
    assert matrix["players"] == ["debater@000001-2", "debater@000002-2"]
    there, back = matrix["meetings"]
    assert there["games"] == back["games"] == 4
    assert there["missing"] == 0
    assert there["mean"] == -back["mean"]
    assert there["score"] == 4 - back["score"]

    beside = await killed_in_the_middle(folder, "eval", "run.toml", "--ablate", "all")
    rows = answered(folder, "eval", "run.toml", "--ablate", "all")
    tries = {(row.index, row.attempts) for row in await rollouts(beside)}
    assert tries == {(0, 1), (1, 2)}  # what had ended was not played again
    assert [(row["role"], row["player"], row["pairs"]) for row in rows] == [
        ("left", "debater@000000", 2), ("right", "debater@000000", 2), ("judge", "judge@000000", 2),
    ]  # fmt: skip
    for row in rows:
        assert row["loss"] == pytest.approx(row["team"] - row["without"])
    assert rows[0]["without"] == rows[0]["team"]  # the score is the judge's alone

    (beside,) = folder.glob("debate-crossplay-*")
    before = await games(beside)
    assert {frozenset(seats.values()) for _, seats, _ in before} == {frozenset(matrix["players"])}
    assert {tuple(made) for *_, made in before} == {("left", "right", "judge")}
    assert answered(folder, "eval", "run.toml", "--crossplay", "--games", "4") == matrix
    assert await games(beside) == before


async def killed_in_the_middle(folder: Path, *command: str) -> Path:
    """Of an evaluation of four lineups, once all games of the first task have ended and those of
    the second are played; its folder."""
    (folder / "hold").touch()
    process = await asyncio.to_thread(warm.start, "-m", "agentrl", *command, cwd=folder)
    ended = asyncio.create_task(asyncio.to_thread(process.wait))
    try:
        deadline = time.monotonic() + 100
        while True:
            assert not ended.done()
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
            found = list(folder.glob("debate-ablation-*/run.json"))
            if found and in_the_middle(await rollouts(found[0].parent)):
                return found[0].parent
    finally:
        process.kill()
        await ended
        process.close()
        (folder / "hold").unlink()


def in_the_middle(rows: list[Rollout]) -> bool:
    ended, held = ([row for row in rows if row.index == index] for index in (0, 1))
    over = all(row.state.terminal for row in ended) and all(row.attempts for row in held)
    return len(rows) == 8 and over


async def rollouts(beside: Path) -> list[Rollout]:
    async with open_store(f"sqlite:///{beside / 'store.db'}", create=False) as store:
        return await store.rollouts(beside.name)


async def games(beside: Path) -> list[tuple[str | None, dict[str, str], list[str]]]:
    """Of each game of an evaluation the attempt, who played, and whose calls were made."""
    async with open_store(f"sqlite:///{beside / 'store.db'}", create=False) as store:
        rollouts = await store.rollouts(beside.name)
        traces = [await store.trace(row.id) for row in rollouts]
    heard = [[call.role for call in trace.transitions] if trace else [] for trace in traces]
    return [(row.attempt, row.seats, said) for row, said in zip(rollouts, heard, strict=True)]
