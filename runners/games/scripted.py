"""Players without a model: random, perfect by minimax, or Monte Carlo tree search by OpenSpiel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

from agentrl.errors import ConfigError, nearest
from agentrl.runners.games.rules import Game, library

Scripted = Callable[[Any], int]
"""From a state in which it has to move, a `pyspiel.State`, to the player's action."""
KINDS = ("random", "perfect", "mcts")
LONGEST = 12  # moves of the longest game that minimax searches
SIMULATIONS = 100  # of MCTS for a move, where the task gives no number


def scripted(kind: str, game: Game, player: int, seed: str) -> Scripted:
    """The player that `kind` names: "random", "perfect", "mcts" or "mcts:SIMULATIONS".

    Raises ConfigError for another name, and for a player that cannot play this game."""
    name, colon, number = kind.partition(":")
    counted = name == "mcts" and number.isdecimal() and int(number) > 0
    if name not in KINDS or (colon and not counted):
        raise ConfigError(f"players: {kind!r} is no scripted player; {nearest(name, KINDS)}")
    dice = Random(seed)
    if name == "random":
        return lambda state: dice.choice(state.legal_actions(player))
    _check(game, name)
    if name == "perfect":
        solved = _solved(str(game.rules))
        return lambda state: dice.choice(solved(state))
    return _mcts(game, int(number or SIMULATIONS), dice.getrandbits(31))


def _check(game: Game, name: str) -> None:
    """Raises ConfigError unless it is a two-player zero-sum game with turns and perfect
    information, and for a perfect player also short and without chance."""
    kind, about = library().GameType, game.rules.get_type()
    in_turns = about.dynamics == kind.Dynamics.SEQUENTIAL and game.players == 2
    if not (in_turns and game.perfect and about.utility == kind.Utility.ZERO_SUM):
        raise ConfigError(
            f"players: {name!r} plays zero-sum games of two in turns in which nothing is hidden, "
            f"and {game.name} is none; take 'random' or a model"
        )
    certain = about.chance_mode == kind.ChanceMode.DETERMINISTIC
    if name == "perfect" and not (certain and game.rules.max_game_length() <= LONGEST):
        raise ConfigError(
            f"players: 'perfect' searches games of up to {LONGEST} moves without chance to their "
            f"end, and {game.name} is none; take 'mcts'"
        )


@lru_cache(maxsize=8)
def _solved(game: str) -> Callable[[Any], list[int]]:
    """Gives all of the best actions in any state of a game."""
    from open_spiel.python.algorithms.minimax_solver import TOLERANCE, MinimaxSolver

    table = MinimaxSolver(game).solve()

    def best(state: Any) -> list[int]:
        values, top = table[str(state)]
        return [action for action in state.legal_actions() if values[action] > top - TOLERANCE]

    return best


def _mcts(game: Game, simulations: int, seed: int) -> Scripted:
    spiel = library()
    evaluator = spiel.RandomRolloutEvaluator(1, seed)
    options = {"uct_c": 2.0, "max_simulations": simulations, "max_memory_mb": 100, "solve": True}
    bot = spiel.MCTSBot(game.rules, evaluator, seed=seed, verbose=False, **options)
    return lambda state: int(bot.step(state))
