"""TextWorld: games of `tw-make` (.z8, .ulx), with the commands that are possible."""

import re
from collections.abc import Iterable
from typing import Any

from agentrl.environments import Environment, Episode
from agentrl.environments.toolbox import content, fifths, number
from agentrl.errors import ConfigError


class TextWorldGame(Episode):
    keep = False  # what is seen and held is told at each turn

    def __init__(self, file: str, limit: int, commands: bool) -> None:
        import textworld

        names = "objective description inventory max_score admissible_commands policy_commands"
        self.env = textworld.start(file, textworld.EnvInfos(**dict.fromkeys(names.split(), True)))
        self.limit, self.commands, self.turns, self.score = limit, commands, 0, 0.0

    def seen(self, state: Any, feedback: str = "") -> str:
        known = [state.objective, feedback, state.description, state.inventory]
        if self.commands:
            useful = [c for c in state.admissible_commands if not c.startswith(("examine", "look"))]
            known.append(f"Commands: {', '.join(useful)}\nThe last line of your reply is done.")
        return "\n\n".join(re.sub(r"\n{2,}", "\n", text.strip()) for text in known if text)

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
