"""Scripted players: random, perfect (minimax), or OpenSpiel's Monte Carlo tree search."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

from agentrl.errors import ConfigError, nearest
from agentrl.runners.games.rules import Game, library

Scripted = Callable[[Any], int]
"""Maps a `pyspiel.State` in which the player has to move to its action."""
KINDS = ("random", "perfect", "mcts")
LONGEST_SEARCHED_GAME = 12  # moves of the longest game that minimax searches
SIMULATIONS = 100  # default number of MCTS simulations for a move


def scripted(kind: str, game: Game, player: int, seed: str) -> Scripted:
    """Create a player of kind "random", "perfect", "mcts" or "mcts:SIMULATIONS".

    Raises ConfigError for another kind, and for one that cannot play this game."""
    name, colon, number = kind.partition(":")
    counted = name == "mcts" and number.isdecimal() and int(number) > 0
    if name not in KINDS or (colon and not counted):
        raise ConfigError(f"players: {kind!r} is no scripted player; {nearest(name, KINDS)}")
    rng = Random(seed)
    if name == "random":
        return lambda state: rng.choice(state.legal_actions(player))
    _check(game, name)
    if name == "perfect":
        solved = _solved(str(game.rules))
        return lambda state: rng.choice(solved(state))
    return _mcts(game, int(number or SIMULATIONS), rng.getrandbits(31))


def _check(game: Game, name: str) -> None:
    """Raise ConfigError unless this is a sequential two-player zero-sum game with perfect
    information and, for a perfect player, short and without chance."""
    kind, about = library().GameType, game.rules.get_type()
    in_turns = about.dynamics == kind.Dynamics.SEQUENTIAL and game.players == 2
    if not (in_turns and game.perfect and about.utility == kind.Utility.ZERO_SUM):
        raise ConfigError(
            f"players: {name!r} plays sequential two-player zero-sum games with perfect "
            f"information, and {game.name} is not one; choose 'random' or a model"
        )
    certain = about.chance_mode == kind.ChanceMode.DETERMINISTIC
    if name == "perfect" and not (
        certain and game.rules.max_game_length() <= LONGEST_SEARCHED_GAME
    ):
        raise ConfigError(
            f"players: 'perfect' plays games of up to {LONGEST_SEARCHED_GAME} moves without "
            f"chance, and {game.name} is not one; choose 'mcts'"
        )


@lru_cache(maxsize=8)
def _solved(game: str) -> Callable[[Any], list[int]]:
    """Return a function from a state of the game to all its best actions."""
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
