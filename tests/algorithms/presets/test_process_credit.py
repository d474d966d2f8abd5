"""Process rewards, against naive credit and published losses."""

from __future__ import annotations

from statistics import fmean

from tests.algorithms.naive import returns, rewards_of
from tests.algorithms.presets.plays import (
    Case,
    Plays,
    calls,
    checked,
    copied,
    outcome,
    process,
    tokens,
    total,
    white,
)


def prime(plays: Plays) -> list[float]:
    loo = []
    for play in plays:
        others = [
            o.outcome
            for o in plays
            if o is not play and o.group == play.group and o.outcome == o.outcome
        ]
        centred = play.outcome - fmean(others) if others else 0.0 * play.outcome
        loo.append(0.0 if abs(centred) < 1e-9 else centred)
    steps: list[float] = []
    for play in plays:
        means = []
        for other in plays:
            known = [r for r in rewards_of(other, "p") if r == r]
            if other is not play and other.group == play.group and known:
                means.append(fmean(known))
        own = rewards_of(play, "p")
        alone = not means or all(r != r for r in own)
        steps += returns([0.0 * r if alone else r - fmean(means) for r in own], 1.0)
    return total((copied(loo, plays), 1), (steps, 1))


def whole_prime(plays: Plays, values: list[float]) -> list[float]:
    return white(tokens(prime)(plays, values), 1e-8)


CASES: dict[str, Case] = {
    "prime": (whole_prime, "token", "tokens", {"process": "p"}),
    "istar": (
        tokens(lambda plays: total(
            (outcome(plays, True), 1),
            (calls(plays, process(plays), lambda play, i: play.group), 0.5),
        )),
        "token", "rows", {"process": "transition:p", "weight": 0.5},
    ),
}  # fmt: skip


test_its_loss_is_the_published_one = checked(CASES)
