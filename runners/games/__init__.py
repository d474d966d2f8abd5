"""OpenSpiel games as ordinary agents: models play by text, OpenSpiel applies the rules.

`GameAgent` is the agent, `GameTask` its input, `verify` the verifier of its result. Needs the extra
`games`: OpenSpiel is imported when the first game is loaded.
"""

from agentrl.runners.games.agent import GameAgent, ask_for_move
from agentrl.runners.games.match import GameResult, GameTask, Match, verify
from agentrl.runners.games.rules import Game, View, role_of

__all__ = [
    "Game",
    "GameAgent",
    "GameResult",
    "GameTask",
    "Match",
    "View",
    "ask_for_move",
    "role_of",
    "verify",
]
