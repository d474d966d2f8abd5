"""Rewards of team members, for verifiers: pure functions of the scores of answers, or of the values
of coalitions.

Scores of answers are in [0, 1]; NaN: not judged. `stages` has the stage of each answer of a
rollout; answers of the same stage did not see each other. In a chain each answer is a stage (0, 1,
2, ...), in a debate each round is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import count, pairwise, permutations, product
from math import isnan, nan
from statistics import fmean
from typing import Literal, TypeVar

from agentrl.core.types import Transition

T = TypeVar("T")


def rounds(calls: Sequence[Transition]) -> list[int]:
    """Stages of a debate: for each call, the number of earlier calls of its role."""
    counters: dict[str, count[int]] = {}
    return [next(counters.setdefault(call.role, count())) for call in calls]


def marti(
    scores: Sequence[float],
    stages: Sequence[int],
    how: Literal["margin", "quality"] = "margin",
    alpha: float = 0.5,
    beta: float = 0.0,
) -> list[float]:
    """R + alpha * (R - Q) for "margin", R + alpha * (Q R - (1 - Q)(1 - R)) for "quality"; Q is the
    mean score of all earlier stages, and the first stage keeps its score. Adds beta * the mean
    score of the last stage to every answer ("with outcome" in the paper, where beta is 0.5). MARTI,
    OpenReview E7jZqo0A50."""
    judged = [(stage, x) for stage, x in zip(stages, scores, strict=True) if not isnan(x)]
    outcome = fmean(x for stage, x in judged if stage == max(judged)[0]) if judged else nan
    shaped = []
    for stage, r in zip(stages, scores, strict=True):
        gain = 0.0
        if before := [x for earlier, x in judged if earlier < stage]:
            q = fmean(before)
            gain = r - q if how == "margin" else q * r - (1 - q) * (1 - r)
        shaped.append(r + alpha * gain + beta * outcome)
    return shaped


def maporl(scores: Sequence[float], stages: Sequence[int], gamma: float = 1.0) -> list[float]:
    """(v + sum over later stages of gamma^distance * their mean score) / sum of all weights.

    A score below 0 marks a round that was skipped because all agreed before: no mean includes it,
    and its reward is NaN. MAPoRL, arXiv 2502.18439."""
    held: dict[int, list[float]] = {}
    for stage, v in zip(stages, scores, strict=True):
        if v >= 0:
            held.setdefault(stage, []).append(v)
    means = {stage: fmean(values) for stage, values in held.items()}
    rewards = []
    for stage, v in zip(stages, scores, strict=True):
        weights = {later: gamma ** (later - stage) for later in means if later > stage}
        total = v + sum(weight * means[later] for later, weight in weights.items())
        rewards.append(total / (1 + sum(weights.values())) if v >= 0 else nan)
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
    """The bonus of every answer of a debate for changes of mind; negative for a change from right
    to wrong. A score above 1/2 is right, one below it wrong; the other agents count by their mean.

    joined: weight if the agent changed to the others' side; alone: away from it. persuaded: weight
    if the others then changed to the agent's side; provoked: away from the side they shared.
    MAPoRL, arXiv 2502.18439: alpha 0, 1, 3 and 2 of its repository. There the last two have the
    opposite sign, which would reward leading others astray, and the first round gets no bonus."""
    scored = {(s, agent): v for s, agent, v in zip(stages, agents, scores, strict=True) if v >= 0}
    held = sorted({stage for stage, _ in scored})
    before, after = dict(zip(held[1:], held, strict=False)), dict(pairwise(held))

    def own(agent: str, stage: int | None) -> bool | None:
        return _right(v for (s, who), v in scored.items() if s == stage and who == agent)

    def others(agent: str, stage: int | None) -> bool | None:
        return _right(v for (s, who), v in scored.items() if s == stage and who != agent)

    bonuses = []
    for agent, stage in zip(agents, stages, strict=True):
        then, now, later = before.get(stage), stage, after.get(stage)
        turned = _turn(own(agent, then), own(agent, now), others(agent, then), joined, alone)
        moved = _turn(
            others(agent, now), others(agent, later), own(agent, now), persuaded, provoked
        )
        bonuses.append(turned + moved if (stage, agent) in scored else nan)
    return bonuses


def _right(scores: Iterable[float]) -> bool | None:
    """Whether the mean score is above 1/2; None if it equals 1/2 or there is no score."""
    mean = fmean([*scores] or [0.5])
    return None if mean == 0.5 else mean > 0.5


def _turn(
    old: bool | None, new: bool | None, witness: bool | None, there: float, elsewhere: float
) -> float:
    """The signed weight of a change: `there` if the witness is on the new side, or `elsewhere`."""
    if None in (old, new, witness) or old == new:
        return 0.0
    weight = there if witness == new else elsewhere
    return weight if new else -weight


def cross(
    value: Callable[[Mapping[str, T]], float], answers: Mapping[str, Sequence[T]]
) -> dict[str, list[float]]:
    """Role -> the mean return of each of its answers over all joint answers that contain it, for a
    team whose roles sampled several answers each (`n` of a call).

    value: the return of one answer of each role, called for every combination; NaN: unknown and
    excluded from the means. MAGRPO's cross mode, arXiv 2508.04652."""
    values: dict[tuple[str, int], list[float]] = {}
    for picked in product(*(range(len(sampled)) for sampled in answers.values())):
        joint = dict(zip(answers, picked, strict=True))
        x = value({role: answers[role][i] for role, i in joint.items()})
        for answer in joint.items():
            values.setdefault(answer, []).extend([] if isnan(x) else [x])
    return {
        role: [fmean(values.get((role, i)) or [nan]) for i in range(len(sampled))]
        for role, sampled in answers.items()
    }


