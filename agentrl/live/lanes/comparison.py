"""Whether a candidate's sessions go better than those of the serving version, valid at any time.

Every session is drawn for the candidate with a known probability p, so

    x = (y - m) / p  if the candidate served it,  -(y - m) / (1 - p)  if not

with any centre m that follows from earlier sessions has the mean d = E[y | candidate] -
E[y | serving], given all that happened before (inverse propensity weights; m only lowers the
variance). Somebody who bets a fraction of a capital of 1 on "the difference is larger than d0",

    capital_t = prod_s (1 + lambda_s (x_s - d0)),   lambda_s >= 0 known before session s,

cannot expect to gain if d <= d0: the capital is a supermartingale, and the probability that it
*ever* reaches 1 / a is at most a (Ville). The values d0 against which it was not reached are the
interval. So one may look after every session, stop when one likes, and go on; the base rate may
drift, and sessions may depend on earlier ones.

Waudby-Smith and Ramdas, arXiv 2010.09686 (betting; predictable bets); Waudby-Smith, Wu, Ramdas,
Karampatziakis and Mineiro, arXiv 2210.10768 (propensity weights). Bets are those that grow fastest
for a few sizes of the difference, averaged with fixed weights (`EFFECTS`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
EFFECTS = np.array([[0.05], [0.1], [0.2], [0.4]])  # differences that are bet on
WEIGHTS = np.log([[0.2], [0.5], [0.2], [0.1]])  # of the capital; most on ten points
BOLDEST = 0.5  # largest part of the capital that one session can lose
VARIANCE, COUNTED = (
    0.25,
    5.0,
)  # an outcome's variance before it is known, and its weight in sessions
HALVINGS = 12  # of the range in which an end of the interval lies, to 0.0005
FRACTIONS = np.array([[0.05], [0.15], [0.4], [0.8]])  # of the capital, bet on a rate above a limit


class Counted(NamedTuple):
    """A session that counts."""

    candidate: bool  # whether the candidate served it
    outcome: float  # 0 to 1; others are clipped, a missing one (NaN) does not count
    share: float  # the probability with which it was drawn for the candidate, in (0, 1)


class Difference(NamedTuple):
    """Candidate minus serving. NaN: not known."""

    low: float  # with probability 1 - alpha it lies between the two at all times at once
    high: float
    candidate: float  # mean outcomes
    serving: float
    sessions: tuple[int, int]  # of candidate and serving with a known outcome
    clipped: int  # outcomes outside of 0 to 1


class _Bets(NamedTuple):
    x: Array  # [n] see above
    variance: Array  # [n] of x, by earlier sessions
    loss: Array  # [n] largest -x that is possible


def difference(sessions: Sequence[Counted], alpha: float) -> Difference:
    """Compare the sessions in the order in which they became known. Each end is wrong, ever, with
    a probability of at most alpha / 2. Raises ValueError for a share of 0 or 1."""
    known = [one for one in sessions if not math.isnan(one.outcome)]
    if not known:
        return Difference(-1.0, 1.0, math.nan, math.nan, (0, 0), 0)
    candidate, given, share = (np.array(column) for column in zip(*known, strict=True))
    if share.min() <= 0 or share.max() >= 1:
        raise ValueError("a session that could only be drawn for one version compares nothing")
    outcome = np.clip(given, 0.0, 1.0)
    up, down = _bets(candidate, outcome, share)
    line = math.log(2 / alpha)
    return Difference(
        _highest_refuted(up, line),
        -_highest_refuted(down, line),
        _mean(outcome[candidate]),
        _mean(outcome[~candidate]),
        (int(candidate.sum()), int((~candidate).sum())),
        int((outcome != given).sum()),
    )


def exceeds(values: Sequence[float], limit: float, alpha: float) -> int | None:
    """The number of values, in order, after which their mean is shown to be above the limit; None:
    it is not. `values`: 0 to 1. For a mean of at most `limit`, given earlier ones, it is ever
    shown with a probability of at most alpha."""
    if not len(values) or limit >= 1:
        return None
    bet = FRACTIONS / max(limit, 1e-3)
    gains = np.cumsum(np.log1p(bet * (np.clip(values, 0.0, 1.0) - limit)), axis=1)
    capital = np.logaddexp.reduce(gains, axis=0) - math.log(len(FRACTIONS))
    reached = np.flatnonzero(capital >= math.log(1 / alpha))
    return int(reached[0]) + 1 if reached.size else None


def refuted(sessions: tuple[Array, Array, Array], null: float, alpha: float) -> int | None:
    """The number of sessions after which "the difference is at most `null`" is refuted, if ever.
    sessions: the columns of `Counted`, [n] each, without missing outcomes."""
    up, _ = _bets(*sessions)
    reached = np.flatnonzero(_capital(up, null) >= math.log(1 / alpha))
    return int(reached[0]) + 1 if reached.size else None


def _bets(candidate: Array, outcome: Array, share: Array) -> tuple[_Bets, _Bets]:
    """The bets on a difference above, and on one below."""
    ours, theirs = (_so_far(outcome, lane, 0.5, 1.0) for lane in (candidate, ~candidate))
    centre = (1 - share) * ours + share * theirs
    x = np.where(candidate, 1 / share, -1 / (1 - share)) * (outcome - centre)
    square = (outcome - centre) ** 2
    ours, theirs = (_so_far(square, lane, VARIANCE, COUNTED) for lane in (candidate, ~candidate))
    variance = ours / share + theirs / (1 - share)
    worst = np.maximum(centre / share, (1 - centre) / (1 - share))
    best = np.maximum((1 - centre) / share, centre / (1 - share))
    return _Bets(x, variance, worst), _Bets(-x, variance, best)


def _so_far(values: Array, counted: Array, first: float, weight: float) -> Array:
    """[n] -> [n] means of the counted ones of the earlier values, with `first` as `weight` more."""
    total, number = np.cumsum(np.where(counted, values, 0.0)), np.cumsum(counted)
    before = [np.concatenate(([0.0], row[:-1])) for row in (total, number)]
    result: Array = (first * weight + before[0]) / (weight + before[1])
    return result


def _capital(bets: _Bets, null: float) -> Array:
    """[n] log of the capital after each session of those who bet against `null`, -1 to 1."""
    size = np.minimum(EFFECTS / bets.variance, BOLDEST / (bets.loss + 1))
    capital: Array = np.logaddexp.reduce(
        WEIGHTS + np.cumsum(np.log1p(size * (bets.x - null)), axis=1), axis=0
    )
    return capital


def _highest_refuted(bets: _Bets, line: float) -> float:
    """The largest difference that is refuted: against which the capital ever reached the line; -1:
    none. Zero is one of those that are tried."""
    low, high = -1.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        reached = _capital(bets, middle).max() >= line  # falls with the difference
        low, high = (middle, high) if reached else (low, middle)
    return low


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else math.nan
