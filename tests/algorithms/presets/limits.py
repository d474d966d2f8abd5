"""What credit does where its assumptions do not hold: the numbers of "Limits" in CREDIT.md.

Every game is small enough to go through all that can happen, so nothing but QMIX's network is
estimated. A gradient is that of the expected outcome by the logit of an action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

import torch

from agentrl.algorithms.presets.multiagent import (
    CriticKind,
    CriticTraining,
    TeamCritic,
    TeamEpisode,
    TeamShape,
)
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.team_rewards import Coalition, shapley
from tests.algorithms.worlds import Call, Play, world

RARE = 0.1  # how often a rollout succeeds, in `highest`
ALL = frozenset("abc")


Path = tuple[int, ...]


def binary(
    names: Sequence[str],
    outcome: Callable[[Path], float],
    shown: Callable[[Path], object],
    calls: int = 4,
    size: int = 2,
) -> list[torch.Tensor]:
    """For each preset the estimates [groups, logits] of the gradient by all groups of two rollouts.
    shown: what a call sees after these actions, each of which is 0 or 1 at random."""
    paths = list(product((0, 1), repeat=calls))
    groups = list(product(paths, repeat=size))
    batch = world(
        *(
            Play(
                [Call(shown(path[:n]), node=f"{number} {path[: n + 1]}") for n in range(calls)],
                outcome=outcome(path),
                group=number,
            )
            for number, group in enumerate(groups)
            for path in group
        )
    )
    places = {path[:n]: 0 for n in range(calls) for path in paths}  # a logit each
    places = {place: number for number, place in enumerate(places)}
    made = [(path[:n], path[n]) for group in groups for path in group for n in range(calls)]
    batch = replace(batch, transition_action=torch.tensor([action for _, action in made]))
    cell = torch.tensor([places[place] for place, _ in made]) + batch.token_group * len(places)
    score = (torch.tensor([action for _, action in made]).double() - 0.5) / size
    found = []
    for name in names:
        flat = torch.zeros(len(groups) * len(places), dtype=torch.float64)
        flat.index_add_(0, cell, score * make(name, {}).credit(batch))
        found.append(flat.view(len(groups), -1))
    return found


def alike(preset: str) -> dict[str, float]:
    """Four calls, each 0 or 1 at random, that see the same whatever was done before; the outcome is
    1 where two of them did 1. How much of the exact gradient there is, and the variance of that
    scaled back to the whole, against that of `rloo`."""
    exact, ours = binary(["rloo", preset], lambda path: float(sum(path) >= 2), len)
    truth, mean = exact.mean(0), ours.mean(0)
    share = float(mean @ truth / (truth @ truth))
    ratio = float(ours.var(0, correction=0).sum() / exact.var(0, correction=0).sum())
    return {"gradient": share, "variance": ratio / share**2}


def shared() -> float:
    """Shapley's gradient of role a over that of the outcome. Any of three roles alone brings the
    team to 1 by acting, and so do b and c together; where all three act, to 0.6. The others act 9
    times in 10; without its answer a role does not act."""

    def value(coalition: Coalition) -> float:
        return 0.6 if coalition == ALL else float(bool(coalition))

    def played(acting: frozenset[str]) -> float:
        return shapley(lambda coalition: value(coalition & acting), ALL)["a"]

    of_shapley = of_outcome = 0.0
    for b, c in product((False, True), repeat=2):
        chance = (0.9 if b else 0.1) * (0.9 if c else 0.1)
        others = frozenset("b" * b + "c" * c)
        acts = others | {"a"}
        of_shapley += chance * (played(acts) - played(others))
        of_outcome += chance * (value(acts) - value(others))
    return of_shapley / of_outcome


def highest() -> dict[str, float]:
    """What is left of the gradient with the group's highest return as baseline. rare: four rollouts
    that succeed one time in ten. risk: of two rollouts each is worth 0.55 for certain, or 1 six
    times in ten, one as likely as the other."""
    coin = [(1, 1.0, RARE), (0, 0.0, 1 - RARE)]
    risk = [(1, 1.0, 0.3), (1, 0.0, 0.2), (0, 0.55, 0.5)]
    return {"rare": of_exact(coin, 4), "risk": of_exact(risk, 2)}


def of_exact(results: Sequence[tuple[int, float, float]], size: int) -> float:
    """results: (action, return, probability) of one rollout."""
    often = sum(p for action, _, p in results if action)
    credit = make("magrpo", {"baseline": "max"}).credit
    found = 0.0
    for group in product(results, repeat=size):
        batch = world(*(Play([Call()], outcome=r) for _, r, _ in group))
        score = sum(
            a * (action - often)
            for a, (action, _, _) in zip(credit(batch).tolist(), group, strict=True)
        )
        found += prod(p for _, _, p in group) * score / size
    return found / sum(p * r * (action - often) for action, r, p in results)


PAYS = [[8.0, -12.0, -12.0], [-12.0, 0.0, 0.0], [-12.0, 0.0, 0.0]]


def summed() -> dict[str, float]:
    """What either role is told of its first action where the other did that too, in QTRAN's game
    (arXiv 1905.05408) at equal chances: by the payoffs, and by the sum of one utility of each role
    that is nearest to them, VDN's."""
    pays = torch.tensor(PAYS, dtype=torch.float64)
    alone = pays.mean(1, keepdim=True) - pays.mean() / 2
    told = {"exact": pays, "vdn": alone + alone.T}
    return {name: float(q[0, 0] - q[0].mean()) for name, q in told.items()}


def learned(kind: CriticKind) -> float:
    """The same by a critic that learns from every joint action."""
    one = torch.ones(1, 2, 1), torch.ones(1, 1)
    played = [
        TeamEpisode(*one, torch.tensor([[a, b]]), torch.tensor([pay]))
        for a, row in enumerate(PAYS)
        for b, pay in enumerate(row)
    ]
    critic = TeamCritic(kind, TeamShape(2, 1, 3, 1), CriticTraining(updates=100, lr=0.02)).learned(
        played
    )
    return critic.advantages(played)[0, 0, 1].item()


def limits() -> Iterator[tuple[str, str]]:
    """Name and figures, as the page writes them."""
    top, team = highest(), summed()
    for name in ("peers", "batch-td"):
        seen = alike(name)
        yield (
            f"`{name}`",
            f"{seen['gradient']:.2f} of the gradient, {seen['variance']:.1f} times the noise",
        )
    yield "`shapley`", f"{shared():+.1f} times the gradient"
    yield "`magrpo`, `max`, rare", f"{top['rare']:.2f} of the gradient"
    yield "`magrpo`, `max`, risk", f"{top['risk']:+.1f} times the gradient"
    yield "`coma`, `vdn`", f"{team['vdn']:+.1f} for {team['exact']:+.1f}"
