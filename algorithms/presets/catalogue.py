"""Algorithms by name: each is a few answers to the five questions of `objective`.

`make("grpo+tis", {"clip_high": 0.28, "tis_cap": 3.0})` builds one: a preset, then any modifiers,
with the keyword options of all of them. Importing this module registers the library's own.
"""

from agentrl.algorithms.presets import mixing  # noqa: F401
from agentrl.algorithms.presets.registry import hosts, make, modifiers, presets
from agentrl.algorithms.presets.zoo import (  # noqa: F401
    coma,
    gates,
    grpo,
    ppo,
    preferences,
    reinforce,
    supervised,
    teams,
    trees,
    turns,
)

__all__ = ["hosts", "make", "modifiers", "presets"]
