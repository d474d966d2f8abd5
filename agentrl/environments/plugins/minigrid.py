"""MiniGrid and BabyAI, seen as a grid of letters."""

from typing import Any

from agentrl.environments.plugins.gymnasium import Gymnasium, GymnasiumGame
from agentrl.environments.toolbox import rules

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
