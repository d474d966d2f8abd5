"""Explanation of a rollout's credit: reward rows -> value -> baseline -> advantage -> psi.

The step stored the credit and gates of each call. The chain that leads to it is recomputed from the
groups of the step and from stored values that cannot be recomputed: baselines of earlier steps,
critic values, KL penalties. The report notes if the recomputed and the stored credit differ.
Without stored credit, gates and penalties are those at the start of the first optimizer step, where
the policy equals the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative, WeightedSum, format_record
from agentrl.algorithms.credit.dump import Stored, read, replayed
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import owner
from agentrl.algorithms.data.merge import build_batch, check_rewards, reward_reference
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.core import Algo, withhold
from agentrl.algorithms.objective.ratios import ALL_OUTPUTS, GivenLogProbs
from agentrl.algorithms.presets import registry
from agentrl.core.config import RunConfig, derived, from_store
from agentrl.core.errors import StoreError, TrainingError
from agentrl.core.types import (
    POLICY,
    Credit,
    Group,
    Purpose,
    Rollout,
    step_in_words,
    step_number,
)
from agentrl.store import open_store, unknown_rollout
from agentrl.store.base import Store


async def explain_rollout(store_url: str, rollout: str, *, tokens: bool) -> list[str]:
    """Lines that explain the credit of a rollout's tokens, from the stored data of its step; the
    first is a plain sentence.

    Raises StoreError for an unknown rollout."""
    async with open_store(store_url, readonly=True) as store:
        trace = await store.trace(rollout)
        state = await store.run(trace.rollout.run) if trace else None
        if trace is None or state is None:
            raise StoreError(await unknown_rollout(store, rollout))
        groups = await _groups(store, trace.rollout)
        members = [member.id for group in groups for member in group.rollouts]
        credits = [row for id in members for row in await store.credits(id)]
    config = from_store(state.config)
    step = trace.rollout.trained
    lines = [compared(rollout, groups)]
    for policy in derived.trained_policies(config):
        settings = derived.view(config, policy).algorithm
        algo = registry.make(
            settings.preset, settings.options, supplies=ALL_OUTPUTS, root=Path(config.root)
        )
        stored = {row.transition: row for row in credits if row.policy == policy}
        oldest = derived.steps_learned(config, policy, step or 0) - ceil(settings.max_staleness)
        explanation = explain(
            algo, groups, min_group=settings.min_group, credits=stored, policy=policy, oldest=oldest
        )
        if config.policies:
            lines.append(f"policy {policy}")
            if step is not None and not derived.learns_in_step(config, policy, step):
                lines.append(f"  step {step_number(step)} was not its turn to learn")
                continue
            if rollout not in explanation.batch.rollouts:
                lines.append("  it has no trained call in this rollout")
                continue
        spelt = _spelling(config, policy) if tokens else None
        if rollout in explanation.batch.rollouts:
            text = pushed(explanation, rollout)
            lines[-1:] = [lines[-1], f"  {text}"] if config.policies else [f"{lines[-1]} {text}"]
        lines += report(explanation, rollout, groups, tokens, spelt)
    if step is None:
        return [*lines, "this rollout is not trained yet, or was discarded"]
    if not credits:
        return [*lines, "its step changed no weight, so it stored no credit; see the note above"]
    return lines


def _spelling(config: RunConfig, policy: str) -> Callable[[int], str] | None:
    """A decoder of single token ids; None if the policy's tokenizer is not on this machine."""
    from transformers import AutoTokenizer

    name = derived.view(config, policy).model_path()
    if not name:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return None
    return lambda token: str(tokenizer.decode([token]))


async def _groups(store: Store, rollout: Rollout) -> list[Group]:
    """The groups that were trained (or, if untrained, requested) in the rollout's step."""
    requested = rollout.step if rollout.trained is None else None
    rows = await store.rollouts(
        rollout.run, purpose=Purpose.TRAIN, step=requested, trained=rollout.trained
    )
    members: dict[str, list[Rollout]] = {}
    for row in rows:
        trace = await store.trace(row.id)
        calls = trace.transitions if trace else []
        whole = msgspec.structs.replace(row, transitions=calls)
        members.setdefault(row.group, []).append(whole)
    return [
        Group(id=group, run=rollout.run, step=rollouts[0].step, rollouts=rollouts)
        for group, rollouts in members.items()
    ]


@dataclass(frozen=True, slots=True)
class Link:
    """One part of a credit and its values, float64 [N] per column; NaN = missing."""

    depth: int
    text: str
    columns: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The credit of a batch's tokens with the chain of its parts."""

    algo: Algo
    batch: Batch
    chain: list[Link]  # innermost part first
    weight: Tensor  # float64 [N], u; 0: not in the loss
    psi: Tensor  # float64 [N], at the sampler's log-probs
    stored: Stored


