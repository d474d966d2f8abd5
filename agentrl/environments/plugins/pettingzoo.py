"""PettingZoo: games in which agents move in turn, each agent a role, seen as text."""

import random
import sys
from importlib import import_module
from typing import Any

from agentrl.environments import Episode
from agentrl.environments.toolbox import (
    BOARD,
    Seeded,
    board,
    by_role,
    named,
    number,
    rules,
    shortest,
)
from agentrl.types import Reward


class PettingZooGame(Episode):
    keep = False  # an observation has all that a move depends on

    def __init__(self, plugin: "PettingZoo", seed: int) -> None:
        self.plugin, self.seed, self.dice, self.turns = plugin, seed, random.Random(seed), 0
        self.env, self.moved, agents = plugin.make(), set[str](), plugin.agents
        self.learner = agents[seed % len(agents)] if plugin.opponents else ""
        self.total = dict.fromkeys(agents, 0.0)

    def reset(self) -> Any:
        self.env.reset(seed=self.seed)
        return self.turn()

    def turn(self) -> Any:
        """What the next to move is told; those that have ended and random opponents move now."""
        while self.env.agents:
            mover, (obs, _, ended, cut, _) = self.env.agent_selection, self.env.last()
            text, self.names = board(obs, int(self.env.action_space(mover).n))
            if not (ended or cut) and self.learner in ("", mover):
                self.role = "agent" if self.learner else mover
                told = f"You are {mover}.\n\n{rules(self.plugin.doc, BOARD)}"
                return [{"role": "system", "content": told}, {"role": "user", "content": text}]
            self.move(None if ended or cut else int(self.dice.choice(self.names)))
        return ""

    def move(self, action: int | None) -> None:
        self.env.step(action)
        self.total |= {n: self.total[n] + number(v) for n, v in self.env.rewards.items()}

    def step(self, reply: dict[str, Any]) -> tuple[Any, float | dict[str, float], bool]:
        mover, action = self.env.agent_selection, named(reply, self.names)
        before, self.turns, self.moved = dict(self.total), self.turns + 1, self.moved | {mover}
        if action is None:  # an illegal move loses, as PettingZoo has it
            self.total[mover] -= 1
            return "", self.gains(before, mover), True
        self.move(int(action))
        said = self.turn()
        over = self.turns >= self.plugin.limit or not self.env.agents
        return said, self.gains(before, mover), over

    def gains(self, before: dict[str, float], mover: str) -> float | dict[str, float]:
        """What a move has brought: to the policy, or to each role. Others lose by it, and who moved
        first in a simultaneous game is paid by the last one's move."""
        gained = {name: value - before[name] for name, value in self.total.items()}
        if self.learner:
            return gained[mover]
        return {name: gain for name, gain in gained.items() if gain or name == mover}

    def rewards(self) -> list[Reward] | None:
        return None if self.learner else by_role(self.total, self.moved)


class PettingZoo(Seeded):
    """Games of PettingZoo; WHAT is a module, such as classic.tictactoe_v3.

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
