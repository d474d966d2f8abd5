"""Commands about algorithms: list them, show one, explain the credit of a rollout."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path

import msgspec

from agentrl.algorithms.diagnostics.explain import brief, explain, report
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets import catalogue as presets
from agentrl.algorithms.presets.declare import EMPTY, AlgoModifier, AlgoPreset
from agentrl.algorithms.presets.registry import Supply, options_of
from agentrl.base.parts import known
from agentrl.config import RunConfig, from_store
from agentrl.config import policies as team
from agentrl.errors import StoreError
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import Group, Purpose, Rollout

ALL_STREAMS: tuple[Supply, ...] = (
    "old", "sampler", "reference", "teacher", "values", "top_tokens", "entropy",
)  # fmt: skip


def catalogue() -> list[str]:
    """One line per preset and modifier: its name, docstring, and the fields that it sets. The
    others follow the short list, by part."""
    parts, (found, changes) = known("presets"), presets.installed()
    made = found | {f"+{name}": change for name, change in changes.items()}
    homes = {word: "presets" if one.usual else parts[word] for word, one in made.items()}
    lines = []
    for home in ("presets", *sorted({*homes.values()} - {"presets"})):
        own = (word for word in made if homes[word] == home)
        lines += [home, *(_line(word, made[word]) for word in sorted(own, key=_presets_first))]
    return lines


def _presets_first(word: str) -> tuple[bool, str]:
    return word.startswith("+"), word


def record(name: str) -> list[str]:
    """The components of an algorithm, and its options with their defaults."""
    algo = _built(name)
    supply = sorted(algo.needs) + ["values"] * algo.critic + ["top_tokens"] * bool(algo.symbols)
    answers = {
        "credit": brief(algo.credit),
        "gates": ", ".join(map(brief, algo.gates)),
        "penalties": ", ".join(map(brief, algo.penalties)),
        "entropy": str(algo.entropy or ""),
        "average": brief(algo.agg),
        "filter": brief(algo.keep) if algo.keep else "",
        "rewards": ", ".join(algo.rewards),
        "streams": ", ".join(supply),
        "remembers": ", ".join(memory.name for memory in algo.memories),
        "resamples": f"groups of equal {algo.resample!r}" if algo.resample else "",
    }
    lines = [name, *(f"  {key:<12} {answer or 'none'}" for key, answer in answers.items())]
    lines.append("options")
    for key, default in options_of(name).items():
        json = isinstance(default, str | bool)
        text = msgspec.json.encode(default).decode() if json else repr(default)
        lines.append(f"  {key} = {'(required)' if default is EMPTY else text}")
    return lines


async def explain_rollout(store_url: str, rollout: str, *, tokens: bool) -> list[str]:
    """Lines that explain the credit of a rollout's tokens, from the stored data of its step.

    Raises StoreError for an unknown rollout."""
    async with open_store(store_url, readonly=True) as store:
        trace = await store.trace(rollout)
        state = await store.run(trace.rollout.run) if trace else None
        if trace is None or state is None:
            raise StoreError(
                f"there is no rollout {rollout!r} in {store_url}; ids look like "
                "run/train/0000000/0000"
            )
        groups = await _groups(store, trace.rollout)
        members = [member.id for group in groups for member in group.rollouts]
        credits = [row for id in members for row in await store.credits(id)]
    config = from_store(state.config)
    step = trace.rollout.trained
    lines = []
    for policy in team.trained_policies(config):
        settings = team.view(config, policy).algorithm
        algo = presets.make(
            settings.preset, settings.options, streams=ALL_STREAMS, root=Path(config.root)
        )
        own = {row.transition: row for row in credits if row.policy == policy}
        oldest = team.steps_learned(config, policy, step or 0) - ceil(settings.max_staleness)
        explanation = explain(
            algo, groups, min_group=settings.min_group, credits=own, policy=policy, oldest=oldest
        )
        if config.policies:
            lines.append(f"policy {policy}")
            if step is not None and not team.learns_in_step(config, policy, step):
                lines.append(f"  step {step} was not its turn to learn")
                continue
            if rollout not in explanation.batch.rollouts:
                lines.append("  it has no trained call in this rollout")
                continue
        spelt = _spelling(config, policy) if tokens else None
        lines += report(explanation, rollout, groups, tokens, spelt)
    if step is None:
        return [*lines, "this rollout is not trained yet, or was discarded"]
    if not credits:
        return [*lines, "its step stored no credit (algorithm.store_credit): see the note above"]
    return lines


def _spelling(config: RunConfig, policy: str) -> Callable[[int], str] | None:
    """A decoder of single token ids; None if the policy's tokenizer is not on this machine."""
    from transformers import AutoTokenizer

    name = team.view(config, policy).model_path()
    if not name:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return None
    return lambda token: str(tokenizer.decode([token]))


async def _groups(store: Store, rollout: Rollout) -> list[Group]:
    """The groups that were trained (or, if untrained, requested) in the rollout's step."""
    asked = rollout.step if rollout.trained is None else None
    rows = await store.rollouts(
        rollout.run, purpose=Purpose.TRAIN, step=asked, trained=rollout.trained
    )
    members: dict[str, list[Rollout]] = {}
    for row in rows:
        trace = await store.trace(row.id)
        calls = trace.transitions if trace else []
        whole = msgspec.structs.replace(row, transitions=calls)
        members.setdefault(row.group, []).append(whole)
    return [
        Group(id=group, run=rollout.run, step=found[0].step, rollouts=found)
        for group, found in members.items()
    ]


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
    examples: dict[str, object] = {"actions": ["yes", "no"], "equal_units": ["role"]}
    examples |= {"only_roles": ["agent"], "roles": ["agent"]}
    examples["credit"] = "agentrl.algorithms.credit.core:response_lengths"
    return examples.get(option, {"process": {"scope": "transition"}})
