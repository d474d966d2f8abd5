"""Rewards of the members of a team, for verifiers: pure functions of scores that the verifier gave.

Scores of answers are in [0, 1], and NaN where an answer was not judged. `stages` numbers the
answers of a rollout by when they were given: answers of one stage did not see one another. In a
chain each answer is a stage (0, 1, 2, ...), in a debate each round of the agents is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, permutations, product
from math import isnan, nan
from statistics import fmean
from typing import Literal, TypeVar

from agentrl.types import Transition

T = TypeVar("T")
Coalition = frozenset[str]
Value = Callable[[Coalition], float]
"""What a coalition comes to. What a role that is absent does instead, an empty message or a default
one, is its to say."""
EXACT = 4  # roles up to which Shapley values are exact by default: 24 orders of joining


def rounds(calls: Sequence[Transition]) -> list[int]:
    """Stages of a debate: how many calls the role of each made before."""
    seen: dict[str, int] = {}
    found = []
    for call in calls:
        found.append(seen.get(call.role, 0))
        seen[call.role] = found[-1] + 1
    return found


def marti(
    scores: Sequence[float],
    stages: Sequence[int],
    how: Literal["margin", "quality"] = "margin",
    alpha: float = 0.5,
    beta: float = 0.0,
) -> list[float]:
    """R + alpha * (R - Q), or of quality R + alpha * (Q R - (1 - Q)(1 - R)), Q being the mean score
    of all earlier stages; the first stage keeps its score. beta: what every answer gets of the mean
    score of the last stage ("with outcome", 0.5 there). MARTI, OpenReview E7jZqo0A50."""
    known = [(stage, x) for stage, x in zip(stages, scores, strict=True) if not isnan(x)]
    outcome = fmean(x for stage, x in known if stage == max(known)[0]) if known else nan
    shaped = []
    for stage, r in zip(stages, scores, strict=True):
        before = [x for earlier, x in known if earlier < stage]
        gain = 0.0
        if before:
            q = fmean(before)
            gain = r - q if how == "margin" else q * r - (1 - q) * (1 - r)
        shaped.append(r + alpha * gain + beta * outcome)
    return shaped


def maporl(scores: Sequence[float], stages: Sequence[int], gamma: float = 1.0) -> list[float]:
    """(v + sum over later stages of gamma^distance * their mean score) / sum of all weights.

    A score below 0 is the mark of a round that was not held because all agreed before: it counts in
    no mean, and has no reward. MAPoRL, arXiv 2502.18439."""
    held: dict[int, list[float]] = {}
    for stage, v in zip(stages, scores, strict=True):
        if v >= 0:
            held.setdefault(stage, []).append(v)
    rewards = []
    for stage, v in zip(stages, scores, strict=True):
        weights = [gamma ** (s - stage) for s in held if s > stage]
        means = [fmean(held[s]) for s in held if s > stage]
        total = v + sum(w * mean for w, mean in zip(weights, means, strict=True))
        rewards.append(total / (1 + sum(weights)) if v >= 0 else nan)
    return rewards


def maporl_incentives(
    scores: Sequence[float],
    agents: Sequence[str],
    stages: Sequence[int],
    *,
    joined: float = 0.0,
    alone: float = 0.0,
    persuaded: float = 0.0,
    provoked: float = 0.0,
) -> list[float]:
    """What to add to the reward of every answer of a debate for who turned whom, minus the same
    where the turn was from right to wrong: a score above 1/2 is right, below it wrong, and others
    are what they are on average.

    joined: an agent turned to where the others were, and alone: to where they were not; persuaded:
    the others turned afterwards to where it was, and provoked: away from where it was with them.
    MAPoRL, arXiv 2502.18439: alpha 0, 1, 3 and 2 of its repository, where the last two have the
    opposite sign, and so would pay for leading others astray, and the first round gets neither."""
    said = {(s, agent): v for s, agent, v in zip(stages, agents, scores, strict=True) if v >= 0}
    held = sorted({stage for stage, _ in said})
    before, after = dict(zip(held[1:], held, strict=False)), dict(pairwise(held))

    def own(agent: str, stage: int | None) -> bool | None:
        return _right(v for (s, who), v in said.items() if s == stage and who == agent)

    def others(agent: str, stage: int | None) -> bool | None:
        return _right(v for (s, who), v in said.items() if s == stage and who != agent)

    bonuses = []
    for agent, stage in zip(agents, stages, strict=True):
        then, now, later = before.get(stage), stage, after.get(stage)
        turned = _turn(own(agent, then), own(agent, now), others(agent, then), joined, alone)
        moved = _turn(
            others(agent, now), others(agent, later), own(agent, now), persuaded, provoked
        )
        bonuses.append(turned + moved if (stage, agent) in said else nan)
    return bonuses


def _right(scores: Iterable[float]) -> bool | None:
    """Whether they are right on average; None: as much as wrong, or there are none."""
    mean = fmean([*scores] or [0.5])
    return None if mean == 0.5 else mean > 0.5


def _turn(
    old: bool | None, new: bool | None, witness: bool | None, there: float, elsewhere: float
) -> float:
    """The weight of a turn, by whether a witness is where it leads, with its sign."""
    if None in (old, new, witness) or old == new:
        return 0.0
    weight = there if witness == new else elsewhere
    return weight if new else -weight


def cross(
    value: Callable[[Mapping[str, T]], float], answers: Mapping[str, Sequence[T]]
) -> dict[str, list[float]]:
    """The mean return of every answer over all joint answers that it is part of, for a team whose
    roles sampled several each (`n` of a call) and a verifier that can value any combination, of
    which there are as many as the product of their numbers. value: of one answer of each role; NaN:
    not known, and in no mean. MAGRPO's cross mode, arXiv 2508.04652."""
    known: dict[tuple[str, int], list[float]] = {}
    for picked in product(*(range(len(sampled)) for sampled in answers.values())):
        joint = dict(zip(answers, picked, strict=True))
        x = value({role: answers[role][i] for role, i in joint.items()})
        for place in joint.items():
            known.setdefault(place, []).extend([] if isnan(x) else [x])
    return {
        role: [fmean(known.get((role, i)) or [nan]) for i in range(len(sampled))]
        for role, sampled in answers.items()
    }


