"""All presets and modifiers of the library; importing this module registers them.

`make("grpo+tis", {"clip_high": 0.28, "tis_cap": 3.0})` builds an algorithm from a preset, any
modifiers, and the keyword options of all of them.
"""

from agentrl.algorithms.presets import mixing  # noqa: F401
from agentrl.algorithms.presets.registry import hosts, make, modifiers, presets
from agentrl.algorithms.presets.zoo import (  # noqa: F401
    coma,
    gates,
    grpo,
    hindsight,
    ppo,
    preferences,
    reinforce,
    subgoals,
    supervised,
    teams,
    trees,
    turns,
)

__all__ = ["hosts", "make", "modifiers", "presets"]
