"""Presets for agents against naive credit per call and published losses under autograd."""

from __future__ import annotations

import pytest
import torch

from agentrl.algorithms.objective.core import compute_advantages
from agentrl.algorithms.presets.registry import make
from agentrl.core.config import AlgorithmConfig
from tests.algorithms.worlds import Call, Play, world


def test_peers_credits_every_call_where_no_state_is_seen_twice() -> None:
    """Also calls at turns that no other rollout reached. With a discount a call's return depends on
    how many follow, so that a short failure may be better than a long success."""
    plays = [
        Play([Call((u, i)) for i in range(n)], float(u % 2)) for u, n in enumerate((2, 9, 3, 4))
    ]
    a, discounted = (
        compute_advantages(make("peers", {"gamma": gamma}, supplies=("old",)), world(*plays))
        for gamma in (1.0, 0.5)
    )
    for u, rollout in enumerate(a.split([2, 9, 3, 4])):
        assert rollout.tolist() == pytest.approx([2 / 3 if u % 2 else -2 / 3] * len(rollout))
    _, long, *_ = discounted.split([2, 9, 3, 4])
    assert long[0].item() == pytest.approx(0.5**8 - (0 + 0 + 0.5**3) / 3)
    assert long[-1].item() == pytest.approx(1 - (0 + 0 + 1) / 3)


@pytest.mark.parametrize("several", range(5))
def test_the_default_is_grpo_where_no_state_comes_again(several: int) -> None:
    """However many of the rollouts made several calls."""
    outcomes = enumerate((1.0, 0.0, 1.0, 0.5))
    plays = [
        Play([Call((n, i)) for i in range(2 if n < several else 1)], outcome)
        for n, outcome in outcomes
    ]
    default, grpo = (
        compute_advantages(make(name, {}, supplies=("old",)), world(*plays))
        for name in (AlgorithmConfig().preset, "grpo")
    )
    assert torch.allclose(default, grpo, rtol=1e-12, atol=0)
    assert default.abs().min() > 0.1
