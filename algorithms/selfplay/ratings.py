"""Ratings of players: Elo, win rates, priorities of opponents.

A score is the result of a game for one player: 1 won, 0.5 drawn, 0 lost. All functions are pure;
`pool` keeps the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, isfinite, log, log10
from statistics import fmean
from typing import Literal

from agentrl.types import Rollout, RolloutState, Scope

Priority = Literal["hard", "variance"]

SCALE = 400.0  # Elo points for odds of ten to one
PRIOR = 1.0  # wins and losses that a Beta(1, 1) prior adds
MOST_ITERATIONS, LEAST_CHANGE = (
    10_000,
    1e-9,
)  # most iterations of a fit, and the change of log-odds that ends it


def returns(rollout: Rollout, roles: Sequence[str]) -> dict[str, float] | None:
    """The return of each role; None if the game failed or a return is missing."""
    found = {
        row.target: row.value
        for row in rollout.rewards
        if row.scope is Scope.ROLE and row.name == "outcome" and row.target and isfinite(row.value)
    }
    complete = rollout.state is RolloutState.SUCCEEDED and found.keys() >= set(roles)
    return found if complete else None


def game_score(got: Mapping[str, float], role: str, roles: Sequence[str]) -> float:
    """1 if a role's return is above the mean of the other roles' returns, 1/2 if equal, else 0.
    Also meaningful in general-sum games."""
    rest = fmean(got[other] for other in roles if other != role)
    return (1 + (got[role] > rest) - (got[role] < rest)) / 2


def expected(rating: float, other: float) -> float:
    """The expected score of a player with `rating` against `other` by Elo, in (0, 1)."""
    return float(1 / (1 + 10 ** ((other - rating) / SCALE)))


def elo(rating: float, other: float, score: float, k: float) -> float:
    """The Elo rating after one game. k: the largest possible change."""
    return rating + k * (score - expected(rating, other))


def win_rate(score: float, games: float) -> float:
    """The smoothed mean score of `games` games with `score` in total: one win and one loss are
    added, so it is 0.5 without games and never 0 or 1."""
    return (score + PRIOR) / (games + 2 * PRIOR)


def priorities(rates: Sequence[float], kind: Priority, power: float = 2.0) -> list[float]:
    """The probability of each opponent, by the win rate x against it: proportional to
    (1 - x)^power ("hard") or x (1 - x) ("variance"); uniform if all of these are 0.

    Prioritised fictitious self-play, AlphaStar 2019."""
    weights = [(1 - x) ** power if kind == "hard" else x * (1 - x) for x in rates]
    total = sum(weights)
    return [weight / total if total else 1 / len(weights) for weight in weights]


def fit_ratings(
    scores: Sequence[Sequence[float]], games: Sequence[Sequence[float]], prior: float = PRIOR
) -> list[float]:
    """Maximum-likelihood Elo ratings with mean 0. scores[i][j]: total score of i in games[i][j]
    games against j; both sides of a game are counted.

    Bradley-Terry by minorisation-maximisation (Hunter 2004, The Annals of Statistics 32). prior:
    wins, and as many losses, added to every pair that met; without them a player who never lost
    would be infinitely strong. Ratings of players that no chain of games connects are not
    comparable."""
    players = range(len(scores))
    met = [[n + 2 * prior if n else 0.0 for n in row] for row in games]
    won = [sum(scores[i][j] + prior for j in players if games[i][j]) for i in players]
    strength = [1.0] * len(scores)
    for _ in range(MOST_ITERATIONS):
        before = strength
        expected_wins = [
            sum(met[i][j] / (before[i] + before[j]) for j in players if met[i][j]) for i in players
        ]
        strength = [won[i] / x if (x := expected_wins[i]) else 1.0 for i in players]
        scale = exp(fmean(map(log, strength)))
        strength = [value / scale for value in strength]
        if max(abs(log(a / b)) for a, b in zip(strength, before, strict=True)) < LEAST_CHANGE:
            break
    return [SCALE * log10(value) for value in strength]
