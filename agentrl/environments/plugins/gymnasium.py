"""Gymnasium's registered environments, seen as text."""

from typing import Any, ClassVar

from agentrl.environments import Episode
from agentrl.environments.toolbox import Seeded, chosen, number, plain, rules, shortest, shown

# Of toy text: the words of the actions, and what is seen. Other actions are numbers.
WORDS = {
    "FrozenLake": ("left down right up", "( ) you, S start, F ice, H hole, G goal"),
    "CliffWalking": ("up right down left", "x you, C cliff, T goal"),
    "Taxi": ("south north east west pickup dropoff", "( ) taxi, (_) taxi with passenger,"
             " <> passenger, [] destination, | wall"),
    "Blackjack": ("stick hit", "your sum, the dealer's card, 1 with a usable ace"),
}  # fmt: skip


class GymnasiumGame(Episode):
    keep = False  # an observation has all that a move depends on

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
        said = [{"role": "user", "content": f"{note}{self.picture(self.obs)}\n{choice}"}]
        return [{"role": "system", "content": self.rules}, *said] if self.plugin.rules else said

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
        self.open({"seed": 0}).reset()  # what cannot be made or read is said now

    def open(self, input: Any) -> GymnasiumGame:
        return self.game(self, input["seed"])

    def solution(self, input: Any) -> Any:
        return shortest(lambda: self.open(input), lambda game: game.names)