def sage_challenger(quality: float, format: float, solved: float, *, valid: bool) -> float:
    """Reward of a question: the mean of its quality by the critic, its format and 1 - the solvers'
    success rate. The last counts only if the verifier finds the question valid and its quality is
    at least 0.7; otherwise unanswerable questions would get the highest reward. SAGE, arXiv
    2603.15255."""
    if valid and quality >= 0.7:
        return (quality + (1 - solved) + format) / 3
    return (quality + format) / 2


def sage_planner(quality: float, format: float, weights: tuple[float, float] = (0.9, 0.1)) -> float:
    """Reward of a plan: its quality by the critic and its format. The paper gives no weights."""
    return weights[0] * quality + weights[1] * format


def sage_solver(
    plan: float,
    correct: float,
    format: float,
    weights: tuple[float, float, float] = (0.2, 0.7, 0.1),
) -> float:
    """Reward of an answer: the quality of its plan if that is at least 0.3 (a plan worth
    following), its correctness and its format. The paper gives no weights."""
    followed = plan if plan >= 0.3 else 0.0
    return weights[0] * followed + weights[1] * correct + weights[2] * format


def m_grpo_main(format: float, correct: float) -> float:
    """Reward of the main agent; 0 without the format. M-GRPO, arXiv 2511.13288."""
    return 0.1 * format + 0.9 * correct if format else 0.0


def m_grpo_sub(format: float, main_correct: float, judged: float) -> float:
    """Reward of a sub-agent's call; judged: an expert's score. M-GRPO, arXiv 2511.13288."""
    return 0.1 * format + 0.4 * main_correct + 0.5 * judged if format else 0.0


EXACT_ROLES = 4  # up to this many roles all orders of joining are used (24)
Coalition = frozenset[str]
Value = Callable[[Coalition], float]
"""The value of the team if only these roles take part. The function decides what replaces an absent
role, such as an empty or a default message."""


def difference(value: Value, roles: Iterable[str]) -> dict[str, float]:
    """v(team) - v(team without the role). Wolpert and Tumer 2001."""
    team = frozenset(roles)
    team_value = value(team)
    return {role: team_value - value(team - {role}) for role in sorted(team)}


def shapley(
    value: Value, roles: Iterable[str], *, samples: int = 0, seed: int | str = 0
) -> dict[str, float]:
    """Role -> its mean marginal contribution over orders of joining: all orders for up to 4 roles,
    else `samples` of them drawn with `seed`.

    Evaluates each coalition once. The values sum to v(team) - v(empty) in either case. Raises
    ValueError for more than 4 roles without samples."""
    names = sorted(set(roles))
    worth = cache(value)
    added = dict.fromkeys(names, 0.0)
    orders = _orders(names, samples, seed)
    for order in orders:
        for index, role in enumerate(order):
            before = frozenset(order[:index])
            added[role] += worth(before | {role}) - worth(before)
    return {role: total / len(orders) for role, total in added.items()}


def _orders(names: list[str], samples: int, seed: int | str) -> list[tuple[str, ...]]:
    if len(names) <= EXACT_ROLES:
        return list(permutations(names))
    if samples < 1:
        raise ValueError(
            f"{len(names)} roles can join in too many orders to take them all; set samples"
        )
    rng = random.Random(seed)
    return [tuple(rng.sample(names, len(names))) for _ in range(samples)]
