"""OpenSpiel games as ordinary agents: models play by text, OpenSpiel applies the rules.

`GameAgent` is the agent, `GameTask` its input, `verify` the verifier of its result. Needs the extra
`games`: OpenSpiel is imported when the first game is loaded.
"""

from typing import TYPE_CHECKING

from agentrl.base.late import late

if TYPE_CHECKING:
    from agentrl.runners.games.agent import GameAgent as GameAgent
    from agentrl.runners.games.agent import ask_for_move as ask_for_move
    from agentrl.runners.games.match import GameResult as GameResult
    from agentrl.runners.games.match import GameTask as GameTask
    from agentrl.runners.games.match import Match as Match
    from agentrl.runners.games.match import verify as verify
    from agentrl.runners.games.rules import Game as Game
    from agentrl.runners.games.rules import View as View
    from agentrl.runners.games.rules import role_of as role_of

# Imported late, because the part's record in this folder imports nothing of it.
LATE = {
    "agent": "GameAgent ask_for_move",
    "match": "GameResult GameTask Match verify",
    "rules": "Game View role_of",
}
__getattr__ = late(__name__, LATE)
