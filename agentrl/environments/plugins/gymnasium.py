"""Gymnasium's registered environments, MiniGrid and TextWorld, seen as text."""

import re
from collections.abc import Iterable
from typing import Any, ClassVar

from agentrl.core.errors import ConfigError
from agentrl.environments import Environment, Episode
from agentrl.environments.toolbox import (
    Seeded,
    chosen,
    content,
    fifths,
    number,
    plain,
    rules,
    shortest,
    shown,
)

# Toy text environments: words for the actions, and rendered observations. Other environments use
# numbers.
WORDS = {
    "FrozenLake": ("left down right up", "( ) you, S start, F ice, H hole, G goal"),
    "CliffWalking": ("up right down left", "x you, C cliff, T goal"),
    "Taxi": ("south north east west pickup dropoff", "( ) taxi, (_) taxi with passenger,"
             " <> passenger, [] destination, | wall"),
    "Blackjack": ("stick hit", "your sum, the dealer's card, 1 with a usable ace"),
}  # fmt: skip


class GymnasiumGame(Episode):
    keep = False  # an observation contains the whole state

    def __init__(self, plugin: "Gymnasium", seed: int) -> None:
        import gymnasium

        self.plugin, self.seed, self.turns = plugin, seed, 0
        kind = plugin.what.partition("-")[0]
        ansi = {"render_mode": "ansi"} if kind in ("FrozenLake", "CliffWalking", "Taxi") else {}
        self.env = gymnasium.make(plugin.what, **ansi | plugin.options)
        self.inner, self.space = self.env.unwrapped, self.env.action_space
        words, signs = WORDS.get(kind, ("", ""))
        self.names = words.split() or [str(i) for i in range(getattr(self.space, "n", 0))]
        self.rules = rules(self.inner.__doc__, signs)

    def picture(self, obs: Any) -> str:
        return plain(self.env.render()) if self.env.render_mode == "ansi" else shown(obs)

    def seen(self, note: str = "") -> list[dict[str, Any]]:
        choice = f"Actions: {', '.join(self.names) or self.space}"
        messages = [{"role": "user", "content": f"{note}{self.picture(self.obs)}\n{choice}"}]
        return (
            [{"role": "system", "content": self.rules}, *messages]
            if self.plugin.rules
            else messages
        )

    def reset(self) -> list[dict[str, Any]]:
        self.obs, _ = self.env.reset(seed=self.seed)
        return self.seen()

    def step(self, reply: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        self.turns += 1
        late, action = self.turns >= self.plugin.limit, chosen(reply, self.names, self.space)
        if action is None:
            return self.seen("You named no action.\n"), self.plugin.illegal, late
        self.obs, reward, ended, cut, _ = self.env.step(action)
        return self.seen(), number(reward), bool(ended or cut or late)

    def close(self) -> None:
        self.env.close()


class Gymnasium(Seeded):
    """Registered environments of Gymnasium, seen as text.

    Options: episodes (of each split, by seed), limit (of turns), rules (whether to send the
    documentation), illegal (reward of a reply without an action); others are the environment's."""

    requires: ClassVar[tuple[str, ...]] = ("gymnasium==1.4.0",)
    game = GymnasiumGame

    def __init__(self, what: str, episodes: int = 64, limit: int = 100, rules: bool = True,
                 illegal: float = -1.0, **options: Any) -> None:  # fmt: skip
        self.what, self.episodes, self.limit, self.rules = what, episodes, limit, rules
        self.illegal, self.options = illegal, options
        self.open({"seed": 0}).reset()  # reports environments that cannot be created or rendered

    def open(self, input: Any) -> GymnasiumGame:
        return self.game(self, input["seed"])

    def solution(self, input: Any) -> Any:
        return shortest(lambda: self.open(input), lambda game: game.names)


SIGNS = """two signs a cell: >> VV << ^^ you and where you look, WG wall, G goal, K key, A ball, \
B box, V lava, D closed door, L locked door, each with its color's first letter; __ open door"""


class GridGame(GymnasiumGame):
    def __init__(self, plugin: Gymnasium, seed: int) -> None:
        __import__("minigrid")  # registers its environments
        super().__init__(plugin, seed)
        self.names = [action.name for action in self.inner.actions]
        self.rules = rules(self.inner.__doc__, SIGNS)

    def picture(self, obs: Any) -> str:
        held = self.inner.carrying
        holding = f"\nYou hold a {held.color} {held.type}." if held else ""
        return f"{obs['mission']}\n{self.inner.pprint_grid()}{holding}"


class MiniGrid(Gymnasium):
    """MiniGrid and BabyAI, seen as a grid of letters; options as for gymnasium."""

    requires = ("gymnasium==1.4.0", "minigrid==3.2.0")
    game = GridGame


class TextWorldGame(Episode):
    keep = False  # each turn's observation is complete

    def __init__(self, file: str, limit: int, commands: bool) -> None:
        import textworld

        names = "objective description inventory max_score admissible_commands policy_commands"
        self.env = textworld.start(file, textworld.EnvInfos(**dict.fromkeys(names.split(), True)))
        self.limit, self.commands, self.turns, self.score = limit, commands, 0, 0.0

    def seen(self, state: Any, feedback: str = "") -> str:
        parts = [state.objective, feedback, state.description, state.inventory]
        if self.commands:
            useful = [c for c in state.admissible_commands if not c.startswith(("examine", "look"))]
            parts.append(f"Commands: {', '.join(useful)}\nThe last line of your reply is done.")
        return "\n\n".join(re.sub(r"\n{2,}", "\n", text.strip()) for text in parts if text)

    def reset(self) -> str:
        self.state = self.env.reset()
        return self.seen(self.state)

    def step(self, reply: dict[str, Any]) -> tuple[str, float, bool]:
        command = (content(reply).strip().splitlines() or ["look"])[-1].strip(" \"'`*.>")
        # The interpreter of games crashes at other letters, and at long lines.
        command = re.sub(r"[^ -~]", "", command)[:100].strip()
        state, score, done = self.env.step(command or "look")
        score = number(score)
        gain, self.score, self.turns = score - self.score, score, self.turns + 1
        over = done or self.turns >= self.limit
        feedback = re.sub(r"\n>.*", "", state.feedback, flags=re.DOTALL)  # without the status line
        return self.seen(state, feedback), gain / max(1, state.max_score or 1), bool(over)

    def close(self) -> None:
        self.env.close()


class TextWorld(Environment):
    """Games of TextWorld; WHAT is a folder of them, every fifth held out, or a file.

    Options: limit (of turns), commands (whether to tell those that are possible)."""

    requires = ("textworld==1.7.0",)
    isolation = "process"  # the interpreter of games is global, and its crash is the process's

    def __init__(self, what: str, limit: int = 50, commands: bool = True) -> None:
        where, self.limit, self.commands = self.root / what, limit, commands
        games = [where] if where.is_file() else sorted(where.rglob("*.[uz][l8]*"))
        self.games = {str(game.relative_to(where.parent)): game for game in games}
        if not games:
            raise ConfigError(f"{where} has no game: tw-make tw-simple --output {where}/1.z8")

    def tasks(self, split: str) -> Iterable[dict[str, Any]]:
        return fifths(self.games, split)

    def open(self, input: Any) -> TextWorldGame:
        return TextWorldGame(str(self.games[input]), self.limit, self.commands)

    def solution(self, input: Any) -> list[str] | None:
        game = self.open(input)
        game.reset()
        return list(game.state.policy_commands or ()) or None
