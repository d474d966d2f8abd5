"""ledger: a way of `ways` like its bank, but with sixteen bookings.

The policy starts between the right word and one other, so that it loses no form and what is slow
is the noise: a wrong word takes back what is booked of its transaction, of two bookings.
"""

from __future__ import annotations

import random
from pathlib import Path

import ways
from tools import WORDS, Message, Tool
from ways import RIGHT, TOWNS, WAYS, Way, agent, tasks
from ways import best as best
from ways import verify as verify

WAYS["ledger"] = Way(places=16, words=32, back=lambda place: place - place % 2, step=2)
_dice = random.Random("ledger")
PLACES = [f"ledger {town}{n}" for town in TOWNS for n in range(WAYS["ledger"].places)]
RIGHT.update({place: _dice.choice(WORDS) for place in PLACES})
OTHER = {place: _dice.choice([word for word in WORDS if word != RIGHT[place]]) for place in PLACES}
RANDOM = ways.random_score("ledger")


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """The right word or one that is right elsewhere, with equal probability."""
    return "", random.choice([RIGHT, OTHER])[messages[-1]["content"]]


ledger, ledger_heldout = tasks("ledger", 1), tasks("ledger", 16)


def build_ledger(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, ledger, 0.8, folder, seed)
