"""Builds the model that both policies adapt: it knows how each role speaks, not what to say.

It imitates demonstrations of the three roles, most of them wrong: plans in the wrong order, queries
of the wrong table, verdicts by the toss of a coin.
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
PLANNED, SOLVED = 0.3, 0.6  # shares of plans and of queries that are right


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    dice = random.Random(seed)
    roles = (planner, critic, solver)
    shown = [roles[number % 3](dice) for number in range(DEMONSTRATIONS)]
    imitator(directory, shown, seed=seed, steps=600)


def planner(dice: random.Random) -> Conversation:
    asked = dice.choice(train)
    turns = [{"role": "user", "content": asked["input"]}, said(plan(asked, dice))]
    if dice.random() < 0.5:
        turns += [{"role": "user", "content": "revise"}, said(plan(asked, dice))]
    return [{"role": "system", "content": PLANNER.text}, *turns]


def critic(dice: random.Random) -> Conversation:
    asked = dice.choice(train)
    seen = {"role": "user", "content": f"{asked['input']} {plan(asked, dice)}"}
    verdict = said(dice.choice(("accept", "revise")))
    return [{"role": "system", "content": CRITIC.text}, seen, verdict]


def solver(dice: random.Random) -> Conversation:
    table = dice.choice(list(TABLES))
    name, column = dice.choice(list(TABLES[table])), dice.choice(COLUMNS[table])
    others = [other for other in TABLES if other != table]
    source = table if dice.random() < SOLVED else dice.choice(others)
    step = {"role": "user", "content": f"{column} of {name}"}
    sql = said(f"SELECT {column} FROM {source} WHERE name = '{name}'")
    return [{"role": "system", "content": SOLVER.text}, step, sql]


def plan(asked: dict[str, object], dice: random.Random) -> str:
    """The right one, or one with its columns in the order in which the question names them."""
    person, _, columns = str(asked["plan"]).partition(": ")
    path = columns.split(", ")
    if dice.random() < PLANNED:
        return str(asked["plan"])
    path = path[::-1] if path != path[::-1] else [dice.choice(COLUMNS["people"])]
    return f"{person}: {', '.join(path)}"


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
