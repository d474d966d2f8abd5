"""The names of presets and options that the front knows are those that there are."""

from collections import defaultdict

import msgspec

from agentrl.algorithms.presets import catalogue
from agentrl.algorithms.presets.declare import AlgoModifier, AlgoPreset
from agentrl.algorithms.presets.registry import ENTROPY
from agentrl.config.base import installed_plugins
from agentrl.config.presets import PARTS, TABLE, PresetNames, preset_names


def names() -> PresetNames:
    for point in installed_plugins("presets"):
        if point.value.startswith(f"{PARTS}."):
            point.load()
    presets = {name: made for name, made in catalogue.presets.items() if part_of(made)}
    modifiers = {name: made for name, made in catalogue.modifiers.items() if part_of(made)}
    parts = defaultdict(list)
    words = presets | {f"+{name}": made for name, made in modifiers.items()}
    for word, made in sorted(words.items()):
        parts[part_of(made)].append(word)
    del parts["presets"]
    return PresetNames(
        {name: sorted({*presets[name].options(), *ENTROPY.options()}) for name in sorted(presets)},
        {name: sorted(modifiers[name].options()) for name in sorted(modifiers)},
        dict(sorted(parts.items())),
    )


def part_of(made: AlgoPreset | AlgoModifier) -> str:
    """The package below `agentrl.algorithms`; empty: from outside the library."""
    package, _, _ = made.function.__module__.rpartition(".")
    return package.removeprefix(f"{PARTS}.") if package.startswith(f"{PARTS}.") else ""


def test_the_front_knows_every_preset_and_option() -> None:
    hint = "run `python -m tests.algorithms.presets.test_names`"
    assert preset_names() == names(), hint


if __name__ == "__main__":
    TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(names())) + b"\n")
