"""`agentrl algorithms`: the presets, modifiers and recipes.

`--for` shows those that fit a run, by its settings and its rollouts in the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from agentrl.algorithms.credit.calls import Returns
from agentrl.algorithms.credit.core import format_record
from agentrl.algorithms.credit.states import LAMBDA, calls_of, evidence, mean_by, trust
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import key, known_mean, reduce_by, units
from agentrl.algorithms.data.merge import build_batch, reward_reference
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.ratios import ALL_OUTPUTS
from agentrl.algorithms.presets import registry as presets
from agentrl.algorithms.presets.declare import EMPTY, AlgoModifier, AlgoPreset
from agentrl.algorithms.presets.registry import parts_of_name
from agentrl.core.config import RunConfig, derived
from agentrl.core.plugins import plugin_points
from agentrl.core.types import Group, Purpose
from agentrl.store import open_store


def catalogue() -> list[str]:
    """One line per preset, modifier and recipe: its name, description and the fields it sets. For
    plug-ins of installed packages only the source is shown, because they are not imported."""
    found, changes = presets.library_presets()
    made = found | {f"+{name}": change for name, change in changes.items()}
    lines = []
    for heading in ("presets", "modifiers", "recipes"):
        own = [word for word, one in made.items() if _heading(word, one) == heading]
        lines += [heading, *(_line(word, made[word]) for word in own)]
    theirs = sorted(plugin_points("presets"), key=lambda point: point.name)
    return lines + ["installed"] * bool(theirs) + [f"  {x.name:<21} {x.value}" for x in theirs]


def _heading(word: str, made: AlgoPreset | AlgoModifier) -> str:
    return "recipes" if made.of else "modifiers" if word.startswith("+") else "presets"


def composition(recipe: AlgoPreset | AlgoModifier) -> str:
    """The definition of a recipe: a preset or modifier with these options."""
    options = [f"{key} = {_json(value)}" for key, value in recipe.defaults.items()]
    credit = "the credit of " if isinstance(recipe, AlgoModifier) and recipe.credit_only else ""
    return f"{credit}{recipe.of}{' with ' if options else ''}{', '.join(options)}"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, str | bool) else repr(value)


def record(name: str) -> list[str]:
    """The components of an algorithm, and its options with their defaults."""
    algo = _built(name)
    supply = sorted(algo.needs) + ["values"] * algo.reads_critic + ["top_tokens"] * bool(algo.topk)
    answers = {
        "credit": format_record(algo.credit),
        "gates": ", ".join(map(format_record, algo.gates)),
        "penalties": ", ".join(map(format_record, algo.penalties)),
        "entropy": str(algo.entropy or ""),
        "average": format_record(algo.agg),
        "filter": format_record(algo.keep) if algo.keep else "",
        "rewards": ", ".join(algo.rewards),
        "needs": ", ".join(supply),
        "remembers": ", ".join(memory.name for memory in algo.remembered),
        "resamples": f"groups of equal {algo.resample!r}" if algo.resample else "",
    }
    lines = [name, *(f"  {key:<12} {answer or 'none'}" for key, answer in answers.items())]
    lines.append("options")
    for option, default in options_of(name).items():
        lines.append(f"  {option} = {'(required)' if default is EMPTY else _json(default)}")
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
    return presets.make(name, needed, supplies=ALL_OUTPUTS)


def _line(name: str, made: AlgoPreset | AlgoModifier) -> str:
    """A line for a preset with the fields that it sets, or for a modifier with those it changes."""
    host = made.host if isinstance(made, AlgoModifier) else ""
    algo = _built(host + name)
    base = _built(host) if host else Algo(algo.credit)
    words = {"credit": "credit", "gates": "gates", "penalties": "penalties", "agg": "average",
             "keep": "filter", "side": "side loss"}  # fmt: skip
    fields = [word for key, word in words.items() if getattr(algo, key) != getattr(base, key)]
    shown = ", ".join(fields if host else ["credit", *fields])
    text = f"{composition(made)}. {made.doc}" if made.of else made.doc
    return f"  {name:<21} {' '.join(text.split())}{f'  [{shown}]' if shown else ''}"


def _example(option: str) -> object:
    examples: dict[str, object] = {"actions": ["yes", "no"], "mean_by_units": ["role"]}
    examples |= {"only_roles": ["agent"], "roles": ["agent"]}
    examples["credit"] = "agentrl.algorithms.credit.core:response_lengths"
    return examples.get(option, {"process": {"scope": "transition"}})


TABLE = "algorithms/CREDIT.md#which-credit-when"
LAST_GROUPS = 16  # newest groups that are analysed
REPEATED = 0.2  # share of states that other rollouts were in, from which on calls are compared
RETURNS = 0.1  # share of states that a rollout comes back to, from which on states are valued
TRUSTED = 0.3  # trust in the values of states, from which on they are looked at
LENGTHS = 1.5  # longest over shortest rollout of a task, from which on a discount prefers one
DISCOUNTED = "`gigpo`, `hgpo`, `hcapo` and other presets with a `gamma` below 1"
VALUED = ("peers", "values states, to which rollouts come back, by other rollouts")
COMPARED = ("auto", "values states as far as they tell how rollouts end, and is `grpo` elsewhere")
AGREES = 0.3  # correlation with the outcome from which on a process reward needs no gate


async def advise(config: RunConfig) -> list[str]:
    """Lines to print. Raises StoreError where the run has no store yet."""
    groups = list[Group]()
    async with open_store(config.store, create=False, readonly=True) as store:
        for row in await store.groups(config.name, purpose=Purpose.TRAIN, limit=LAST_GROUPS):
            traces = [trace for id in row.rollouts if (trace := await store.trace(id))]
            members = [
                msgspec.structs.replace(one.rollout, transitions=one.transitions) for one in traces
            ]
            groups.append(Group(id=row.id, run=config.name, step=row.step, rollouts=members))
    names = {reward_reference(row) for g in groups for one in g.rollouts for row in one.rewards}
    lines = []
    for policy in derived.trained_policies(config):
        batch = build_batch(groups, reward_names=sorted(names), policy=policy)
        states = look_at(batch)
        suggestions = advice(config, batch, states)
        several = f", {len(batch.roles)} roles" if len(batch.roles) > 1 else ""
        lines.append(
            f"{policy}: {len(batch.rollouts)} rollouts, {states.calls:.1f} calls each{several}"
        )
        lines += [f"  {sentence}" for sentence in about(states)]
        lines += [f"  warning: {sentence}" for sentence in cautions(batch, states)]
        lines.append(f"  choice: {choice(suggestions)}")
        for preset, why in suggestions:
            lines.append(f"  {preset:<9} {why}")
    return [*lines, f"what each needs on our tasks: {TABLE}"] if lines else []


class States(NamedTuple):
    """Statistics of the states before a batch's calls."""

    calls: float  # mean number per rollout
    repeated: float  # see `repeats`
    back: float  # see `returns`
    trust: float  # see `trust_in_states`; 0 without an outcome


