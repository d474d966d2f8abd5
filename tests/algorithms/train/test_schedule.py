from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.train.optimize import learning_rate, mean_kl, minibatches
from agentrl.core.config import AlgorithmConfig

STEPS = 5
RATES = {
    "constant, warm-up": ({"warmup": 3}, [0.25, 0.5, 0.75, 1.0, 1.0]),
    "linear": ({"schedule": "linear", "warmup": 1}, [0.5, 0.8, 0.6, 0.4, 0.2]),
    "linear to a floor": ({"schedule": "linear", "min_lr": 0.5}, [1.0, 0.9, 0.8, 0.7, 0.6]),
    "cosine": (
        {"schedule": "cosine", "min_lr": 0.2},
        [0.2 + 0.4 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)],
    ),
}


@pytest.mark.parametrize("case", RATES)
def test_learning_rates(case: str) -> None:
    settings, expected = RATES[case]
    config = AlgorithmConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    rates = [learning_rate(config, step, STEPS) for step in range(STEPS)]
    assert rates == pytest.approx(expected)


@given(st.lists(st.integers()), st.integers(1, 8), st.text())
def test_minibatches_deal_everything_once(items: list[int], count: int, seed: str) -> None:
    shares = minibatches(items, count, seed)
    assert sorted(item for share in shares for item in share) == sorted(items)
    assert len(shares) == count
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert shares == minibatches(items, count, seed)
    assert minibatches(items, 1, seed) == [items]


def test_moved_is_the_divergence_of_the_old_policy_from_the_new() -> None:
    """Over tokens drawn from the old one, its mean is that of all outcomes."""
    old, now = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 0.35, 0.25])
    tokens = torch.tensor([0] * 7 + [1] * 2 + [2])
    exact = float((old * (old / now).log()).sum())
    outside = torch.tensor([0])  # a token of weight 0 counts nowhere
    index = torch.cat([tokens, outside])
    weight = torch.tensor([0.1] * 10 + [0.0])
    assert mean_kl(old.log()[index], now.log()[index], weight) == pytest.approx(exact, rel=1e-6)
    assert mean_kl(old.log()[outside], now.log()[outside], torch.zeros(1)) == 0.0