def explain(
    algo: Algo,
    groups: list[Group],
    *,
    min_group: int = 0,
    credits: Mapping[str, Credit] = MappingProxyType({}),
    policy: str = POLICY,
    oldest: int = 0,
) -> Explanation:
    """Explain the step of `algo` on `groups` for a trained policy. credits: stored by the step, by
    call. oldest: first version with trained tokens. Raises TrainingError like a step."""
    check_rewards(groups, [name for name in algo.rewards if name not in algo.optional])
    batch = build_batch(groups, reward_names=algo.rewards, min_group=min_group, policy=policy)
    algo = withhold(algo, batch, oldest)
    stored = read(algo, batch, credits)
    batch = replayed(algo, batch, stored)
    same = batch.sampler_logprobs.double()
    given = GivenLogProbs(**dict.fromkeys(algo.needs - {"sampler"}, same))
    terms = objective.loss_terms(algo, batch, given, fresh=True)
    index = torch.arange(batch.n_tokens)
    return Explanation(
        algo=algo,
        batch=batch,
        chain=list(links(algo.credit, batch)),
        weight=terms.weight,
        psi=objective.loss_coefficients(algo, terms, same, index),
        stored=stored,
    )


def links(credit: object, batch: Batch, depth: int = 0, text: str = "") -> Iterator[Link]:
    """Yield the parts of a credit with their values, each after the parts it is computed from."""
    label = text + format_record(credit)
    if isinstance(credit, GroupRelative):
        x, standard = credit.standard(batch)
        at = owner(batch, credit.level)
        scale = torch.where(standard.scale > 0, standard.scale, torch.nan)
        values = {"value": x[at], "baseline": standard.baseline[at], "scale": scale[at]}
        yield Link(depth, label, values | {"advantage": credit(batch)})
        return
    if isinstance(credit, WeightedSum):
        for term, weight in credit.terms:
            factor = format_record(weight) if callable(weight) else f"{weight:g}"
            yield from links(term, batch, depth + 1, f"{factor} x ")
        label = text + "sum"
    else:
        inside = {"credit": "", "outcome": "gate: ", "others": "others: "}
        for name, prefix in inside.items():
            inner = getattr(credit, name, None)
            if callable(inner):
                yield from links(inner, batch, depth + 1, prefix)
        label = text + format_record(credit, leave_out=tuple(inside))
    if callable(credit):
        yield Link(depth, label, {"advantage": credit(batch)})


def compared(rollout: str, groups: list[Group]) -> str:
    """A sentence about a rollout's outcome and those of its group."""
    matching = (group for group in groups if any(row.id == rollout for row in group.rollouts))
    outcomes = {row.id: row.reward() for group in matching for row in group.rollouts}
    present = [x for x in outcomes.values() if math.isfinite(x)]
    if not math.isfinite(outcome := outcomes.get(rollout, math.nan)):
        return "It has no outcome."
    if len(present) < 2:
        return f"Its outcome is {outcome:g}, with no other of its task to compare it with."
    if min(present) == max(present):
        return f"Its outcome is {outcome:g}, as that of all {len(present)} rollouts of its task."
    mean = fmean(present)
    than = "above" if outcome > mean else "below" if outcome < mean else "equal to"
    return (
        f"Its outcome {outcome:g} is {than} {mean:.3g}, the mean of the {len(present)} of its task."
    )


def pushed(explanation: Explanation, rollout: str) -> str:
    """A sentence about the step's effect on the calls of a rollout in its batch."""
    batch, stored = explanation.batch, explanation.stored
    psi = stored.columns["psi"] if stored.known.any() else explanation.psi
    of_rollout = batch.token_rollout == batch.rollouts.index(rollout)
    calls = [
        float(psi[batch.token_transition == call].nansum())
        for call in sorted(set(batch.token_transition[of_rollout].tolist()))
    ]
    up, down = sum(x > 0 for x in calls), sum(x < 0 for x in calls)
    calls_text = f"{len(calls)} calls" if len(calls) > 1 else "one call"
    if not (up or down):
        return f"This step did not change the probability of its {calls_text}."
    changed = [f"{n} {effect}" for n, effect in ((up, "likelier"), (down, "less likely")) if n]
    return f"Of its {calls_text} the step made {' and '.join(changed)}."


