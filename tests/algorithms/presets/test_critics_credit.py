"""Critics of calls, against naive credit and published losses."""

from __future__ import annotations

from tests.algorithms.naive import naive_bi_level
from tests.algorithms.presets.plays import GAE, Case, Plays, checked, gae, tokens, white


def ragen(plays: Plays, values: list[float]) -> list[float]:
    return white(naive_bi_level(plays, values, "outcome"), 1e-8)


CASES: dict[str, Case] = {
    "agent-r1": (tokens(gae), "token", "rows", GAE),
    "pspo": (tokens(gae), "row", "rows", GAE),
    "reinforce+step-gae": (
        tokens(gae), "none", "sums",
        {"step_value": "transition:v", "step_gamma": 0.9, "step_lam": 0.8},
    ),
    "ragen": (ragen, "token", "tokens", {"gamma_high": 0.9, "gamma": 0.7, "lam": 0.8}),
}  # fmt: skip


test_its_loss_is_the_published_one = checked(CASES)
