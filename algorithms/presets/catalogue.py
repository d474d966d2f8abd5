"""The presets and modifiers of the library; importing this module registers those of `presets/`.

`make("grpo+tis", {"clip_high": 0.28, "tis_cap": 3.0})` builds an algorithm from a preset, any
modifiers, and the keyword options of all of them.
"""

from agentrl.algorithms.presets import grpo, own, ppo, reinforce, states  # noqa: F401
from agentrl.algorithms.presets.declare import AlgoModifier, AlgoPreset, modifiers, presets
from agentrl.algorithms.presets.registry import make, modifier_named, preset_named
from agentrl.base.parts import installed_plugins, known
from agentrl.config.presets import preset_names

__all__ = ["installed", "make", "modifiers", "presets"]


def installed() -> tuple[dict[str, AlgoPreset], dict[str, AlgoModifier]]:
    """The library's presets and modifiers that this installation has, by name: those of `presets/`
    and of all families. Loads the families."""
    names, there, elsewhere = preset_names(), installed_plugins("presets").names, known("presets")
    words = [*names.presets, *(f"+{name}" for name in names.modifiers)]
    here = [word for word in words if word not in elsewhere or word in there]
    return (
        {word: preset_named(word) for word in here if word[0] != "+"},
        {word[1:]: modifier_named(word[1:]) for word in here if word[0] == "+"},
    )
