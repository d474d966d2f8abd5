"""Names and options of the built-in presets, so the front can check them without torch.

The algorithm process also checks the values of options. `python -m
tests.algorithms.presets.test_names` writes `presets.json`; a test compares it with the presets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

import msgspec

from agentrl.base.parts import installed_plugins
from agentrl.config.policies import trained_policies, view
from agentrl.config.schema import AlgorithmConfig, RunConfig
from agentrl.errors import ConfigError, nearest

TABLE = Path(__file__).with_name("presets.json")


class PresetNames(msgspec.Struct, frozen=True):
    """The options of each preset and of each modifier."""

    presets: dict[str, list[str]]
    modifiers: dict[str, list[str]]


@cache
def preset_names() -> PresetNames:
    return msgspec.json.decode(TABLE.read_bytes(), type=PresetNames)


def check_presets(config: RunConfig) -> None:
    """Raises ConfigError for an unknown preset, modifier or option of a trained policy. Presets
    from outside the library are checked when they are loaded."""
    for name in trained_policies(config) if config.steps else []:
        try:
            _check(view(config, name).algorithm)
        except ConfigError as error:
            where = f"policies.{name}: " if config.policies else ""
            raise ConfigError(f"{where}{error}") from None


def _check(algorithm: AlgorithmConfig) -> None:
    name, known = algorithm.preset, preset_names()
    if ":" in name or name.split("+")[0] in installed_plugins("presets").names:
        return
    host, modifiers = split_preset(name, known.presets, known.modifiers)
    if host not in known.presets:
        raise ConfigError(f"algorithm.preset: no preset {host!r}; {nearest(host, known.presets)}")
    options = [*known.presets[host], *(o for word in modifiers for o in known.modifiers[word])]
    for option in algorithm.options:
        if option not in options:
            hint = nearest(option, options)
            raise ConfigError(f"algorithm.options.{option}: no option of {name!r}; {hint}")


def split_preset(
    name: str, presets: Iterable[str], modifiers: Collection[str]
) -> tuple[str, list[str]]:
    """Split "grpo+tis" or "mine.py:lenient+tis" into preset and modifiers; a preset's own name may
    contain "+". Raises ConfigError for an unknown modifier."""
    source, colon, rest = name.rpartition(":")
    own = [host for host in presets if f"{name}+".startswith(f"{host}+")]
    host = max(own, key=len, default=source + colon + rest.split("+")[0])
    added = name.removeprefix(host).split("+")[1:]
    for word in added:
        if word not in modifiers:
            raise ConfigError(
                f"algorithm.preset: no modifier +{word} for {host!r}; {nearest(word, modifiers)}"
            )
    return host, added
