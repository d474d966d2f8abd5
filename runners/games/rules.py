"""An OpenSpiel game as text: observations, legal moves and returns.

OpenSpiel applies the rules. Defined here is only what it has no rule for: the returns after a
forfeit or of a game that is ended early.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentrl.errors import ConfigError, install_command, nearest

Parameter = bool | int | float | str
SEED = "rng_seed"  # OpenSpiel's parameter for games that sample chance moves themselves
LAST_WORD = re.compile(r".*\bmove:(.*)", re.IGNORECASE | re.DOTALL)


def role_of(player: int) -> str:
    """Return the role of a player's model calls."""
    return f"player_{player}"


@dataclass(frozen=True, slots=True)
class View:
    """A player's observation and legal moves when it has to move."""

    game: str  # OpenSpiel's short name
    player: int  # from 0
    seen: str  # OpenSpiel's text of the information state or observation
    legal: Mapping[str, int]  # moves as text -> OpenSpiel's actions

    @property
    def choice(self) -> str:
        """The legal moves, one per line, as they may contain any other separator."""
        return "\n".join(["Legal moves:", *self.legal])

    def read(self, answer: str) -> int | None:
        """Parse an answer: a legal move alone, or after its last "Move:". Case, spaces and a final
        full stop are ignored. Returns its action, or None without a legal move."""
        last = LAST_WORD.fullmatch(answer)
        text = _plain(last[1] if last else answer)
        return next((action for move, action in self.legal.items() if _plain(move) == text), None)


class Game:
    """An OpenSpiel game with its parameters; several of its states may be in play at once."""

    def __init__(
        self, name: str, parameters: Mapping[str, Parameter] | None = None, seed: int = 0
    ) -> None:
        """`name`: a short name or a full game string, such as "misere(game=tic_tac_toe())".
        `seed`: for games that sample chance outside of their tree.

        Raises ConfigError for an unknown game and for one that text agents cannot play."""
        self._spiel = library()
        kind = self._spiel.GameType
        wanted = tuple((parameters or {}).items())
        self.rules = _loaded(name, wanted)
        if self.rules.get_type().chance_mode == kind.ChanceMode.SAMPLED_STOCHASTIC:
            if SEED not in self.rules.get_type().parameter_specification:
                raise ConfigError(f"game = {name!r}: its chance cannot be seeded; choose another")
            self.rules = _load(name, ((SEED, seed), *wanted))  # not shared: it has its own rng
        about = self.rules.get_type()
        if about.dynamics == kind.Dynamics.MEAN_FIELD or about.action_structs_only:
            raise ConfigError(f"game = {name!r} has no moves as text; choose another")
        self.name: str = about.short_name
        self.players: int = self.rules.num_players()
        self.perfect = about.information == kind.Information.PERFECT_INFORMATION
        self._has_information_state = about.provides_information_state_string
        self._has_observation = about.provides_observation_string
        self._same_return = about.utility == kind.Utility.IDENTICAL
        self._constant_sum = about.utility in (kind.Utility.ZERO_SUM, kind.Utility.CONSTANT_SUM)
        self._pays_during_game = about.reward_model == kind.RewardModel.REWARDS
        if not (self._has_information_state or self._has_observation or self.perfect):
            raise ConfigError(f"game = {name!r} has no observations as text; choose another")

    def start(self) -> Any:
        """The state before the first move, a `pyspiel.State`."""
        return self.rules.new_initial_state()

    def to_move(self, state: Any) -> list[int]:
        """Return the players to move, several in a simultaneous move."""
        if state.current_player() != self._spiel.PlayerId.SIMULTANEOUS:
            return [state.current_player()]
        return [player for player in range(self.players) if state.legal_actions(player)]

    def advance(self, state: Any, choices: Mapping[int, int]) -> None:
        """Apply the actions of all players in `to_move`."""
        if state.current_player() != self._spiel.PlayerId.SIMULTANEOUS:
            state.apply_action(*choices.values())
            return
        none = self._spiel.INVALID_ACTION
        state.apply_actions([choices.get(player, none) for player in range(self.players)])

    def view(self, state: Any, player: int) -> View:
        """Return the player's view of `state`: with perfect information the board, else its
        information state, else its observation; and its legal moves."""
        if self.perfect:
            seen = state.observation_string(player) if self._has_observation else str(state)
        elif self._has_information_state:
            seen = state.information_state_string(player)
        else:
            seen = state.observation_string(player)
        return View(self.name, player, seen.strip(), self.moves(state, player))

    def moves(self, state: Any, player: int) -> dict[str, int]:
        """Map legal moves as text to actions. Equal texts are distinguished by their action."""
        texts = [(self.words(state, player, a), a) for a in state.legal_actions(player)]
        count = Counter(_plain(text) for text, _ in texts)
        return {
            text if count[_plain(text)] == 1 else f"{text} ({action})": action
            for text, action in texts
        }

    def words(self, state: Any, player: int, action: int) -> str:
        """Return a move as one line of text."""
        return " ".join(state.action_to_string(player, action).split()).strip(" ,")

    def forfeited(self, state: Any, losers: Collection[int]) -> list[float]:
        """Compute the returns [players] of a game that `losers` forfeited: they get the lowest
        return of the game.

        In a constant-sum game the others share the rest of the sum; if all forfeit, all share the
        sum. In a game with identical returns all get the lowest. In any other game the others keep
        their returns so far: no one profits from another player's mistake."""
        worst, players = self.rules.min_utility(), range(self.players)
        if self._same_return:
            return [worst] * self.players
        others = self.players - len(losers)
        if not self._constant_sum:
            return [worst if p in losers else float(state.returns()[p]) for p in players]
        if not others:
            return self._evenly()
        rest = (self.rules.utility_sum() - worst * len(losers)) / others
        return [worst if player in losers else rest for player in players]

    def broken_off(self, state: Any) -> list[float]:
        """Compute the returns [players] of a game that is ended early: a draw if it has a constant
        sum and pays at its end only, else each player's returns so far."""
        if self._constant_sum and not self._pays_during_game:
            return self._evenly()
        return [float(value) for value in state.returns()]

    def _evenly(self) -> list[float]:
        return [self.rules.utility_sum() / self.players] * self.players


def library() -> Any:
    """Import pyspiel. Raises ConfigError if it is not installed."""
    try:
        import pyspiel
    except ImportError:
        raise ConfigError(f"games need OpenSpiel: {install_command('games')}") from None
    return pyspiel


def _load(name: str, parameters: tuple[tuple[str, Parameter], ...]) -> Any:
    spiel = library()
    short, known = name.partition("(")[0], spiel.registered_names()
    if short not in known:
        raise ConfigError(f"game = {name!r}: OpenSpiel has no such game; {nearest(short, known)}")
    try:
        named = spiel.game_parameters_from_string(name)
        del named["name"]
        return spiel.load_game(short, named | dict(parameters))
    except (spiel.SpielError, LookupError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"game = {name!r} cannot be loaded: {reason}") from None


_loaded = lru_cache(maxsize=64)(_load)  # some games read files


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
