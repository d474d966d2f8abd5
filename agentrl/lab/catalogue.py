"""`agentrl algorithms`: list the presets and modifiers, and show one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from agentrl.algorithms.credit.records import format_record
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets import registry as presets
from agentrl.algorithms.presets.declare import EMPTY, AlgoModifier, AlgoPreset
from agentrl.algorithms.presets.registry import ALL_STREAMS, parts_of_name

LIBRARY = "agentrl.algorithms."
COMMON = "presets"  # heading of the short list


def catalogue() -> list[str]:
    """One line per preset and modifier: its name, docstring, and the fields that it sets. The
    others follow the short list, by module."""
    found, changes = presets.library_presets()
    made = found | {f"+{name}": change for name, change in changes.items()}
    homes = {word: COMMON if one.usual else _home(one) for word, one in made.items()}
    lines = []
    for home in (COMMON, *sorted({*homes.values()} - {COMMON})):
        own = (word for word in made if homes[word] == home)
        lines += [home, *(_line(word, made[word]) for word in sorted(own, key=_presets_first))]
    return lines


def _home(made: AlgoPreset | AlgoModifier) -> str:
    """The name of a preset's module, or of its package."""
    package, _, module = made.function.__module__.removeprefix(LIBRARY).rpartition(".")
    return (module if package in ("", "presets") else package).replace("_", " ")


def _presets_first(word: str) -> tuple[bool, str]:
    return word.startswith("+"), word


def record(name: str) -> list[str]:
    """The components of an algorithm, and its options with their defaults."""
    algo = _built(name)
    supply = (
        sorted(algo.needs) + ["values"] * algo.reads_critic + ["top_tokens"] * bool(algo.symbols)
    )
    answers = {
        "credit": format_record(algo.credit),
        "gates": ", ".join(map(format_record, algo.gates)),
        "penalties": ", ".join(map(format_record, algo.penalties)),
        "entropy": str(algo.entropy or ""),
        "average": format_record(algo.agg),
        "filter": format_record(algo.keep) if algo.keep else "",
        "rewards": ", ".join(algo.rewards),
        "streams": ", ".join(supply),
        "remembers": ", ".join(memory.name for memory in algo.remembered),
        "resamples": f"groups of equal {algo.resample!r}" if algo.resample else "",
    }
    lines = [name, *(f"  {key:<12} {answer or 'none'}" for key, answer in answers.items())]
    lines.append("options")
    for key, default in options_of(name).items():
        json = isinstance(default, str | bool)
        text = msgspec.json.encode(default).decode() if json else repr(default)
        lines.append(f"  {key} = {'(required)' if default is EMPTY else text}")
    return lines


def options_of(name: str) -> dict[str, Any]:
    """Options of a preset with modifiers, with defaults (`EMPTY`: required). Raises as `make`."""
    host, added = parts_of_name(name, Path())
    accepted = [host.options(), *(modifier.options() for modifier in added)]
    return {option: default for own in accepted for option, (_, default) in own.items()}


def _built(name: str) -> Algo:
    """A preset with example values of its required options."""
    options = options_of(name).items()
    needed = {key: _example(key) for key, default in options if default is EMPTY}
    return presets.make(name, needed, streams=ALL_STREAMS)


def _line(name: str, made: AlgoPreset | AlgoModifier) -> str:
    """A line for a preset with the fields that it sets, or for a modifier with those it changes."""
    host = made.host if isinstance(made, AlgoModifier) else ""
    algo = _built(host + name)
    base = _built(host) if host else Algo(algo.credit)
    words = {"credit": "credit", "gates": "gates", "penalties": "penalties", "agg": "average",
             "keep": "filter", "side": "side loss"}  # fmt: skip
    fields = [word for key, word in words.items() if getattr(algo, key) != getattr(base, key)]
    shown = ", ".join(fields if host else ["credit", *fields])
    return f"  {name:<21} {' '.join(made.doc.split())}{f'  [{shown}]' if shown else ''}"


def _example(option: str) -> object:
    examples: dict[str, object] = {"actions": ["yes", "no"], "mean_by_units": ["role"]}
    examples |= {"only_roles": ["agent"], "roles": ["agent"]}
    examples["credit"] = "agentrl.algorithms.credit.core:response_lengths"
    return examples.get(option, {"process": {"scope": "transition"}})
