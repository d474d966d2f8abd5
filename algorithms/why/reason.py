"""What a rule returns, and the shares of a run from which it counts."""

from __future__ import annotations

from dataclasses import dataclass

# Least shares to report a reason, and to rank it by the order of the rules.
REPORTED_SHARE, RANKED_SHARE = 0.2, 0.5


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why a policy does not learn. share: the affected share of the run, 0 to 1."""

    share: float
    text: str  # with the evidence
    change: str  # settings, and how to change them
    example: str = ""  # id of a rollout that shows it


NO_REASON = Reason(0.0, "", "")
