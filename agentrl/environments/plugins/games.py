"""Games of one or several players with text observations: PettingZoo and TextArena."""

import random
import re
import sys
from importlib import import_module
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.types import Reward
from agentrl.environments import Episode
from agentrl.environments.toolbox import (
    BOARD,
    Seeded,
    board,
    by_role,
    content,
    named,
    number,
    rules,
    shortest,
)


class PettingZooGame(Episode):
    keep = False  # an observation contains the whole state

    def __init__(self, plugin: "PettingZoo", seed: int) -> None:
        self.plugin, self.seed, self.dice, self.turns = plugin, seed, random.Random(seed), 0
        self.env, self.moved, agents = plugin.make(), set[str](), plugin.agents
        self.learner = agents[seed % len(agents)] if plugin.opponents else ""
        self.total = dict.fromkeys(agents, 0.0)

    def reset(self) -> Any:
        self.env.reset(seed=self.seed)
        return self.turn()

    def turn(self) -> Any:
        """The observation of the next player, after moves of random opponents and of players that
        have ended."""
        while self.env.agents:
            mover, (obs, _, ended, cut, _) = self.env.agent_selection, self.env.last()
            text, self.names = board(obs, int(self.env.action_space(mover).n))
            if not (ended or cut) and self.learner in ("", mover):
                self.role = "agent" if self.learner else mover
                opening = f"You are {mover}.\n\n{rules(self.plugin.doc, BOARD)}"
                return [{"role": "system", "content": opening}, {"role": "user", "content": text}]
            self.move(None if ended or cut else int(self.dice.choice(self.names)))
        return ""

    def move(self, action: int | None) -> None:
        self.env.step(action)
        self.total |= {n: self.total[n] + number(v) for n, v in self.env.rewards.items()}

    def step(self, reply: dict[str, Any]) -> tuple[Any, float | dict[str, float], bool]:
        mover, action = self.env.agent_selection, named(reply, self.names)
        before, self.turns, self.moved = dict(self.total), self.turns + 1, self.moved | {mover}
        if action is None:  # an illegal move loses, as in PettingZoo
            self.total[mover] -= 1
            return "", self.gains(before, mover), True
        self.move(int(action))
        observation = self.turn()
        over = self.turns >= self.plugin.limit or not self.env.agents
        return observation, self.gains(before, mover), over

    def gains(self, before: dict[str, float], mover: str) -> float | dict[str, float]:
        """The rewards of a move, for the policy or by role: others may lose by a move, and in a
        simultaneous game the last player's move also rewards the players before."""
        gained = {name: value - before[name] for name, value in self.total.items()}
        if self.learner:
            return gained[mover]
        return {name: gain for name, gain in gained.items() if gain or name == mover}

    def rewards(self) -> list[Reward] | None:
        return None if self.learner else by_role(self.total, self.moved)


class PettingZoo(Seeded):
    """PettingZoo: games in which agents move in turn, each agent a role, seen as text. WHAT
    is a module, such as classic.tictactoe_v3.

    Options: opponents ("random": the policy plays each agent in turn, against random moves; "": all
    are roles), episodes (of each split, by seed), limit (of turns); others are the game's."""

    requires = ("pettingzoo==1.27.0", "pygame==2.6.1")

    def __init__(self, what: str, opponents: str = "", episodes: int = 64, limit: int = 200,
                 **options: Any) -> None:  # fmt: skip
        self.opponents, self.episodes, self.limit = opponents, episodes, limit
        self.make: Any = lambda: import_module(f"pettingzoo.{what}").env(**options)
        self.agents = tuple(self.make().possible_agents)
        self.doc = sys.modules[type(self.make().unwrapped).__module__].__doc__
        self.roles = () if opponents else self.agents

    def open(self, input: Any) -> PettingZooGame:
        return PettingZooGame(self, input["seed"])

    def solution(self, input: Any) -> Any:
        return shortest(lambda: self.open(input), lambda game: game.names)


FIX_HINTS = {
    "nltk": "it needs words: python -m nltk.downloader words averaged_perceptron_tagger_eng",
    "f-string": "it is written for Python 3.12",
    "OPENROUTER": "its gamemaster is a model of OpenRouter, not of this run: choose another game",
}


class TextArenaGame(Episode):
    keep = False  # an observation contains all earlier ones

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
        who, observation = self.env.get_observation()
        self.role, self.last = self.plugin.names[who], str(observation).rpartition("[GAME]")[2]
        return str(observation)

    def step(self, reply: dict[str, Any]) -> tuple[str, float | None, bool]:
        mover, self.turns = self.role, self.turns + 1
        self.moved.add(mover)
        done, _ = self.env.step(action=content(reply))
        if not done and self.turns < self.plugin.limit:
            return self.turn(), None, False
        names = self.plugin.names
        results, info = self.env.close() if done else (dict.fromkeys(range(len(names)), 0.0), {})
        if len(names) == 1 and (info or {}).get(0, {}).get("invalid_move"):
            # Some games return a part of the score, or the text of a reason.
            results = {0: self.plugin.illegal}
        if missing := [name for i, name in enumerate(names) if i not in (results or {})]:
            raise ValueError(f"the game ended without a reward for {', '.join(missing)}")
        self.scores = {name: number(results[i]) for i, name in enumerate(names)}
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
            fix = next((fix for word, fix in FIX_HINTS.items() if word in str(error)), "")
            raise ConfigError(f"{what}: {fix or error}") from None

    def open(self, input: Any) -> TextArenaGame:
        return TextArenaGame(self, input["seed"])

    def solution(self, input: Any) -> Any:
        moves = re.compile(r"\[[^]]+\]")  # as observed
        return shortest(lambda: self.open(input), lambda game: moves.findall(game.last), 0.99)
