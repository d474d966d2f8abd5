"""The questions: one or two steps along relations, of which each agent knows one.

A question with one step needs one agent. With two steps, the agent of the second step must hear the
agent of the first. Held-out questions start from people who occur in no training question.
"""

from __future__ import annotations

import random
from typing import Any

FIRST = (
    "Ada Ben Cleo Dan Eva Finn Gail Hugo Ines Jon Kim Leo Mia Noel Olga Paul Quinn Rosa Sam Tess"
)
PLACES = "Oslo Lima Cairo Delhi Porto Quito Seoul Tunis Accra Bern Dakar Hanoi"
PEOPLE, CITIES = FIRST.split(), PLACES.split()
RELATIONS = {"manager": (PEOPLE, PEOPLE), "city": (PEOPLE, CITIES), "mayor": (CITIES, PEOPLE)}
"""Relation -> its subjects and its objects, in the order of the agents that know them."""
CHAINS = [
    *(("manager",), ("city",), ("mayor",)),
    *(("manager", "city"), ("city", "mayor")),  # a later agent needs an earlier one's result
    *(("mayor", "manager"), ("mayor", "city")),  # an earlier agent needs a later one's result
]
HELDOUT = 4  # the last people and the last cities

Task = dict[str, Any]


def facts() -> dict[str, dict[str, str]]:
    """Relation -> subject -> object."""
    rng = random.Random("world")
    return {
        name: {subject: rng.choice(found) for subject in known}
        for name, (known, found) in RELATIONS.items()
    }


FACTS = facts()


def ask(chain: tuple[str, ...], subject: str) -> str:
    return " of ".join((*reversed(chain), subject))


def step(relation: str, question: str) -> str:
    """The question with its innermost step resolved, if that is a step along this relation."""
    *outer, inner, subject = ["", *question.split(" of ")]
    if inner != relation or subject not in FACTS[relation]:
        return question
    return " of ".join([*outer[1:], FACTS[relation][subject]])


def hops(said: str) -> int:
    """The number of steps left in a text."""
    return said.count(" of ")


def tasks(seed: str, count: int, *, heldout: bool = False) -> list[Task]:
    """Questions and their answers."""
    rng = random.Random(seed)
    found = []
    for chain in rng.choices(CHAINS, k=count):
        known = RELATIONS[chain[0]][0]
        subject = rng.choice(known[-HELDOUT:] if heldout else known[:-HELDOUT])
        answer = question = ask(chain, subject)
        for relation in chain:
            answer = step(relation, answer)
        found.append({"question": question, "answer": answer})
    return found
