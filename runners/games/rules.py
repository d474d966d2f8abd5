"""A game of OpenSpiel as text: what each player sees, its legal moves, and the returns.

All rules are the library's. Only what it has no rule for is decided here: the returns when a player
forfeits, or when a game is broken off.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentrl.errors import ConfigError, nearest

Parameter = bool | int | float | str
SEED = "rng_seed"  # OpenSpiel's parameter for games that draw their chance themselves
LAST_WORD = re.compile(r".*\bmove:(.*)", re.IGNORECASE | re.DOTALL)


def role_of(player: int) -> str:
    """The role under which a player's model calls are made."""
    return f"player_{player}"


@dataclass(frozen=True, slots=True)
class View:
    """What a player is told when it has to move."""

    game: str  # OpenSpiel's short name
    player: int  # from 0
    seen: str  # its information state or observation, in OpenSpiel's text
    legal: Mapping[str, int]  # its moves as text -> OpenSpiel's actions

    @property
    def choice(self) -> str:
        """The legal moves, one in a line, as they may contain any other separator."""
        return "\n".join(["Legal moves:", *self.legal])

    def read(self, answer: str) -> int | None:
        """The action that `answer` names: a legal move alone, or after its last "Move:". Case,
        spaces and a full stop do not matter. None: it names no legal move."""
        last = LAST_WORD.fullmatch(answer)
        said = _plain(last[1] if last else answer)
        return next((action for move, action in self.legal.items() if _plain(move) == said), None)


class Game:
    """One of OpenSpiel's games with its parameters. Several states of it may be played at once."""

    def __init__(
        self, name: str, parameters: Mapping[str, Parameter] | None = None, seed: int = 0
    ) -> None:
        """`name` is a short name or a whole game string, such as "misere(game=tic_tac_toe())". The
        seed is for games whose chance is not part of their tree.

        Raises ConfigError for what is not a game, and for one that no text agent can play."""
        self._spiel = library()
        kind = self._spiel.GameType
        wanted = tuple((parameters or {}).items())
        self.rules = _loaded(name, wanted)
        if self.rules.get_type().chance_mode == kind.ChanceMode.SAMPLED_STOCHASTIC:
            if SEED not in self.rules.get_type().parameter_specification:
                raise ConfigError(f"game = {name!r}: its chance cannot be seeded; choose another")
            self.rules = _load(name, ((SEED, seed), *wanted))  # not shared: it draws its own chance
        about = self.rules.get_type()
        if about.dynamics == kind.Dynamics.MEAN_FIELD or about.action_structs_only:
            raise ConfigError(f"game = {name!r} has no players with moves in words; choose another")
        self.name: str = about.short_name
        self.players: int = self.rules.num_players()
        self.perfect = about.information == kind.Information.PERFECT_INFORMATION
        self._has_information_state = about.provides_information_state_string
        self._has_observation = about.provides_observation_string
        self._same_return = about.utility == kind.Utility.IDENTICAL
        self._constant_sum = about.utility in (kind.Utility.ZERO_SUM, kind.Utility.CONSTANT_SUM)
        self._pays_during_game = about.reward_model == kind.RewardModel.REWARDS
        if not (self._has_information_state or self._has_observation or self.perfect):
            raise ConfigError(f"game = {name!r} does not say what a player sees; choose another")

    def start(self) -> Any:
        """The state before the first move, a `pyspiel.State`."""
        return self.rules.new_initial_state()

    def to_move(self, state: Any) -> list[int]:
        """The players who move now, several if they move at the same time."""
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
        """What `player` knows in `state`, and its legal moves. With perfect information that is the
        board, else its information state, else its observation."""
        if self.perfect:
            seen = state.observation_string(player) if self._has_observation else str(state)
        elif self._has_information_state:
            seen = state.information_state_string(player)
        else:
            seen = state.observation_string(player)
        return View(self.name, player, seen.strip(), self.moves(state, player))

    def moves(self, state: Any, player: int) -> dict[str, int]:
        """Legal moves as text -> actions. Moves with the same text are numbered."""
        texts = [(self.words(state, player, a), a) for a in state.legal_actions(player)]
        count = Counter(_plain(text) for text, _ in texts)
        return {
            text if count[_plain(text)] == 1 else f"{text} ({action})": action
            for text, action in texts
        }

    def words(self, state: Any, player: int, action: int) -> str:
        """A move as one line of text."""
        return " ".join(state.action_to_string(player, action).split()).strip(" ,")

    def forfeited(self, state: Any, losers: Collection[int]) -> list[float]:
        """Returns [players] of a game that `losers` lost by forfeit. They get its lowest return.

        If the returns have a constant sum, the others share the rest of it; if all have forfeited,
        all share the sum. If all players have the same return, all get the lowest. In any other
        game the others keep what they have by then: nobody is paid for another's mistake."""
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
        """Returns [players] of a game that is ended early: a draw. Where rewards come with the
        moves, or have no constant sum, all players keep what they have."""
        if self._constant_sum and not self._pays_during_game:
            return self._evenly()
        return [float(value) for value in state.returns()]

    def _evenly(self) -> list[float]:
        return [self.rules.utility_sum() / self.players] * self.players


def library() -> Any:
    """pyspiel. Raises ConfigError where it is not installed."""
    try:
        import pyspiel
    except ImportError:
        raise ConfigError("games need OpenSpiel: pip install 'agentrl[games]'") from None
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
        said = " ".join(str(error).split())
        raise ConfigError(f"game = {name!r} cannot be played so: {said}") from None


_loaded = lru_cache(maxsize=64)(_load)  # some games read files


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
