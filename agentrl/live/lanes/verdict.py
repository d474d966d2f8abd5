"""What a comparison means for a candidate, and what users are told about it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentrl.config.live import PromotionConfig
from agentrl.live.lanes.comparison import Difference
from agentrl.live.lanes.served import ServedSession
from agentrl.live.records.documents import Compared, EventKind, HeldOutScore, Lanes, points
from agentrl.scores import missing_text

Scored = HeldOutScore | None  # None: not known


def verdict(
    settings: PromotionConfig, found: Difference, scores: tuple[Scored, Scored] | None = None
) -> tuple[EventKind, bool, str] | None:
    """What happens to a candidate, whether because it is worse, and why; None: nothing yet.
    scores: of candidate and serving version; None if there are no held-out tasks."""
    ours, least = found.sessions[0], settings.least
    margin = settings.margin if settings.rule == "not_worse" else 0.0
    scored = scores is None or all(one is not None and one.score is not None for one in scores)
    failed = next((one.failed for one in scores or () if one is not None and one.failed), "")
    if why := held_out_worse(*scores or (None, None)):
        return "dropped", True, why
    if found.high <= -margin:
        return "dropped", True, f"its sessions are worse: {in_points(found)}"
    if ours >= settings.most and failed and settings.rule != "never":
        return "dropped", False, f"after {ours} sessions there is no held-out score: {failed}"
    if settings.rule == "always":
        return ("promoted", False, 'live.promotion.rule = "always"') if scored else None
    shown = settings.rule in ("better", "not_worse") and found.low >= -margin and ours >= least
    if shown and scored:
        said = "are better" if found.low >= 0 else f"are not worse by {points(margin)} points"
        return "promoted", False, f"its sessions {said}: {in_points(found)}"
    if ours >= settings.most and not shown:
        return "dropped", False, f"{ours} sessions did not decide: {in_points(found)}"
    return None


def held_out_worse(ours: Scored, theirs: Scored) -> str:
    """A sentence if the interval of the candidate's held-out score is below that of the other."""
    if ours is None or theirs is None or ours.high is None or theirs.low is None:
        return ""
    if ours.high >= theirs.low:
        return ""
    return (
        f"it solves fewer held-out tasks: {ours.score:.0%}{missing_text(ours.missing)} (at most "
        f"{ours.high:.0%}) against {theirs.score:.0%}{missing_text(theirs.missing)}"
    )


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
    scores: tuple[Scored, Scored],
    now: float,
) -> Compared:
    """What users see of a comparison. scores: of candidate and serving version."""
    assert lanes.candidate is not None
    ours = [one for one in sessions if one.version == lanes.candidate]
    theirs = [one for one in sessions if one.version == lanes.serving]
    names = sorted({name for one in sessions for name in one.signals})
    return Compared(
        version=lanes.candidate, serving=lanes.serving, time=now, sessions=found.sessions,
        low=found.low, high=found.high, clipped=found.clipped,
        means=(_known(found.candidate), _known(found.serving)),
        signals={name: (_mean(name, ours), _mean(name, theirs)) for name in names},
        held_out=(_score(scores[0]), _score(scores[1])),
        missing=(_missing(scores[0]), _missing(scores[1])),
    )  # fmt: skip


def _mean(signal: str, sessions: Sequence[ServedSession]) -> float | None:
    values = [one.signals[signal] for one in sessions if signal in one.signals]
    return sum(values) / len(values) if values else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _missing(found: Scored) -> int:
    return 0 if found is None else found.missing


def _score(found: Scored) -> float | None:
    return None if found is None else found.score
