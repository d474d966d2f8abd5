"""Credit in hindsight, against naive credit and published losses."""

from __future__ import annotations

from tests.algorithms.naive import naive_hindsight
from tests.algorithms.presets.plays import Case, Plays, calls, checked, outcome, tokens, total
from tests.algorithms.worlds import NAN


def hindsight(plays: Plays, gamma: float, weight: float) -> list[float]:
    host, q = outcome(plays, True), naive_hindsight(plays, gamma)
    corrections = calls(plays, q, lambda play, i: play.group)
    masked = [
        NAN if a != a or h != h else a if a >= 0 or h < 0 else 0.0
        for a, h in zip(corrections, host, strict=True)
    ]
    return total((host, 1), (masked, weight))


CASES: dict[str, Case] = {
    "hcapo": (
        tokens(lambda plays: hindsight(plays, 0.95, 1.0)), "token", "rows",
        {"hindsight_reward": "transition:w"},
    ),
    "gspo+hcapo": (
        tokens(lambda plays: hindsight(plays, 0.9, 0.5)), "row", "rows",
        {"hcapo_reward": "transition:w", "hcapo_gamma": 0.9, "hcapo_weight": 0.5},
    ),
}  # fmt: skip


test_its_loss_is_the_published_one = checked(CASES)
