"""Kuhn poker as a prompt: the player's card and the moves so far.

The rules are OpenSpiel's: three cards, two players, one bet. The agent also runs by itself with any
OpenAI-compatible server: `await agent(tasks.train[0]["input"])`.
"""

from agentrl.runners.games import GameAgent, View

GAME = "kuhn_poker"
CARDS = ("jack", "queen", "king")
DONE = {"p": "Pass", "b": "Bet"}


def describe(view: View) -> list[dict[str, str]]:
    """Convert OpenSpiel's "1pb" to "queen Pass Bet"; the number of moves shows the player's
    seat."""
    card, *moves = view.seen
    said = " ".join([CARDS[int(card)], *(DONE[move] for move in moves)])
    return [{"role": "user", "content": said}]


agent = GameAgent(describe)