def report(
    explanation: Explanation,
    rollout: str,
    groups: list[Group],
    tokens: bool,
    spelt: Callable[[int], str] | None = None,
) -> list[str]:
    """Lines about one rollout: its reward rows, then its calls, with `tokens` also their tokens.
    spelt: returns the text of a token id; default: show ids.

    Raises TrainingError for a rollout that is not in the batch."""
    batch = explanation.batch
    if rollout not in batch.rollouts:
        raise TrainingError(
            f"{rollout} is not trained: it is an evaluation, failed without a reward, has no call "
            "of the policy with known token ids and log-probs, or is in a group with a single "
            "scored rollout"
        )
    explained = next(row for group in groups for row in group.rollouts if row.id == rollout)
    versions = {call.id: call.versions for call in explained.transitions}
    where = step_in_words(explained.step)
    if explained.trained is not None:
        where = f"trained by {step_in_words(explained.trained)}"
    lines = [f"{rollout}, {where}, {explanation.algo.name}", "rewards"]
    lines += [
        f"  {reward_reference(row)}{f' of {row.target}' if row.target else ''}"
        f" = {row.value:g} ({row.source})"
        for row in explained.rewards
    ] or ["  none"]
    mine = batch.token_rollout == batch.rollouts.index(rollout)
    order = batch.token_transition.argsort(stable=True)
    ends = batch.token_transition[order].bincount().cumsum(0).tolist()  # end of each call's tokens
    for call in sorted(set(batch.token_transition[mine].tolist())):
        at = order[ends[call - 1] if call else 0 : ends[call]]
        role = batch.roles[int(batch.transition_role[call])]
        id = batch.transitions[call]
        version = f" by {versions[id]}" if versions[id] else ""
        lines.append(f"call {id}, {role}, {at.numel()} tokens{version}")
        lines += _call(explanation, at, tokens, spelt)
    return lines + _gates(explanation)


def _call(
    explanation: Explanation, at: Tensor, tokens: bool, spelt: Callable[[int], str] | None
) -> list[str]:
    """Lines about one call. at: indices of its tokens, int64."""
    lines = []
    for link in explanation.chain:
        numbers = [
            f"{name} {_number(column[at])}"
            for name, column in link.columns.items()
            if not column[at].isnan().all() or name in ("value", "advantage")
        ]
        lines.append(f"  {'  ' * link.depth}{link.text}: {', '.join(numbers)}")
    stored, batch = explanation.stored, explanation.batch
    used = {"share": explanation.weight, "psi": explanation.psi}  # at the start of the step
    if stored.known.any():
        names = {"gates": "gate", "share": "weight", "psi": "psi"}
        used = {name: stored.columns[column] for name, column in names.items()}

    def listed(at: Tensor) -> str:
        return ", ".join(f"{name} {_number(x[at])}" for name, x in used.items())

    in_loss = bool((explanation.weight[at] > 0).any())
    lines.append(_weight(explanation, at, used) if in_loss else "  not in the loss")
    lines += _disagreement(explanation, at)
    if tokens and in_loss:
        advantage = explanation.chain[-1].columns["advantage"]
        ids = torch.cat([row.tokens[row.actions] for row in batch.rows]).tolist()
        lines += [
            f"    token {number} {repr(spelt(ids[t])) if spelt else f'id {ids[t]}'}: "
            f"advantage {_number(advantage[t : t + 1])}, {listed(torch.tensor([t]))}, "
            f"log-prob of the sampler {float(batch.sampler_logprobs[t]):.4f}"
            for number, t in enumerate(at.tolist())
        ]
    return lines


def _weight(explanation: Explanation, at: Tensor, used: Mapping[str, Tensor]) -> str:
    """A line with the product that weights a call's tokens in the loss."""
    names = {"gates": "gates", "share": "share of the average"}
    factors = [f"{name} {_number(used[key][at])}" for key, name in names.items() if key in used]
    stored = explanation.stored
    source = stored if stored.known.any() else explanation.chain[-1]
    product = " x ".join([f"advantage {_number(source.columns['advantage'][at])}", *factors])
    return f"  weight in the loss (psi): {_number(used['psi'][at])} per token ({product})"


def _disagreement(explanation: Explanation, at: Tensor) -> list[str]:
    """A line if the chain does not result in the advantage that the step used."""
    stored = explanation.stored
    at = at[stored.known[at]]
    was = stored.columns["advantage"][at]
    chain = explanation.chain[-1].columns["advantage"][at]
    now = torch.where(explanation.weight[at] > 0, chain, torch.nan)
    if torch.isclose(was, now, rtol=1e-4, atol=1e-6, equal_nan=True).all():
        return []
    return [
        f"  the step used advantage {_number(was)}, but the chain above results in {_number(now)}: "
        "the algorithm or the calls are not those of the step"
    ]


def _gates(explanation: Explanation) -> list[str]:
    algo, title = explanation.algo, "gates and penalties"
    parts = [f"  {format_record(part)}" for part in (*algo.gates, *algo.penalties)]
    if explanation.stored.known.any():
        note = "  as they applied in the first optimizer step that the token was in"
        return [title, *parts, note]
    start = [": factor 1 where current = old = sampler" for _ in algo.gates]
    start += [f": 0 where current = {penalty.den}" for penalty in algo.penalties]
    note = (
        "  psi is that of current = old = sampler: later log-probs are neither stored nor "
        "recomputable"
    )
    return [title, *(part + s for part, s in zip(parts, start, strict=True)), note]


def _number(x: Tensor) -> str:
    """The known value, or the range of the known values."""
    values = x[~x.isnan()]
    if not values.numel():
        return "missing"
    low, high = float(values.min()), float(values.max())
    return f"{low:.6g}" if low == high else f"{low:.6g} .. {high:.6g}"
