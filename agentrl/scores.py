"""Scores in words: a percentage where they lie in 0 to 1, decided once for a run, else a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite, isnan

ROUNDING, SMALL = 1e-9, 0.0005
SCORES = ("eval/score", "eval/sampled")
MISSING = tuple(f"{name}_missing" for name in SCORES)  # metrics: rollouts without a score
REWARDS = {"reward/mean", "reward/std"}


def decisive(names: Iterable[str]) -> list[str]:
    """The metrics that decide whether a run's scores are percentages, of these."""
    return [
        name
        for name in names
        if name in REWARDS or (name.startswith(SCORES) and not name.endswith("_missing"))
    ]


def missing_text(missing: float) -> str:
    """What follows a score that rollouts are not part of, since they have none; else empty."""
    return f", {missing:.0f} rollout{'s' * (missing != 1)} without a score" if missing else ""


def are_shares(rows: Iterable[Mapping[str, float]], outcomes: Iterable[float] = ()) -> bool:
    """Whether outcomes may be shown as percentages. `rows`: the metrics of steps. All scores,
    bounds and known outcomes are from 0 to 1, and no training reward has a larger deviation than
    such numbers can have, as returns of -1 and 1 do."""
    known = list(filter(isfinite, outcomes))
    spread = []  # (mean, variance)
    for row in rows:
        known += [row[name] for name in decisive(row) if name not in REWARDS]
        spread.append((row.get("reward/mean", 0.0), row.get("reward/std", 0.0) ** 2))
    return all(-ROUNDING <= x <= 1.0 + ROUNDING for x in known if isfinite(x)) and all(
        -ROUNDING <= mean <= 1.0 + ROUNDING and variance <= mean * (1.0 - mean) + ROUNDING
        for mean, variance in spread
        if isfinite(mean)
    )


def score_text(value: float, share: bool, form: str = ".3f") -> str:
    """A score of a run whose scores are shares, or not (then in this form); a dash if missing."""
    if isnan(value):
        return "-"
    if share and 0.0 < abs(value) < SMALL:
        return f"{100 * value:.1g}%"  # not 0.0%, as if nothing had been reached
    return format(value, ".1%" if share else form)


def gain_text(value: float, share: bool) -> str:
    """A difference of two scores, with its sign."""
    return f"{value * 100:+.1f} points" if share else f"{value:+.3f}"
