"""Two players share books, hats and basketballs that each of them values differently.

OpenSpiel's `bargaining` (Lewis et al. 2017): each player knows only its own values. In turns they
say what they would keep, until one agrees; without an agreement both get nothing. The agent also
runs by itself, against any OpenAI-compatible server:
`await agent(tasks.heldout[0]["input"])`.
"""

import re
from typing import NamedTuple

from agentrl.runners.games import GameAgent, View

ITEMS = ("Book", "Hat", "Basketball")
AMOUNT = re.compile(rf"(?:{'|'.join(ITEMS)}): (\d+)")


class Deal(NamedTuple):
    """What a player sees of a game. Amounts are of books, hats and basketballs, in this order."""

    pool: list[int]
    values: list[int]  # of one item each, to the player; the whole pool is worth 10
    offers: list[list[int]]  # what those who made them would keep, oldest first

    def worth(self, amounts: list[int]) -> int:
        return sum(n * value for n, value in zip(amounts, self.values, strict=True))

    def left(self) -> list[int]:
        """What the latest offer leaves to the player who received it."""
        return [n - kept for n, kept in zip(self.pool, self.offers[-1], strict=True)]


def amounts(words: str) -> list[int]:
    """The number of each item in a text of OpenSpiel, such as a move; empty if it names none."""
    return [int(n) for n in AMOUNT.findall(words)]


def read(view: View) -> Deal:
    pool, values, *offers = filter(None, map(amounts, view.seen.splitlines()))
    return Deal(pool, values, offers)


def describe(view: View) -> list[dict[str, str]]:
    """Each item with its value, and the total value of what the latest offer leaves, so that a
    model can learn when to agree without learning to multiply first."""
    deal = read(view)
    said = [f"P{view.player} after {len(deal.offers)} offers"]
    items = zip(ITEMS, deal.pool, deal.values, strict=True)
    said += [f"{item}: {n} worth {value}" for item, n, value in items]
    if deal.offers:
        left = " ".join(f"{item}: {n}" for item, n in zip(ITEMS, deal.left(), strict=True))
        said.append(f"Left: {left} worth {deal.worth(deal.left())}")
    return [{"role": "user", "content": "\n".join(said)}]


agent = GameAgent(describe)
