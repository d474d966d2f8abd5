"""How a trained token's number came about: reward rows -> stream -> baseline -> advantage -> psi.

The step stored what it made of each call, with the gates that applied. The chain that led there is
computed anew from the groups it trained, with what it stored of what is not to be had again:
baselines of earlier steps, values of a critic, prices of leaving a reference. Where the two
disagree, that is said. Without what was stored, gates and penalties are shown as they are where the
policy still is the sampler's, which is where the first optimizer step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import inf
from types import MappingProxyType

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative, WeightedSum
from agentrl.algorithms.data import rewards as columns
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import owner
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.diagnostics.credit_records import Stored, read, replayed
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.core import Algo
from agentrl.errors import TrainingError
from agentrl.types import POLICY, Credit, Group


@dataclass(frozen=True, slots=True)
class Link:
    """One record of a credit and what it came to, float64 [N] per column; NaN = missing."""

    depth: int
    text: str
    columns: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything about the tokens of a batch."""

    algo: Algo
    batch: Batch
    chain: list[Link]  # innermost record first
    kept: Tensor  # bool [N]: in the loss
    weight: Tensor  # float64 [N], u
    psi: Tensor  # float64 [N], at the sampler's log-probs
    stored: Stored


def explain(
    algo: Algo,
    groups: list[Group],
    *,
    min_group: int = 0,
    credits: Mapping[str, Credit] = MappingProxyType({}),
    policy: str = POLICY,
) -> Explanation:
    """Explains the step of `algo` on `groups`, for a trained policy. `credits`: what the store has
    of the step, by transition.

    Raises TrainingError where the step itself would have."""
    columns.check_rewards(groups, [name for name in algo.rewards if name not in algo.optional])
    batch = build_batch(groups, reward_names=algo.rewards, min_group=min_group, policy=policy)
    stored = read(algo, batch, credits)
    batch = replayed(algo, batch, stored)
    same = batch.behaviour.double()
    terms = objective.loss_terms(algo, batch, dict.fromkeys(algo.needs, same), fresh=True)
    index = torch.arange(batch.n_tokens)
    return Explanation(
        algo=algo,
        batch=batch,
        chain=list(links(algo.credit, batch)),
        kept=terms.weight > 0,
        weight=terms.weight,
        psi=objective.psi(algo, terms, same, index),
        stored=stored,
    )


def links(credit: object, batch: Batch, depth: int = 0, text: str = "") -> Iterator[Link]:
    """The records of a credit with their numbers, each after those it is made of."""
    label = text + brief(credit)
    if isinstance(credit, GroupRelative):
        x, standard = credit.standard(batch)
        at = owner(batch, credit.level)
        scale = torch.where(standard.scale > 0, standard.scale, torch.nan)
        yield Link(
            depth,
            label,
            {
                "value": x[at],
                "baseline": standard.baseline[at],
                "scale": scale[at],
                "advantage": credit(batch),
            },
        )
        return
    if isinstance(credit, WeightedSum):
        for term, weight in credit.terms:
            factor = brief(weight) if callable(weight) else f"{weight:g}"
            yield from links(term, batch, depth + 1, f"{factor} x ")
        label = text + "sum"
    else:
        inside = {"credit": "", "outcome": "gate: ", "others": "others: "}
        for name, said in inside.items():
            inner = getattr(credit, name, None)
            if callable(inner):
                yield from links(inner, batch, depth + 1, said)
        label = text + brief(credit, leave_out=tuple(inside))
    if callable(credit):
        yield Link(depth, label, {"advantage": credit(batch)})


def brief(record: object, leave_out: tuple[str, ...] = ()) -> str:
    """A record with what differs from its defaults: GroupRelative('outcome', norm='std'); a
    record of numbers alone with all that are finite: Clip(0.2, hi=0.28)."""
    if isinstance(record, tuple):
        return f"({', '.join(map(brief, record))}{',' if len(record) == 1 else ''})"
    if not is_dataclass(record) or isinstance(record, type):
        return getattr(record, "__name__", repr(record))
    said = []
    numeric = all(isinstance(getattr(record, field.name), float) for field in fields(record))
    for number, field in enumerate(fields(record)):
        value = getattr(record, field.name)
        usual = value == (inf if numeric else field.default)
        if field.name in leave_out or (number and usual):
            continue
        said.append(f"{field.name}={brief(value)}" if number else brief(value))
    return f"{type(record).__name__}({', '.join(said)})"


