"""OpenSpiel games as ordinary agents: models play by text, OpenSpiel applies the rules.

`GameAgent` is the agent, `GameTask` its input, `verify` the verifier of its result. Needs the extra
`games`: OpenSpiel is imported when the first game is loaded.
"""

from agentrl.runners.games.agent import GameAgent as GameAgent
from agentrl.runners.games.agent import ask_for_move as ask_for_move
from agentrl.runners.games.match import GameResult as GameResult
from agentrl.runners.games.match import GameTask as GameTask
from agentrl.runners.games.match import Match as Match
from agentrl.runners.games.match import verify as verify
from agentrl.runners.games.rules import Game as Game
from agentrl.runners.games.rules import View as View
from agentrl.runners.games.rules import role_of as role_of
