"""Names and options of the library's presets, which the front checks without loading torch.

The algorithm process also checks the values of options. `presets.json` is written by
`python -m tests.algorithms.presets.test_names`, and a test compares it with the presets.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import msgspec

from agentrl.config.policies import trained_policies, view
from agentrl.config.schema import AlgorithmConfig, RunConfig
from agentrl.errors import ConfigError, nearest

TABLE = Path(__file__).with_name("presets.json")


class PresetNames(msgspec.Struct, frozen=True):
    """Options by name."""

    presets: dict[str, list[str]]
    modifiers: dict[str, list[str]]


@cache
def preset_names() -> PresetNames:
    return msgspec.json.decode(TABLE.read_bytes(), type=PresetNames)


def check_presets(config: RunConfig) -> None:
    """Raises ConfigError for an unknown preset, modifier or option of a policy that learns. Presets
    from outside the library are checked where they are loaded."""
    for name in trained_policies(config) if config.steps else []:
        try:
            _check(view(config, name).algorithm)
        except ConfigError as error:
            where = f"policies.{name}: " if config.policies else ""
            raise ConfigError(f"{where}{error}") from None


def _check(algorithm: AlgorithmConfig) -> None:
    name, known = algorithm.preset, preset_names()
    outside = entry_points(group="agentrl.presets").names
    if ":" in name or name.split("+")[0] in outside:
        return
    hosts = [host for host in known.presets if f"{name}+".startswith(f"{host}+")]
    if not hosts:
        first = name.split("+")[0]
        raise ConfigError(f"algorithm.preset: no preset {first!r}; {nearest(first, known.presets)}")
    host = max(hosts, key=len)  # a preset's own name may contain "+"
    options = list(known.presets[host])
    for word in name.removeprefix(host).split("+")[1:]:
        if word not in known.modifiers:
            raise ConfigError(
                f"algorithm.preset: no modifier +{word} for {host!r};"
                f" {nearest(word, known.modifiers)}"
            )
        options += known.modifiers[word]
    for option in algorithm.options:
        if option not in options:
            hint = nearest(option, options)
            raise ConfigError(f"algorithm.options.{option}: no option of {name!r}; {hint}")