def sage_challenger(quality: float, format: float, solved: float, *, valid: bool) -> float:
    """Of a question: its quality as the critic sees it, its format, and, where the verifier finds
    it valid and the critic good enough (0.7), how rarely the solvers get it right. Without that
    gate a question that nobody can answer would be the best. SAGE, arXiv 2603.15255."""
    if valid and quality >= 0.7:
        return (quality + (1 - solved) + format) / 3
    return (quality + format) / 2


def sage_planner(quality: float, format: float, weights: tuple[float, float] = (0.9, 0.1)) -> float:
    """Of a plan, by the critic and its format. The weights are ours: the paper's are not known."""
    return weights[0] * quality + weights[1] * format


def sage_solver(
    plan: float,
    correct: float,
    format: float,
    weights: tuple[float, float, float] = (0.2, 0.7, 0.1),
) -> float:
    """Of an answer: its plan's quality, where the plan was good enough (0.3) to be followed,
    whether it is correct, and its format. The weights are ours: the paper's are not known."""
    followed = plan if plan >= 0.3 else 0.0
    return weights[0] * followed + weights[1] * correct + weights[2] * format


def m_grpo_main(format: float, correct: float) -> float:
    """Of the main agent's rollout; without the format nothing. M-GRPO, arXiv 2511.13288."""
    return 0.1 * format + 0.9 * correct if format else 0.0


def m_grpo_sub(format: float, main_correct: float, judged: float) -> float:
    """Of a sub-agent's call: `judged` by an expert. M-GRPO, arXiv 2511.13288."""
    return 0.1 * format + 0.4 * main_correct + 0.5 * judged if format else 0.0


def difference(value: Value, roles: Iterable[str]) -> dict[str, float]:
    """v(team) - v(team without the role). Wolpert and Tumer 2001."""
    team = frozenset(roles)
    whole = value(team)
    return {role: whole - value(team - {role}) for role in sorted(team)}


def shapley(
    value: Value, roles: Iterable[str], *, samples: int = 0, seed: int | str = 0
) -> dict[str, float]:
    """What each role adds to the coalitions before it, mean over the orders in which they could
    join: all orders of up to 4 roles, of more the `samples` that are drawn with `seed`.

    Each coalition is valued once. They add up to v(team) - v(nobody), sampled or not. Raises
    ValueError for more than 4 roles without samples."""
    names = sorted(set(roles))
    known: dict[Coalition, float] = {}

    def worth(coalition: Coalition) -> float:
        if coalition not in known:
            known[coalition] = value(coalition)
        return known[coalition]

    added = dict.fromkeys(names, 0.0)
    orders = _orders(names, samples, seed)
    for order in orders:
        for place, role in enumerate(order):
            before = frozenset(order[:place])
            added[role] += worth(before | {role}) - worth(before)
    return {role: total / len(orders) for role, total in added.items()}


def _orders(names: list[str], samples: int, seed: int | str) -> list[tuple[str, ...]]:
    if len(names) <= EXACT:
        return list(permutations(names))
    if samples < 1:
        raise ValueError(
            f"{len(names)} roles can join in too many orders to take them all; set samples"
        )
    draw = random.Random(seed)
    return [tuple(draw.sample(names, len(names))) for _ in range(samples)]
