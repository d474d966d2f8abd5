"""The presets and modifiers of the library; importing this module registers those of `presets/`.

`make("grpo+tis", {"clip_high": 0.28, "tis_cap": 3.0})` builds an algorithm from a preset, any
modifiers, and the keyword options of all of them.
"""

from agentrl.algorithms.presets import (  # noqa: F401
    corrections,
    grpo,
    hierarchy,
    imitation,
    mixing,
    ppo,
    preferences,
    reinforce,
    states,
    teams,
)
from agentrl.algorithms.presets.declare import AlgoModifier, AlgoPreset, modifiers, presets
from agentrl.algorithms.presets.registry import make, modifier_named, preset_named
from agentrl.config.base import installed_plugins
from agentrl.config.presets import preset_names

__all__ = ["installed", "make", "modifiers", "presets"]


def installed() -> tuple[dict[str, AlgoPreset], dict[str, AlgoModifier]]:
    """The library's presets and modifiers that this installation has, by name: those of `presets/`
    and of all families. Loads the families."""
    known, there = preset_names(), installed_plugins("presets").names
    words = [*known.presets, *(f"+{name}" for name in known.modifiers)]
    here = [word for word in words if known.home(word) == "presets" or word in there]
    return (
        {word: preset_named(word) for word in here if word[0] != "+"},
        {word[1:]: modifier_named(word[1:]) for word in here if word[0] == "+"},
    )
