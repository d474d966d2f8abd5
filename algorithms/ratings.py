"""Ratings of players: Elo, win rates, priorities of opponents, and how console and report show
them.

A score is the result of a game for one player: 1 won, 0.5 drawn, 0 lost. All functions are pure;
`selfplay.OpponentPool` keeps the state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import exp, isfinite, log, log10
from statistics import fmean

from rich.table import Table

from agentrl.core.types import Rollout, RolloutState, Scope, StepRow, step_number

SCALE = 400.0  # Elo points for odds of ten to one
PRIOR = 1.0  # wins and losses that a Beta(1, 1) prior adds
MAX_ITERATIONS, MIN_CHANGE = (
    10_000,
    1e-9,
)  # maximum iterations of a fit, and the change of log-odds that ends it


def returns(rollout: Rollout, roles: Sequence[str]) -> dict[str, float] | None:
    """The return of each role; None if the game failed or a return is missing."""
    by_role = {
        row.target: row.value
        for row in rollout.rewards
        if row.scope is Scope.ROLE and row.name == "outcome" and row.target and isfinite(row.value)
    }
    complete = rollout.state is RolloutState.SUCCEEDED and by_role.keys() >= set(roles)
    return by_role if complete else None


def game_score(by_role: Mapping[str, float], role: str, roles: Sequence[str]) -> float:
    """1 if a role's return is above the mean of the other roles' returns, 1/2 if equal, else 0.
    Also meaningful in general-sum games."""
    mean_of_others = fmean(by_role[other] for other in roles if other != role)
    return (1 + (by_role[role] > mean_of_others) - (by_role[role] < mean_of_others)) / 2


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


def priorities(rates: Sequence[float], power: float = 2.0) -> list[float]:
    """The probability of each opponent, by the win rate x against it: proportional to
    (1 - x)^power; uniform if all of these are 0.

    Prioritised fictitious self-play, AlphaStar 2019."""
    weights = [(1 - x) ** power for x in rates]
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
    for _ in range(MAX_ITERATIONS):
        before = strength
        expected_wins = [
            sum(met[i][j] / (before[i] + before[j]) for j in players if met[i][j]) for i in players
        ]
        strength = [won[i] / x if (x := expected_wins[i]) else 1.0 for i in players]
        scale = exp(fmean(map(log, strength)))
        strength = [value / scale for value in strength]
        if max(abs(log(a / b)) for a, b in zip(strength, before, strict=True)) < MIN_CHANGE:
            break
    return [SCALE * log10(value) for value in strength]


WIN_RATE, ELO, FIRST = "selfplay/win_rate/", "selfplay/elo/", "@000000"
RETURN = "reward/role:outcome/"  # return of a seat
SEAT = re.compile(rf"{RETURN}(.+)/mean")


def game_figures(metrics: Mapping[str, float]) -> dict[str, str]:
    """Label -> text about the games of a step: mean return of each seat with its standard
    deviation, calls and illegal moves per game, and win rates against the first policy and the
    whole pool. Empty without self-play."""
    if "selfplay/games" not in metrics:
        return {}
    seats = sorted(seat[1] for name in metrics if (seat := SEAT.fullmatch(name)))
    figures = {
        seat: f"{metrics[f'{RETURN}{seat}/mean']:.3f} ± {metrics[f'{RETURN}{seat}/std']:.3f}"
        for seat in seats
    }
    figures["calls a game"] = f"{metrics.get('calls', 0.0) / max(metrics['rollouts'], 1.0):.1f}"
    if (invalid := metrics.get("reward/role:invalid/mean")) is not None:
        figures["illegal moves"] = f"{abs(invalid) * len(seats):.2f}"
    first = [x for name, x in metrics.items() if name.startswith(WIN_RATE) and FIRST in name]
    pool = [metrics[name] for name in ("selfplay/win_rate",) if name in metrics]
    win_rates = {"against the first": first, "against the pool": pool}
    return figures | {label: f"{x:.0%}" for label, values in win_rates.items() for x in values}


def win_rate_table(steps: Sequence[StepRow]) -> Table | None:
    """A table of the win rates of each snapshot of a self-play pool (row) against the others
    (column), estimated when the snapshot was taken, and of final Elo ratings; None without a
    pool."""
    by_step = {step_number(row.step): row.metrics for row in steps if row.committed}
    last = by_step[max(by_step)] if by_step else {}
    pool = {_snapshot_step(key): last[key] for key in sorted(last) if key.startswith(ELO)}
    if not pool:
        return None
    columns = (f"@{taken}" for taken in pool)
    table = Table("", title="win rate of the row against the column", title_justify="left")
    for column in (*columns, "Elo"):
        table.add_column(column, justify="right")
    for taken, rating in pool.items():
        table.add_row(f"@{taken}", *_rates(by_step.get(taken, {}), pool), f"{rating:.0f}")
    table.add_row("final", *_rates(last, pool), f"{last['selfplay/elo']:.0f}")
    return table


def _rates(metrics: dict[str, float], columns: dict[int, float]) -> list[str]:
    rates = {
        _snapshot_step(key): value for key, value in metrics.items() if key.startswith(WIN_RATE)
    }
    return [f"{rates[taken]:.0%}" if taken in rates else "" for taken in columns]


def _snapshot_step(key: str) -> int:
    """The number of steps after which a metric's snapshot was taken."""
    return int(key.rpartition("@")[2])
