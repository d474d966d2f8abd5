"""What a comparison means for a candidate, and what users are told about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from agentrl.live.lanes.comparison import Difference
from agentrl.live.lanes.served import ServedSession
from agentrl.live.records.documents import Compared, EventKind, Lanes, points
from agentrl.live.records.table import PromotionConfig

SCORE = "eval/score"  # held-out metric


def verdict(
    settings: PromotionConfig, found: Difference, held_out: str = ""
) -> tuple[EventKind, bool, str] | None:
    """What happens to a candidate, whether because it is worse, and why; None: nothing yet.
    held_out: why its held-out score is worse."""
    ours, least = found.sessions[0], settings.rule != "always" and settings.least
    margin = settings.margin if settings.rule == "not_worse" else 0.0
    if held_out:
        return "dropped", True, held_out
    if found.high <= -margin:
        return "dropped", True, f"its sessions are worse: {in_points(found)}"
    if settings.rule == "always":
        return "promoted", False, 'live.promotion.rule = "always"'
    if settings.rule != "never" and found.low >= -margin and ours >= least:
        said = "are better" if found.low >= 0 else f"are not worse by {points(margin)} points"
        return "promoted", False, f"its sessions {said}: {in_points(found)}"
    if ours >= settings.most:
        return "dropped", False, f"{ours} sessions did not decide: {in_points(found)}"
    return None


def held_out_worse(candidate: Mapping[str, float], serving: Mapping[str, float]) -> str:
    """A sentence if the interval of the candidate's held-out score is below that of the other."""
    high, low = candidate.get(f"{SCORE}_high", math.nan), serving.get(f"{SCORE}_low", math.nan)
    if not high < low:
        return ""
    ours, theirs = candidate.get(SCORE, math.nan), serving.get(SCORE, math.nan)
    return f"it solves fewer held-out tasks: {ours:.0%} (at most {high:.0%}) against {theirs:.0%}"


def in_points(found: Difference) -> str:
    ours, theirs = found.sessions
    return (
        f"by {points(found.low)} to {points(found.high)} points ({found.candidate:.0%} against "
        f"{found.serving:.0%}, {ours} and {theirs} sessions)"
    )


def compared(
    lanes: Lanes,
    found: Difference,
    sessions: Sequence[ServedSession],
    scores: tuple[float | None, float | None],
    now: float,
) -> Compared:
    """What users see of a comparison. scores: held-out, of candidate and serving."""
    assert lanes.candidate is not None
    ours = [one for one in sessions if one.version == lanes.candidate]
    theirs = [one for one in sessions if one.version == lanes.serving]
    names = sorted({name for one in sessions for name in one.signals})
    return Compared(
        version=lanes.candidate, serving=lanes.serving, time=now, sessions=found.sessions,
        low=found.low, high=found.high, clipped=found.clipped,
        means=(_known(found.candidate), _known(found.serving)),
        signals={name: (_mean(name, ours), _mean(name, theirs)) for name in names},
        held_out=scores,
    )  # fmt: skip


def _mean(signal: str, sessions: Sequence[ServedSession]) -> float | None:
    values = [one.signals[signal] for one in sessions if signal in one.signals]
    return sum(values) / len(values) if values else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
