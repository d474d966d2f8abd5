"""The names of presets and options that the front knows are those that there are."""

import inspect

import msgspec

from agentrl.algorithms.presets.catalogue import modifiers, presets
from agentrl.algorithms.presets.registry import options_of
from agentrl.config.presets import TABLE, PresetNames, preset_names


def names() -> PresetNames:
    own = {name: f for name, f in presets.items() if f.__module__.startswith("agentrl.")}
    return PresetNames(
        {name: sorted(options_of(name)) for name in sorted(own)},
        {
            name: sorted(
                p.name
                for p in inspect.signature(modifiers[name]).parameters.values()
                if p.kind is p.KEYWORD_ONLY
            )
            for name in sorted(modifiers)
        },
    )


def test_the_front_knows_every_preset_and_option() -> None:
    hint = "run `python -m tests.algorithms.presets.test_names`"
    assert preset_names() == names(), hint


if __name__ == "__main__":
    TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(names())) + b"\n")
