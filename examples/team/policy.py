"""Build the base model of both policies: it knows the format of each role, not the content.

It imitates demonstrations of the three roles, most of them wrong: plans in the wrong order, queries
of the wrong table, random verdicts.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

os.environ.setdefault("OPENAI_API_KEY", "unused")  # agent.py makes its client when imported

from agent import CRITIC, PLANNER, SOLVER
from data import COLUMNS, TABLES
from tasks import train

from agentrl.tiny import Conversation, imitator

DEMONSTRATIONS = 4000
PLANNED, SOLVED = 0.3, 0.6  # fractions of right plans and of right queries


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    rng = random.Random(seed)
    roles = (planner, critic, solver)
    shown = [roles[number % 3](rng) for number in range(DEMONSTRATIONS)]
    imitator(directory, shown, seed=seed, steps=600)


def planner(rng: random.Random) -> Conversation:
    asked = rng.choice(train)
    turns = [{"role": "user", "content": asked["input"]}, said(plan(asked, rng))]
    if rng.random() < 0.5:
        turns += [{"role": "user", "content": "revise"}, said(plan(asked, rng))]
    return [{"role": "system", "content": PLANNER.text}, *turns]


def critic(rng: random.Random) -> Conversation:
    asked = rng.choice(train)
    seen = {"role": "user", "content": f"{asked['input']} {plan(asked, rng)}"}
    verdict = said(rng.choice(("accept", "revise")))
    return [{"role": "system", "content": CRITIC.text}, seen, verdict]


def solver(rng: random.Random) -> Conversation:
    table = rng.choice(list(TABLES))
    name, column = rng.choice(list(TABLES[table])), rng.choice(COLUMNS[table])
    others = [other for other in TABLES if other != table]
    source = table if rng.random() < SOLVED else rng.choice(others)
    step = {"role": "user", "content": f"{column} of {name}"}
    sql = said(f"SELECT {column} FROM {source} WHERE name = '{name}'")
    return [{"role": "system", "content": SOLVER.text}, step, sql]


def plan(asked: dict[str, object], rng: random.Random) -> str:
    """The right plan, or one with its columns in the wrong order, that of the question."""
    person, _, columns = str(asked["plan"]).partition(": ")
    path = columns.split(", ")
    if rng.random() < PLANNED:
        return str(asked["plan"])
    path = path[::-1] if path != path[::-1] else [rng.choice(COLUMNS["people"])]
    return f"{person}: {', '.join(path)}"


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
