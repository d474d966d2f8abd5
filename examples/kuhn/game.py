"""Kuhn poker in few words: the card that a player holds, and what was done so far.

The rules are OpenSpiel's: three cards, two players, one bet. The agent runs by itself, too, against
any OpenAI-compatible server: `await agent(tasks.train[0]["input"])`.
"""

from agentrl.runners.games import GameAgent, View

GAME = "kuhn_poker"
CARDS = ("jack", "queen", "king")
DONE = {"p": "Pass", "b": "Bet"}


def describe(view: View) -> list[dict[str, str]]:
    """OpenSpiel's "1pb" is "queen Pass Bet": the moves' number tells the player's seat."""
    card, *moves = view.seen
    said = " ".join([CARDS[int(card)], *(DONE[move] for move in moves)])
    return [{"role": "user", "content": said}]


agent = GameAgent(describe)
