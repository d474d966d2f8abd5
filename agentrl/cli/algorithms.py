"""The commands about algorithms: what there is, what one is, and what it made of a rollout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path

import click
import msgspec

from agentrl.algorithms.diagnostics.explain import Explanation, brief, explain, report
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets import catalogue as presets
from agentrl.algorithms.presets.registry import EMPTY, Supply, options_of
from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.errors import StoreError
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import Credit, Group, Purpose, Rollout

EVERYTHING: tuple[Supply, ...] = ("o", "b", "q", "t", "v", "k", "e")


def catalogue() -> list[str]:
    """One line per preset and modifier, then the questions that a record answers."""
    lines = ["presets"]
    lines += [_line(name, function) for name, function in sorted(presets.presets.items())]
    lines.append("modifiers, of any preset")
    lines += [_line(f"+{name}", function) for name, function in sorted(presets.modifiers.items())]
    return lines


def record(name: str) -> list[str]:
    """The answers of one algorithm, and its options with their defaults."""
    options = options_of(name)
    needed = {key: _example(key) for key, default in options.items() if default is EMPTY}
    algo = presets.make(name, needed, streams=EVERYTHING)
    lines = [name, *(f"  {key:<12} {answer}" for key, answer in answers(algo).items()), "options"]
    for key, default in options.items():
        lines.append(f"  {key} = {'(required)' if key in needed else _plain(default)}")
    return lines


def answers(algo: Algo) -> dict[str, str]:
    """What an algorithm says to each question."""
    remembered = ", ".join(memory.name for memory in algo.memories)
    supply = sorted(algo.needs) + (["v"] if algo.critic else []) + (["k"] if algo.symbols else [])
    return {
        "credit": brief(algo.credit),
        "gates": ", ".join(map(brief, algo.gates)) or "none",
        "penalties": ", ".join(map(brief, algo.penalties)) or "none",
        "entropy": str(algo.entropy) if algo.entropy else "none",
        "average": brief(algo.agg),
        "filter": brief(algo.keep) if algo.keep else "none",
        "rewards": ", ".join(algo.rewards) or "none",
        "streams": ", ".join(supply) or "none",
        "remembers": remembered or "none",
        "resamples": f"groups of equal {algo.resample!r}" if algo.resample else "none",
    }


async def explained(store_url: str, rollout: str, *, tokens: bool) -> list[str]:
    """How the tokens of a rollout got their numbers, from what the store holds of its step.

    Raises StoreError for an unknown rollout."""
    async with open_store(store_url, create=False) as store:
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
    config = msgspec.convert(state.config, RunConfig)
    step = trace.rollout.trained
    lines = []
    for policy in team.trained(config):
        explanation = _of_policy(team.view(config, policy), policy, groups, credits)
        if config.policies:
            lines.append(f"policy {policy}")
            if step is not None and not team.learns(config, policy, step):
                lines.append(f"  step {step} was not its turn to learn")
                continue
            if rollout not in explanation.batch.rollouts:
                lines.append("  no call of it in this rollout is trained")
                continue
        spelt = _spelling(config, policy) if tokens else None
        lines += report(explanation, rollout, groups, tokens, spelt)
    if step is None:
        return [*lines, "this rollout is not trained yet, or was discarded"]
    if not credits:
        return [*lines, "its step stored no credit (algorithm.store_credit): see the note above"]
    return lines


def _of_policy(
    config: RunConfig, policy: str, groups: list[Group], credits: list[Credit]
) -> Explanation:
    """What one policy made of the groups of a step, by its own view of the run."""
    settings = config.algorithm
    algo = presets.make(
        settings.preset, settings.options, streams=EVERYTHING, root=Path(config.root)
    )
    own = {row.transition: row for row in credits if row.policy == policy}
    return explain(algo, groups, min_group=settings.min_group, credits=own, policy=policy)


def _spelling(config: RunConfig, policy: str) -> Callable[[int], str] | None:
    """The text of a token id, by the tokenizer that the policy was trained with; None where it is
    not on this machine."""
    from transformers import AutoTokenizer

    own = team.view(config, policy)
    built = Path(config.output, "policy")
    source = own.path(own.policy.model) if own.policy.model else built
    name = str(source) if source.is_dir() else own.policy.model
    if not name:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return None
    return lambda token: str(tokenizer.decode([token]))


async def _groups(store: Store, rollout: Rollout) -> list[Group]:
    """The groups that were trained together with a rollout's or, of one that is not trained, asked
    for."""
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


def _line(name: str, function: object) -> str:
    """Name, first sentence, and the fields of the record that it answers."""
    text = " ".join((inspect.getdoc(function) or "").split())
    fields = _fields(name)
    return f"  {name:<21} {text}{f'  [{fields}]' if fields else ''}"


def _fields(name: str) -> str:
    """What a preset sets besides credit, or a modifier changes of its host."""
    host = "reinforce" + name if name.startswith("+") else name
    needed = {key: _example(key) for key, default in options_of(host).items() if default is EMPTY}
    algo = presets.make(host, needed, streams=EVERYTHING)
    base = presets.make("reinforce", {}) if name.startswith("+") else Algo(algo.credit)
    names = {"credit": "credit", "gates": "gates", "penalties": "penalties", "agg": "average",
             "keep": "filter"}  # fmt: skip
    changed = [word for key, word in names.items() if getattr(algo, key) != getattr(base, key)]
    return ", ".join(changed if name.startswith("+") else ["credit", *changed])


def _example(option: str) -> object:
    lists = {"only_roles": ["agent"], "roles": ["agent"], "actions": ["yes", "no"]}
    lists |= {"equal_units": ["role"]}
    if option == "credit":
        return "agentrl.algorithms.credit.core:response_lengths"
    return lists.get(option, {"process": {"scope": "transition"}})


def _plain(value: object) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, str | bool) else repr(value)


def echo(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
