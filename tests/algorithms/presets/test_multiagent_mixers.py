"""Mixers and targets against the catalogue's numbers, loops and finite differences."""

from __future__ import annotations

import pytest
import torch

from agentrl.algorithms.presets.multiagent import (
    VdnMixer,
    best_action,
    build_mixer,
    lambda_returns,
    one_step_targets,
    qmix_value,
)


def test_a_team_that_adds_up() -> None:
    assert VdnMixer()(torch.tensor([1.0, 2.0]), torch.empty(0)).item() == 3


def test_the_published_mixing() -> None:
    """E4 of the catalogue: hidden [5, -0.776870]."""
    q, w1 = torch.tensor([1.0, 2.0]), torch.tensor([[-1.0, 0.5], [2.0, -1.0]])
    b1, w2, v = torch.tensor([0.0, -4.0]), torch.tensor([1.0, -0.5]), torch.tensor(0.3)
    assert qmix_value(q, w1, b1, w2, v).item() == pytest.approx(4.911565, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_more_utility_is_never_worth_less_whatever_the_state(seed: int) -> None:
    torch.manual_seed(seed)
    mixed = build_mixer("qmix", agents=3, state=2, embed=4)
    q, state = torch.randn(20, 3, requires_grad=True), 5 * torch.randn(20, 2)
    (slope,) = torch.autograd.grad(mixed(q, state).sum(), q)
    assert (slope >= 0).all()
    assert (slope > 0).any()
    # Which state it is matters: it is not one fixed mixing.
    assert not torch.allclose(mixed(q, state), mixed(q, state + 1))


def test_what_is_not_available_is_not_best() -> None:
    q = torch.tensor([[3.0, 2.0, 1.0], [-1.0, -2.0, -3.0]])
    available = torch.tensor([[False, True, True], [False, False, True]])
    assert best_action(q, available).tolist() == [1, 2]


def test_only_what_has_terminated_has_no_future() -> None:
    reward, following = torch.tensor([1.0, 1.0]), torch.tensor([10.0, 10.0])
    targets = one_step_targets(reward, following, torch.tensor([True, False]), 0.9)
    assert targets.tolist() == pytest.approx([1.0, 10.0])


@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_lambda_returns_are_the_mixture_of_n_step_returns(terminated: bool, lam: float) -> None:
    """(1 - lam) times the sum of lam^(n-1) G^(n), and all that is left for the longest."""
    gamma, steps, longest = 0.9, 4, 6
    draw = torch.Generator().manual_seed(0)
    r, v = torch.rand(2, 1, longest, generator=draw, dtype=torch.float64)
    last = (torch.arange(longest) == steps - 1)[None]
    out = lambda_returns(r, v, last & terminated, last, gamma, lam)[0, :steps]

    def after(t: int) -> float:
        return 0.0 if terminated and t == steps - 1 else v[0, t].item()

    def n_step(t: int, n: int) -> float:
        made = sum(gamma**k * r[0, t + k].item() for k in range(n))
        return made + gamma**n * after(t + n - 1)

    for t in range(steps):
        left = steps - t
        parts = [(1 - lam) * lam ** (n - 1) * n_step(t, n) for n in range(1, left)]
        expected = sum(parts) + lam ** (left - 1) * n_step(t, left)
        assert out[t].item() == pytest.approx(expected, abs=1e-12)
