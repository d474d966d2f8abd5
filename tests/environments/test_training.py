"""A tiny policy learns where the environment is learnable in seconds; elsewhere it takes a step."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.types import StepRow
from tests.environments.openenv.served import served
from tests.environments.pages import ROOT, python, trained

pytestmark = pytest.mark.timeout(600)
# Says one of WORDS, whatever it is told; it has seen words of the prompts.
SAYS = """
import random
from pathlib import Path
from agentrl.tiny import imitator

WORDS, SEEN = {words!r}, {seen!r}

def build(directory, seed):
    dice, talks = random.Random(seed), []
    for _ in range(200):
        said = {{"role": "assistant", "content": dice.choice(WORDS)}}
        talks.append([{{"role": "user", "content": SEEN}}, said])
    imitator(directory, talks, seed=seed, steps={steps})
    file = Path(directory) / "config.json"
    file.write_text(file.read_text().replace(": 512", ": 8192"))  # prompts are long
"""
SMALL = ("algorithm.groups=4", "algorithm.group_size=8", "algorithm.lr=1e-2",
         "algorithm.max_kl=1.0", "runner.concurrency=16", "eval.tasks=8")  # fmt: skip


def says(*words: str, seen: str = "Act.", steps: int = 30) -> str:
    return SAYS.format(words=words, seen=seen, steps=steps)


def scores(steps: list[StepRow]) -> list[float]:
    """Held-out scores of sampled replies."""
    rows = [row.metrics for row in steps]
    return [row["eval/sampled"] for row in rows if "eval/sampled" in row]


async def test_syllogisms_are_answered_as_is_most_often_right(tmp_path: Path) -> None:
    """Not solved: two of three are true."""
    own = f"python='{python('reasoning-gym')}', size=64, heldout=64"
    file = ("environment=reasoning-gym:syllogism", f"environment_options={{{own}}}")
    settings = ("steps=6", "eval.every=6", "sampling.max_tokens=3", *SMALL, "eval.tasks=64")
    policy = says("Yes", "No", "Maybe", "Never")
    steps = await trained("reasoning-gym", tmp_path, policy, *file, *settings)
    before, *_, after = scores(steps)
    assert before < 0.4
    assert after > before + 0.15


async def test_the_coin_is_taken(tmp_path: Path) -> None:
    """In a game of one room. Of three commands one is of use."""
    made = "import sys, pathlib, tests.environments.textworld.figures as made;"
    made += "made.make_games(pathlib.Path(sys.argv[1]))"
    command = [python("textworld"), "-c", made, tmp_path]
    await asyncio.to_thread(subprocess.run, command, cwd=ROOT, check=True)
    settings = ("steps=6", "eval.every=6", "sampling.max_tokens=4", "environment_options.limit=1")
    seen = "You are carrying nothing.\n\nCommands: inventory, take coin"
    policy = says("take coin", "look", "inventory", seen=seen, steps=150)
    rows = await trained("textworld", tmp_path, policy, *settings, *SMALL, "eval.tasks=1")
    paid = [row.metrics["reward/mean"] for row in rows if row.metrics.get("rollouts")]
    assert max(paid[-2:]) > paid[0] + 0.1


async def test_both_agents_of_a_game_learn(tmp_path: Path) -> None:
    """One step: both agents have lost by illegal moves, and the policy has changed."""
    roles = ("environment_options.opponents=", "roles={player_1 = 'policy', player_2 = 'policy'}")
    fair = ("algorithm.preset=grpo+per-role", "algorithm.options.reward=role:outcome")
    settings = ("steps=1", "eval.every=0", "eval.tasks=2", "sampling.max_tokens=2", *fair)
    policy = says(*"012345678")
    steps = await trained("pettingzoo", tmp_path, policy, *roles, *SMALL, *settings)
    (row,) = [row for row in steps if row.committed and "rollouts" in row.metrics]
    assert row.metrics["rollouts/failed"] == 0
    assert row.metrics["grad_norm"] > 0
    assert {"role/player_1/reward", "role/player_2/reward"} <= row.metrics.keys()


async def test_what_an_openenv_server_pays_for_is_learned(tmp_path: Path) -> None:
    """It pays for the length of a message, up to ten signs."""
    with served(python("openenv"), tmp_path, sessions=16) as (url, _):
        settings = (
            f"environment=openenv:{url}",
            "steps=6",
            "eval.every=6",
            "runner.concurrency=16",
        )
        more: Any = ("sampling.max_tokens=2", "environment_options.limit=1")
        policy = says("a", "abc", "abcde", "abcdefghij")
        steps = await trained("openenv", tmp_path, policy, *SMALL, *settings, *more)
    before, *_, after = scores(steps)
    assert after > before + 0.1
