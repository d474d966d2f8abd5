"""One task for each of the six deals, so that every group compares games of the same cards."""

import asyncio
from itertools import count

from game import GAME, agent

DEALS = 6
players = {"player_0": "random", "player_1": "random"}  # here alone, to see the cards


async def deal(seed: int) -> tuple[str, ...]:
    result = await agent({"game": GAME, "seed": seed, "players": players})
    return tuple(move for who, move in result["moves"] if who == "chance")


def one_of_each() -> dict[tuple[str, ...], int]:
    """Deal -> the first seed that gives it."""
    seeds: dict[tuple[str, ...], int] = {}
    for seed in count():
        if len(seeds) == DEALS:
            return seeds
        seeds.setdefault(asyncio.run(deal(seed)), seed)
    raise AssertionError


train = [{"id": f"deal-{n}", "input": {"game": GAME, "seed": n}} for n in one_of_each().values()]
