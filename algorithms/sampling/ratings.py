"""Ratings of players: Elo, win rates, priorities of opponents.

A score is the result of a game for one player: 1 won, 0.5 drawn, 0 lost. All functions are pure;
`selfplay` keeps the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, log10
from statistics import fmean
from typing import Literal

Priority = Literal["hard", "variance"]

SCALE = 400.0  # a player so many points ahead has ten times the odds
PRIOR = 1.0  # wins and losses that a Beta(1, 1) prior adds to what was seen
ROUNDS, CLOSE = 10_000, 1e-9  # of a fit: at most, and the change of log-odds that ends it


def expected(rating: float, other: float) -> float:
    """The expected score of a player of `rating` against the other, in (0, 1). Elo."""
    return float(1 / (1 + 10 ** ((other - rating) / SCALE)))


def elo(rating: float, other: float, score: float, k: float) -> float:
    """The rating after one game; the other player loses what this one gains. k: the largest
    possible change."""
    return rating + k * (score - expected(rating, other))


def win_rate(score: float, games: float) -> float:
    """The mean score of `games` games with `score` in total, one win and one loss added: 0.5
    without games, never 0 or 1."""
    return (score + PRIOR) / (games + 2 * PRIOR)


def priorities(rates: Sequence[float], kind: Priority, power: float = 2.0) -> list[float]:
    """The share of games to play against each opponent, given the own win rates x against them:
    (1 - x)^power, those that are hardest to beat, or x (1 - x), those of one's own strength.

    All the same where every weight is 0. Prioritised fictitious self-play, AlphaStar 2019."""
    weights = [(1 - x) ** power if kind == "hard" else x * (1 - x) for x in rates]
    total = sum(weights)
    return [weight / total if total else 1 / len(weights) for weight in weights]


def fit_ratings(
    scores: Sequence[Sequence[float]], games: Sequence[Sequence[float]], prior: float = PRIOR
) -> list[float]:
    """The Elo ratings, of mean 0, under which results are likeliest: `scores[i][j]` is what i got
    in total out of `games[i][j]` games with j, so that each game is counted on both sides.

    Bradley-Terry by minorisation-maximisation (Hunter 2004, The Annals of Statistics 32). prior:
    wins, and as many losses, that are added to every pair that met, without which a player who
    never lost would be infinitely strong. Players of whom no chain of games leads from one to the
    other have ratings that say nothing about each other."""
    players = range(len(scores))
    met = [[n + 2 * prior if n else 0.0 for n in row] for row in games]
    won = [sum(scores[i][j] + prior for j in players if games[i][j]) for i in players]
    strength = [1.0] * len(scores)
    for _ in range(ROUNDS):
        before = strength
        shares = [
            sum(met[i][j] / (before[i] + before[j]) for j in players if met[i][j]) for i in players
        ]
        strength = [won[i] / shares[i] if shares[i] else 1.0 for i in players]
        scale = exp(fmean(map(log, strength)))
        strength = [value / scale for value in strength]
        if max(abs(log(a / b)) for a, b in zip(strength, before, strict=True)) < CLOSE:
            break
    return [SCALE * log10(value) for value in strength]
