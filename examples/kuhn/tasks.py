"""One task for each of the six deals, so each group compares games with the same cards."""

from itertools import count

from game import GAME, agent

from agentrl.runners.games import GameTask, Match

DEALS = 6


def deal(seed: int) -> tuple[str, ...]:
    """The cards of both players."""
    match = Match(GameTask(game=GAME, seed=seed), agent.prompt, agent.ask)
    match.deal()
    return tuple(card for _, card in match.moves)


def one_of_each() -> dict[tuple[str, ...], int]:
    """Deal -> the first seed that deals it."""
    seeds: dict[tuple[str, ...], int] = {}
    for seed in count():
        if len(seeds) == DEALS:
            return seeds
        seeds.setdefault(deal(seed), seed)
    raise AssertionError


train = [{"id": f"deal-{n}", "input": {"game": GAME, "seed": n}} for n in one_of_each().values()]
