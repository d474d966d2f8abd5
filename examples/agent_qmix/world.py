"""What the team is asked: chains of three relations, of which each agent has the notes of one."""

from __future__ import annotations

import random
from typing import Any

PEOPLE = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gail", "Hugo", "Ines", "Jon", "Kim", "Leo"]
CITIES = ["Oslo", "Lima", "Cairo", "Delhi", "Porto", "Quito", "Seoul", "Tunis"]
RELATIONS = {"manager": (PEOPLE, PEOPLE), "city": (PEOPLE, CITIES), "mayor": (CITIES, PEOPLE)}
"""Name -> what it leads from, and to. In the order of the agents that know them."""
CHAINS = [
    *(("manager",), ("city",), ("mayor",)),
    *(("manager", "city"), ("city", "mayor")),  # what an agent finds out, a later one needs
    *(("mayor", "manager"), ("mayor", "city")),  # an earlier one
]
FACTS = 3  # in the notes of an agent

Task = dict[str, Any]


def task(dice: random.Random) -> Task:
    """A question, the notes of the agents, and the answer."""
    chain = dice.choice(CHAINS)
    notes = {name: _facts(name, dice) for name in RELATIONS}
    subject = start = dice.choice(RELATIONS[chain[0]][0])
    for name in chain:
        if subject not in notes[name]:
            del notes[name][dice.choice(list(notes[name]))]
            notes[name][subject] = dice.choice(RELATIONS[name][1])
        subject = notes[name][subject]
    question = " of ".join((*reversed(chain), start))
    said = [note(name, facts, dice) for name, facts in notes.items()]
    return {"question": question, "notes": said, "answer": subject}


def note(name: str, facts: dict[str, str], dice: random.Random) -> str:
    pairs = [f"{subject} {found}" for subject, found in facts.items()]
    return f"{name}: {', '.join(dice.sample(pairs, len(pairs)))}"


def _facts(name: str, dice: random.Random) -> dict[str, str]:
    known, found = RELATIONS[name]
    return {subject: dice.choice(found) for subject in dice.sample(known, FACTS)}


def hops(said: str) -> int:
    """How far a text is from an answer."""
    return said.count(" of ")


def tasks(seed: str, count: int) -> list[Task]:
    dice = random.Random(seed)
    return [task(dice) for _ in range(count)]
