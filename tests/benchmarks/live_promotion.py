"""How often a candidate is promoted that is not better, or not promoted that is: simulated.

200 candidates per cell, each with sessions that are drawn as a gateway draws them and
looked at after every one, up to 400 sessions of the candidate (with `live.share` = 0.1 the serving
version has nine times as many beside them, with 0.5 as many). A cell is named by share, kind of
outcome (0 or 1, graded, or 0 or 1 with a base rate that drifts by 40 points), base rate and how
much better the candidate is: `promoted <cell>` is the share of the 200 that is promoted by
`live.promotion` as it is by default, `worse <cell>` the share that is dropped as worse, `sessions
<cell>` the median of the candidate's sessions at a promotion. `in all`: 400 sessions of both
together, where a single look at the end, with an error of 2.5 %, would find about half of those
with outcomes of 0 or 1 and a base rate of 0.5. `promotion_errors`: the largest `promoted` of a cell
without a difference; `promotion_power`: the smallest of one with `live.share` = 0.1 and ten points.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

from agentrl.core.config.live import MIN_SESSIONS, PromotionConfig
from agentrl.live.served import refuted
from tests.agentrl.live.promotion.drawn import Array, drawn

CANDIDATES, MAX_SESSIONS = 200, 400
ALPHA = PromotionConfig().alpha
BASES, SHARES = (0.3, 0.5, 0.8), (0.1, 0.5)
Columns = tuple[Array, Array, Array]


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for share in SHARES:
        for kind in ("0/1", "graded", "drifts"):
            for base in BASES if kind != "drifts" else (0.5,):
                for better in (0.0, 0.1):
                    _cell(found, f"{share} {kind} {base} +{better}", share, kind, base, better)
    for kind in ("0/1", "graded"):
        for base in BASES:
            for better in (0.0, 0.1):
                _cell(
                    found, f"in all {kind} {base} +{better}", 0.5, kind, base, better, MAX_SESSIONS
                )
    equal = [found[key] for key in found if key.startswith("promoted") and key.endswith("+0.0")]
    best = [found[key] for key in found if key.startswith("promoted 0.1") and key.endswith("+0.1")]
    return {"promotion_errors": max(equal), "promotion_power": min(best)} | found


def _cell(
    found: dict[str, Any],
    name: str,
    share: float,
    kind: str,
    base: float,
    better: float,
    most: int | None = None,
) -> None:
    success: Any = (lambda t: base + 0.2 * np.sin(t / 300)) if kind == "drifts" else base
    ends = []
    for seed in range(CANDIDATES):
        rng = np.random.default_rng([seed, len(name), int(100 * base), int(100 * better)])
        given: Any = {"share": share, "base": success, "better": better, "graded": kind == "graded"}
        lanes, outcome, shares = drawn(rng, MAX_SESSIONS, **given)
        ends.append(decided((lanes[:most], outcome[:most], shares[:most])))
    up = [sessions for what, sessions in ends if what == "promoted"]
    found[f"promoted {name}"] = len(up) / CANDIDATES
    found[f"worse {name}"] = sum(what == "dropped" for what, _ in ends) / CANDIDATES
    found[f"sessions {name}"] = median(up) if up else None


def decided(columns: Columns) -> tuple[str, int]:
    """What the first of two bets to be won decides, and after how many of the candidate's sessions;
    as `verdict.verdict` after every session."""
    lanes, outcome, shares = columns
    up = refuted(columns, 0.0, ALPHA / 2)
    down = refuted((~lanes, outcome, 1 - shares), 0.0, ALPHA / 2)  # serving minus candidate
    if up is None and down is None:
        return "", int(lanes.sum())
    if down is None or (up is not None and up < down):
        return "promoted", max(int(lanes[:up].sum()), MIN_SESSIONS)
    return "dropped", int(lanes[:down].sum())
