"""Names and options of the library's presets, so the front can check them without torch.

The algorithm process also checks the values of options. `python -m
tests.algorithms.presets.test_names` writes `presets.json`; a test compares it with the presets.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path

import msgspec

from agentrl.config.hints import preset_hint, setting_hint
from agentrl.config.learning import AlgorithmConfig
from agentrl.config.policies import trained_policies, view
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError, nearest
from agentrl.plugins import plugin_points

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
    if ":" in name:
        return
    host, modifiers = find_preset(name)
    if host not in known.presets or not known.modifiers.keys() >= set(modifiers):
        return
    options = [*known.presets[host], *(o for word in modifiers for o in known.modifiers[word])]
    for option in algorithm.options:
        if option not in options:
            said = setting_hint(option, None, options) or nearest(option, options)
            raise ConfigError(f"algorithm.options.{option}: no option of {name!r}; {said}")


def find_preset(
    name: str, presets: Collection[str] = (), modifiers: Collection[str] = ()
) -> tuple[str, list[str]]:
    """Split "grpo+tis" or "mine.py:lenient+tis" into preset and modifiers; a preset's own name may
    contain "+". presets, modifiers: registered names besides the library's and those of packages.
    Raises ConfigError for an unknown name."""
    known, installed = preset_names(), plugin_points("presets").names
    own = {*known.presets, *presets, *(word for word in installed if word[0] != "+")}
    words = {*known.modifiers, *modifiers, *(word[1:] for word in installed if word[0] == "+")}
    source, colon, rest = name.rpartition(":")
    hosts = [host for host in own if f"{name}+".startswith(f"{host}+")]
    host = max(hosts, key=len, default=source + colon + rest.split("+")[0])
    if ":" not in name and host not in own:
        meant = preset_hint(host, own) or nearest(host, own)
        raise ConfigError(f"algorithm.preset: no preset {host!r}; {meant}")
    added = name.removeprefix(host).split("+")[1:]
    for word in added:
        if word not in words:
            raise ConfigError(
                f"algorithm.preset: no modifier +{word} for {host!r}; {nearest(word, words)}"
            )
    return host, added