def about(states: States) -> Iterator[str]:
    """A sentence about the states, for runs with several calls per rollout."""
    if states.calls <= 1:
        return
    if states.repeated >= REPEATED:
        yield f"{states.repeated:.0%} of the later states were seen by other rollouts of their task"
    if states.back >= RETURNS:
        yield f"{states.back:.0%} of the calls are in a state that their rollout was in before"
    if states.trust >= TRUSTED:
        yield f"`auto` and `peers` trust in the values of states by {states.trust:.0%}"


def cautions(batch: Batch, states: States) -> Iterator[str]:
    """Reasons why credit is misleading or useless for this batch, each with the affected
    presets."""
    if states.calls <= 1 or "outcome" not in batch.rewards:
        return
    outcome, group = batch.rewards["outcome"], batch.rollout_group
    scored = ~outcome.isnan()
    apart = scored & ((outcome - known_mean(outcome, group)[group]).abs() > 1e-9)
    if states.repeated < REPEATED and apart.any():
        yield (
            f"only {states.repeated:.0%} of the later states were seen by other rollouts: `gigpo` "
            "and `hgpo` compare few calls, and `batch-td`, `auto` and `peers` credit most calls "
            "with the outcome, as `grpo` does"
        )
    elif states.trust < TRUSTED and apart.any():
        yield (
            'rollouts share states that do not tell how they end (answers such as "ok"): '
            "`batch-td`, and values of states of your own, may miss what earlier calls did; `auto` "
            "and `peers` credit most calls with the outcome, as `grpo` does"
        )
    if (outcome[scored] < 0).any():
        yield (
            f"outcomes are negative: {DISCOUNTED} make a failure look better the more calls follow "
            "it; add a constant in the verifier, or set `gamma` to 1"
        )
    length = torch.bincount(batch.transition_rollout, minlength=len(outcome)).double()
    longest, shortest = (reduce_by(length, group, how=how) for how in ("amax", "amin"))
    if (longest >= LENGTHS * shortest.clamp(min=1.0)).any():
        yield (
            f"rollouts of a task make {shortest.min():.0f} to {longest.max():.0f} calls: "
            f"{DISCOUNTED} prefer short ones, also where long ones end better"
        )


