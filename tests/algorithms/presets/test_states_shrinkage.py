"""Means that are drawn to wider ones, by measured variance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.states import mean_by
from agentrl.algorithms.presets.states import reliability, variance_components
from tests.algorithms.naive import naive_components


def components(x: Tensor, wide: Tensor, narrow: Tensor) -> tuple[float, float]:
    within, between = variance_components(x, wide, narrow)
    assert len(within) == len(between) == len(x)
    return float(within[0]), float(between[0])


def test_components_are_those_that_drew_the_numbers() -> None:
    draw = torch.Generator().manual_seed(0)
    wide = torch.arange(20_000) // 20
    narrow = torch.arange(20_000) // 4
    signal = 0.5 * torch.randn(5000, generator=draw, dtype=torch.float64)[narrow]
    x = wide + signal + 2 * torch.randn(20_000, generator=draw, dtype=torch.float64)
    within, between = components(x, wide, narrow)
    assert within == pytest.approx(4.0, rel=0.05)
    assert between == pytest.approx(0.25, abs=0.08)
    assert components(x - signal, wide, narrow)[1] < 0.08


def test_components_are_apart_for_parts_of_the_numbers() -> None:
    """In the first half narrow groups differ; in the second they do not."""
    draw = torch.Generator().manual_seed(0)
    wide, narrow = torch.arange(8000) // 16, torch.arange(8000) // 4
    x = torch.randn(8000, generator=draw, dtype=torch.float64)
    x[:4000] += torch.randn(2000, generator=draw, dtype=torch.float64)[narrow][:4000]
    by = torch.arange(8000) // 4000
    within, between = variance_components(x, wide, narrow, by)
    for half in (slice(0, 4000), slice(4000, 8000)):
        apart = components(x[half], wide[half], narrow[half])
        assert (float(within[half][0]), float(between[half][0])) == pytest.approx(apart)
    lowered = variance_components(x, wide, narrow, by, 3.0)[1]
    assert lowered[0] > 0.8
    assert lowered[-1] == 0
    alone = torch.cat([narrow[:4000], torch.arange(4000, 8000)])
    within = variance_components(x, wide, alone, by)[0]
    assert within[-1] == within[0] > 0  # the noise of the half where it is known


def test_components_of_unequal_sizes_are_those_of_the_textbook() -> None:
    wide, narrow = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 0, 2, 5])
    x = torch.tensor([1.0, 2, 4, 8, 9, 3, 3.5, 100], dtype=torch.float64)
    expected = naive_components(
        x.tolist(), wide.tolist(), [*zip(wide.tolist(), narrow.tolist(), strict=True)]
    )
    assert components(x, wide, narrow) == pytest.approx(expected)
    within, between = components(x[5:], wide[5:], narrow[5:])
    assert within == 0  # no group of two: nothing is known to be noise
    assert between > 0
    assert components(x[7:], wide[7:], narrow[7:]) == (0, 0)


def test_a_mean_of_more_is_more_reliable() -> None:
    count = torch.tensor([0.0, 1, 4])
    assert reliability(count, torch.tensor(1.0), torch.tensor(0.5)).tolist() == pytest.approx(
        [0, 1 / 3, 2 / 3]
    )
    assert reliability(count, torch.tensor(1.0), torch.tensor(0.0)).tolist() == [0, 0, 0]
    assert reliability(count, torch.tensor(0.0), torch.tensor(0.5)).tolist() == [0, 1, 1]


def test_a_mean_may_leave_out_what_is_its_own() -> None:
    x, ids = torch.tensor([1.0, 2, 6, 5], dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    assert mean_by(x, ids)[0].tolist() == [3, 3, 3, 5]
    others, count = mean_by(x, ids, torch.tensor([0, 0, 1, 2]))
    assert others.tolist() == [6, 6, 1.5, 0]
    assert count.tolist() == [1, 1, 2, 0]
