"""Credit in hindsight by hand."""

from __future__ import annotations

import math

from agentrl.algorithms.credit.calls import CallRewards
from agentrl.algorithms.presets.process import HindsightReturns
from tests.algorithms.credit.test_calls import near
from tests.algorithms.worlds import Call, Play, world


def test_hindsight() -> None:
    """D14: the second call looks less probable in hindsight, .7 of the mean, which counts .8."""
    looks = [math.log(1.3) * 5, math.log(0.7) * 5]
    calls = [Call(rewards={"h": look}) for look in looks]
    batch = world(Play(calls, outcome=1.0))
    near(HindsightReturns(CallRewards("transition:h"), gamma=0.5)(batch), [0.5 * 1.2, 0.8])
    lost = world(Play([*calls, Call()], outcome=1.0))
    near(HindsightReturns(CallRewards("transition:h"), gamma=1.0)(lost), [1.2, 0.8, 1.0])
