"""bank: transactions of two bookings, and a wrong booking takes its transaction back.

Which of four accounts is right depends on the booking. After a wrong one the agent stands before
the first booking of the same transaction again, as when a tool undoes what it has not finished.
Each booking is a conversation of its own, which is told which one it is. Only the outcome is
rewarded: the share of the transactions that were finished within `CALLS`.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from tools import Message, Tool, choose, tool

ACCOUNTS = ["rent", "wages", "sales", "taxes"]
BANKS = ["red", "blue"]
TRANSACTIONS, BOOKINGS, CALLS = 4, 2, 24
BOOK = tool("book", "account", ACCOUNTS, "booking")
_dice = random.Random("bank")
RIGHT = {
    f"{bank}{transaction}-{booking}": _dice.choice(ACCOUNTS)
    for bank in BANKS
    for transaction in range(TRANSACTIONS)
    for booking in range(BOOKINGS)
}
HABIT = {at: _dice.choice([one for one in ACCOUNTS if one != right]) for at, right in RIGHT.items()}


async def agent(task: dict[str, Any]) -> int:
    """How many transactions were finished."""
    finished = booked = 0
    for _ in range(CALLS):
        at = f"{task['bank']}{finished}-{booked}"
        messages: list[Message] = [{"role": "system", "content": "bank"}]
        messages.append({"role": "user", "content": f"booking {at}"})
        _, account = await choose(messages, BOOK)
        booked = booked + 1 if account == RIGHT[at] else 0
        if booked == BOOKINGS:
            finished, booked = finished + 1, 0
        if finished == TRANSACTIONS:
            break
    return finished


def verify(result: int) -> float:
    return result / TRANSACTIONS


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    return "book", RIGHT[messages[-1]["content"].split()[1]]


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """What is right in another bank."""
    return "book", HABIT[messages[-1]["content"].split()[1]]


@lru_cache(None)
def random_score(finished: int = 0, booked: int = 0, left: int = CALLS) -> float:
    """The mean outcome from here of accounts that are chosen with equal chances."""
    if booked == BOOKINGS:
        return random_score(finished + 1, 0, left)
    if finished == TRANSACTIONS or not left:
        return finished / TRANSACTIONS
    right, wrong = (random_score(finished, at, left - 1) for at in (booked + 1, 0))
    return right / len(ACCOUNTS) + wrong * (1 - 1 / len(ACCOUNTS))


def tasks(times: int) -> list[dict[str, Any]]:
    return [{"id": f"{bank}/{n}", "input": {"bank": bank}} for n in range(times) for bank in BANKS]


train, heldout = tasks(1), tasks(16)


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, train, 0.1, folder, seed)
