"""The names of presets, recipes and options that the front knows are those that there are."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.registry import ENTROPY
from agentrl.core.config.derived import PRESETS, PresetNames, preset_names


def names() -> PresetNames:
    presets, modifiers = dict(own(declare.presets)), dict(own(declare.modifiers))
    return PresetNames(
        {
            name: sorted({*made.options(), *ENTROPY.options()})
            for name, made in presets.items()
            if not made.of
        },
        {name: sorted(made.options()) for name, made in modifiers.items()},
        {name: made.of.partition("+")[0] for name, made in presets.items() if made.of},
    )


def own(declared: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the library declares, by name; tests declare more."""
    for name, made in sorted(declared.items()):
        if made.function.__module__.startswith("agentrl."):
            yield name, made


def test_the_front_knows_every_preset_and_option() -> None:
    hint = "run `python -m tests.algorithms.presets.test_names`"
    assert preset_names() == names(), hint


if __name__ == "__main__":
    PRESETS.write_bytes(msgspec.json.format(msgspec.json.encode(names())) + b"\n")
