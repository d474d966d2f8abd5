"""Two players divide books, hats and basketballs, which each of them values differently.

OpenSpiel's `bargaining` (Lewis et al. 2017): each player knows only its own values. They take turns
to offer what they would keep, until one agrees; without an agreement both get nothing. The agent
also runs by itself with any OpenAI-compatible server: `await agent(tasks.heldout[0]["input"])`.
"""

import re
from typing import NamedTuple

from agentrl.runners.games import GameAgent, View

ITEMS = ("Book", "Hat", "Basketball")
AMOUNT = re.compile(rf"(?:{'|'.join(ITEMS)}): (\d+)")


class Deal(NamedTuple):
    """A player's view of a game. Amounts are of books, hats and basketballs, in this order."""

    pool: list[int]
    values: list[int]  # the player's value of one item of each kind; the whole pool is worth 10
    offers: list[list[int]]  # the amounts that the offering player keeps, oldest first

    def worth(self, amounts: list[int]) -> int:
        return sum(n * value for n, value in zip(amounts, self.values, strict=True))

    def left(self) -> list[int]:
        """The amounts that the latest offer leaves to its recipient."""
        return [n - kept for n, kept in zip(self.pool, self.offers[-1], strict=True)]


def amounts(words: str) -> list[int]:
    """The number of each item in OpenSpiel's text, such as a move; empty if it names none."""
    return [int(n) for n in AMOUNT.findall(words)]


def read(view: View) -> Deal:
    pool, values, *offers = filter(None, map(amounts, view.seen.splitlines()))
    return Deal(pool, values, offers)


def describe(view: View) -> list[dict[str, str]]:
    """The prompt: each item with its value, and the total value that the latest offer leaves, so
    the model can learn when to agree without learning to multiply."""
    deal = read(view)
    said = [f"P{view.player} after {len(deal.offers)} offers"]
    items = zip(ITEMS, deal.pool, deal.values, strict=True)
    said += [f"{item}: {n} worth {value}" for item, n, value in items]
    if deal.offers:
        left = " ".join(f"{item}: {n}" for item, n in zip(ITEMS, deal.left(), strict=True))
        said.append(f"Left: {left} worth {deal.worth(deal.left())}")
    return [{"role": "user", "content": "\n".join(said)}]


agent = GameAgent(describe)
