"""Credit of demonstrations and of what a policy was told, against published losses."""

from __future__ import annotations

from tests.algorithms.presets.plays import Case, Plays, checked, outcome, tokens, total


def of_calls(plays: Plays, limit: float) -> list[float]:
    found = [call.rewards["w"] for play in plays for call in play.calls]
    return [x if x != x else max(-limit, min(limit, x)) for x in found]


CASES: dict[str, Case] = {
    "grpo+corrections": (
        tokens(lambda plays: total((outcome(plays, True), 1), (of_calls(plays, 9e9), 0.5))),
        "token", "rows", {"corrections_reward": "transition:w", "corrections_weight": 0.5},
    ),
    "grpo+self-distill": (
        tokens(lambda plays: total((outcome(plays, True), 1), (of_calls(plays, 0.4), 2.0))),
        "token", "rows",
        {"self_distill_reward": "transition:w", "self_distill_beta": 2.0,
         "self_distill_limit": 0.4},
    ),
}  # fmt: skip


test_its_loss_is_the_published_one = checked(CASES)