def report(
    explanation: Explanation,
    rollout: str,
    groups: list[Group],
    tokens: bool,
    spelt: Callable[[int], str] | None = None,
) -> list[str]:
    """Lines about one rollout: its reward rows, then each of its calls, or tokens. spelt: the text
    of a token id; without, tokens are shown by their ids.

    Raises TrainingError for a rollout that is not in the batch."""
    batch = explanation.batch
    if rollout not in batch.rollouts:
        raise TrainingError(
            f"{rollout} is not trained: it is an evaluation, failed without a reward, has no call "
            "of the policy with known token ids and log-probs, or is in a group with fewer scored "
            "rollouts than algorithm.min_group"
        )
    found = next(row for group in groups for row in group.rollouts if row.id == rollout)
    lines = [f"{rollout}, step {batch.step}, {explanation.algo.name}", "rewards"]
    lines += [
        f"  {columns.reward_reference(row)}{f' of {row.target}' if row.target else ''}"
        f" = {row.value:g} ({row.source})"
        for row in found.rewards
    ] or ["  none"]
    mine = batch.token_rollout == batch.rollouts.index(rollout)
    for call in sorted(set(batch.token_transition[mine].tolist())):
        at = (batch.token_transition == call).nonzero().squeeze(1)
        role = batch.roles[int(batch.transition_role[call])]
        lines.append(f"call {batch.transitions[call]}, {role}, {at.numel()} tokens")
        lines += _call(explanation, at, tokens, spelt)
    return lines + _gates(explanation)


def _call(
    explanation: Explanation,
    at: Tensor,
    tokens: bool,
    spelt: Callable[[int], str] | None,
) -> list[str]:
    lines = []
    for link in explanation.chain:
        numbers = [
            f"{name} {_number(column[at])}"
            for name, column in link.columns.items()
            if not column[at].isnan().all() or name in ("value", "advantage")
        ]
        lines.append(f"  {'  ' * link.depth}{link.text}: {', '.join(numbers)}")
    used = _used(explanation)
    if not explanation.kept[at].any():
        return [*lines, "  not in the loss", *_disagreement(explanation, at)]
    lines.append(f"  {_listed(used, at)}")
    lines += _disagreement(explanation, at)
    if tokens:
        advantage = explanation.chain[-1].columns["advantage"]
        rows = explanation.batch.rows
        ids = torch.cat([row.tokens[row.actions] for row in rows]).tolist()
        names = {t: repr(spelt(ids[t])) if spelt else f"id {ids[t]}" for t in at.tolist()}
        lines += [
            f"    token {number} {names[t]}: "
            f"advantage {_number(advantage[t : t + 1])}, "
            f"{_listed(used, torch.tensor([t]))}, "
            f"log-prob of the sampler {float(explanation.batch.behaviour[t]):.4f}"
            for number, t in enumerate(at.tolist())
        ]
    return lines


def _used(explanation: Explanation) -> dict[str, Tensor]:
    """Float64 [N]: as the step used them, or without what it stored as they begin."""
    stored, same = explanation.stored, {"u": explanation.weight, "psi": explanation.psi}
    if not stored.known.any():
        return same
    was = {"gates": "gate", "u": "weight", "psi": "psi"}
    return {name: stored.columns[column] for name, column in was.items()}


def _listed(numbers: Mapping[str, Tensor], at: Tensor) -> str:
    return ", ".join(f"{name} {_number(x[at])}" for name, x in numbers.items())


def _disagreement(explanation: Explanation, at: Tensor) -> list[str]:
    """Where what is in the store now does not lead to the advantage that was used."""
    stored = explanation.stored
    at = at[stored.known[at]]
    was = stored.columns["advantage"][at]
    chain = explanation.chain[-1].columns["advantage"][at]
    now = torch.where(explanation.kept[at], chain, torch.nan)
    if torch.isclose(was, now, rtol=1e-4, atol=1e-6, equal_nan=True).all():
        return []
    return [
        f"  the step used advantage {_number(was)}, and the chain above comes to {_number(now)}: "
        "the algorithm or the calls (algorithm.inexact) are not those of the step"
    ]


def _gates(explanation: Explanation) -> list[str]:
    algo = explanation.algo
    if explanation.stored.known.any():
        gates = [f"  {brief(gate)}" for gate in algo.gates]
        penalties = [f"  {brief(reg)}" for reg in algo.penalties]
        note = "  as they applied in the first optimizer step that the token was in"
        return ["gates and penalties", *gates, *penalties, note]
    gates = [f"  {brief(gate)}: factor 1 where p = o = b" for gate in algo.gates]
    penalties = [f"  {brief(reg)}: 0 where p = {reg.den}" for reg in algo.penalties]
    note = "  psi is that of p = o = b; later log-probs are not stored and cannot be recomputed"
    return ["gates and penalties", *gates, *penalties, note]


def _number(x: Tensor) -> str:
    """One number, or the range of several."""
    known = x[~x.isnan()]
    if not known.numel():
        return "missing"
    low, high = float(known.min()), float(known.max())
    return f"{low:.6g}" if low == high else f"{low:.6g} .. {high:.6g}"