def look_at(batch: Batch) -> States:
    calls = len(batch.transitions) / max(len(batch.rollouts), 1)
    trusted = trust_in_states(batch) if "outcome" in batch.rewards else 0.0
    return States(calls, repeats(batch), returns(batch), trusted)


def trust_in_states(batch: Batch) -> float:
    """Mean over the calls of how far `peers` and `auto` trust in the values of their states: 0 is
    the credit of `rloo`. 0 without calls that can be compared."""
    calls, _ = calls_of(batch, "outcome", 1.0, Returns()(batch))
    if not calls.unit:
        return 0.0
    return float(trust(calls, evidence(calls, LAMBDA)[1]).mean())


def repeats(batch: Batch) -> float:
    """Share of calls, except first calls, in a state that another rollout of the group has
    visited."""
    state, later = units(batch, "transition", "group", "state"), batch.transition_turn > 0
    others = mean_by(torch.zeros(len(state)), state, batch.transition_rollout)[1]
    return float((others > 0)[later].double().mean()) if later.any() else 0.0


def returns(batch: Batch) -> float:
    """Share of calls in a state that the same rollout has visited before."""
    state = units(batch, "transition", "group", "state")
    times = mean_by(torch.zeros(len(state)), key(state, batch.transition_rollout))[1]
    return 1 - float((1 / times).mean()) if len(state) else 0.0


def agreement(batch: Batch, reward: str) -> float:
    """Correlation within groups between the outcome and a rollout's mean reward of calls; NaN where
    either is constant."""
    x = known_mean(batch.rewards[reward], batch.transition_rollout, len(batch.rollouts))
    y = batch.rewards.get("outcome", torch.full_like(x, torch.nan))
    both = ~(x + y).isnan()
    group = batch.rollout_group[both]
    x, y = (z[both] - known_mean(z[both], group)[group] for z in (x, y))
    return float((x * y).sum() / ((x * x).sum() * (y * y).sum()).sqrt())


def advice(config: RunConfig, batch: Batch, states: States) -> list[tuple[str, str]]:
    """Presets that fit, each with the reason, best first by the stored results; and warnings, which
    have the name "warning"."""
    several = len(batch.roles) > 1
    found = [
        ("grpo+per-role", f"compares {name} within each role")
        for name, x in batch.rewards.items()
        if several and name.startswith("role:") and not x.isnan().all()
    ]
    for name in batch.rewards:
        if name.startswith("transition:"):
            with_outcome = agreement(batch, name)
            about = f"{name}, whose correlation with the outcome is {with_outcome:+.2f}"
            if with_outcome < 0:
                found.append(("warning", f"learning from {about}, would mislead: fix it first"))
            else:
                gate = "" if with_outcome >= AGREES else " with gate = 'agree'"
                found.append(("streams", f"mixes in {about}{gate}"))
    tell = states.trust >= TRUSTED
    peers = VALUED if tell and states.back >= RETURNS else COMPARED
    if peers == VALUED and not several:
        found.append(peers)
    if config.critic.model:
        found.append(("turn-ppo", "values states by the run's critic"))
    if config.algorithm.branching.joins:
        found.append(("vineppo", "values calls by the run's branches"))
    if peers not in found and states.calls > 1:
        found.append(peers)
    found.append(("grpo", "copies the outcome to all calls; needs nothing"))
    if several:
        found.append(("dr-mas", "compares the calls of a role with each other"))
    if tell and states.calls > 1 and states.repeated >= REPEATED:
        found.append(("batch-td", "compares calls by the values of the states that they led to"))
    return found


def choice(suggestions: Sequence[tuple[str, str]]) -> str:
    """The recommended preset."""
    return next(preset for preset, _ in suggestions if preset != "warning")
