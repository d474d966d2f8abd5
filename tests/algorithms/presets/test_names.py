"""The names of presets and options that the front knows are those that there are."""

import msgspec

from agentrl.algorithms.presets import registry
from agentrl.algorithms.presets.registry import ENTROPY
from agentrl.config.presets import TABLE, PresetNames, preset_names


def names() -> PresetNames:
    found, changes = registry.library_presets()
    return PresetNames(
        {name: sorted({*found[name].options(), *ENTROPY.options()}) for name in sorted(found)},
        {name: sorted(changes[name].options()) for name in sorted(changes)},
    )


def test_the_front_knows_every_preset_and_option() -> None:
    hint = "run `python -m tests.algorithms.presets.test_names`"
    assert preset_names() == names(), hint


if __name__ == "__main__":
    TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(names())) + b"\n")
