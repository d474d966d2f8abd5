"""TextArena: text games of one player, or of several that are roles."""

import random
import re
from typing import Any

from agentrl.environments import Episode
from agentrl.environments.toolbox import Seeded, by_role, content, number, shortest
from agentrl.errors import ConfigError
from agentrl.types import Reward

CURES = {
    "nltk": "it needs words: python -m nltk.downloader words averaged_perceptron_tagger_eng",
    "f-string": "it is written for Python 3.12",
    "OPENROUTER": "its gamemaster is a model of OpenRouter, not of this run: choose another game",
}


class TextArenaGame(Episode):
    keep = False  # what a player is told has all that was said before

    def __init__(self, plugin: "TextArena", seed: int) -> None:
        import textarena

        self.plugin, self.seed, self.turns, self.moved = plugin, seed, 0, set[str]()
        self.env = textarena.make(plugin.what, **plugin.options)
        self.scores: dict[str, float] = {}

    def reset(self) -> str:
        random.seed(self.seed)  # many games draw from the generator of the process
        self.env.reset(num_players=self.plugin.players, seed=self.seed)
        return self.turn()

    def turn(self) -> str:
        who, said = self.env.get_observation()
        self.role, self.last = self.plugin.names[who], str(said).rpartition("[GAME]")[2]
        return str(said)

    def step(self, reply: dict[str, Any]) -> tuple[str, float | None, bool]:
        mover, self.turns = self.role, self.turns + 1
        self.moved.add(mover)
        done, _ = self.env.step(action=content(reply))
        if not done and self.turns < self.plugin.limit:
            return self.turn(), None, False
        names = self.plugin.names
        found, info = self.env.close() if done else (dict.fromkeys(range(len(names)), 0.0), {})
        if len(names) == 1 and (info or {}).get(0, {}).get("invalid_move"):
            found = {0: self.plugin.illegal}  # games give part of their score, or the reason's text
        if missing := [name for i, name in enumerate(names) if i not in (found or {})]:
            raise ValueError(f"the game ended without a reward for {', '.join(missing)}")
        self.scores = {name: number(found[i]) for i, name in enumerate(names)}
        return "", self.scores[mover], True

    def rewards(self) -> list[Reward] | None:
        several = len(self.plugin.names) > 1
        return by_role(self.scores, self.moved) if several else None


class TextArena(Seeded):
    """Text games of TextArena, of one player, or of several, the roles player_0 and so on.

    Options: players, episodes (of each split, by seed), limit (of turns: a game that is cut short
    is a draw), illegal (reward of a single player whose illegal moves end the game); others are
    the game's."""

    requires = ("textarena==0.7.4", "numpy==2.4.6")
    isolation = "process"  # many games draw from the generator of the process

    def __init__(self, what: str, players: int = 1, episodes: int = 64, limit: int = 100,
                 illegal: float = -1.0, **options: Any) -> None:  # fmt: skip
        self.illegal = illegal
        self.what, self.players, self.episodes, self.limit = what, players, episodes, limit
        self.names = [f"player_{i}" for i in range(players)] if players > 1 else ["agent"]
        self.options, self.roles = options, tuple(self.names) if players > 1 else ()
        try:
            self.open({"seed": 0}).reset()
        except (LookupError, ValueError, SyntaxError) as error:
            cure = next((cure for word, cure in CURES.items() if word in str(error)), "")
            raise ConfigError(f"{what}: {cure or error}") from None

    def open(self, input: Any) -> TextArenaGame:
        return TextArenaGame(self, input["seed"])

    def solution(self, input: Any) -> Any:
        moves = re.compile(r"\[[^]]+\]")  # as they are told
        return shortest(lambda: self.open(input), lambda game: moves.findall(game.last), 0.99)
