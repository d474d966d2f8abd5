"""What the rollouts of an evaluation come to."""

from __future__ import annotations

from math import nan

from agentrl.algorithms.sampling.evaluate import score_metrics
from agentrl.types import Purpose, Reward, Rollout, Scope
from tests import factories


def played(outcome: float, **roles: float) -> Rollout:
    """With an outcome of its own for each role; NaN: the rollout has none."""
    rewards = [Reward(value=x, scope=Scope.ROLE, target=role) for role, x in roles.items()]
    rewards.append(Reward(value=-9.0, name="invalid", scope=Scope.ROLE, target="first"))
    return factories.rollout(
        "g/0",
        task={"input": "x"},
        purpose=Purpose.EVAL,
        attempt="a",
        rewards=rewards + ([Reward(value=outcome)] if outcome == outcome else []),
    )


def test_the_mean_of_all_and_of_each_role_of_what_is_known() -> None:
    rows = [played(1.0, first=2.0, second=0.0), played(0.5, first=1.0), played(nan)]
    assert score_metrics("score", rows) == {
        "score": 0.75, "score/first": 1.5, "score/second": 0.0, "score_missing": 1.0,
    }  # fmt: skip
    assert score_metrics("sampled", [played(nan)]) == {"sampled_missing": 1.0}
