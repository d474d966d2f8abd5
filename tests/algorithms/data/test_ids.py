"""Id vectors, segment reductions and link scans."""

from __future__ import annotations

import pytest
import torch

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import key, known_mean, reduce_by, scan, units
from agentrl.core.errors import TrainingError


@pytest.fixture
def two_rollouts() -> Batch:
    """Rollout 0 (group 1): calls 0 and 2 in row 0, 1 in row 1; rollout 1 (group 0): call 3."""
    return Batch(
        rows=[],
        token_row=torch.tensor([0, 0, 1, 2, 2]),
        token_transition=torch.tensor([0, 2, 1, 3, 3]),
        sampler_logprobs=torch.zeros(5),
        transition_rollout=torch.tensor([0, 0, 0, 1]),
        transition_role=torch.tensor([0, 1, 0, 1]),
        row_rollout=torch.tensor([0, 0, 1]),
        rollout_group=torch.tensor([1, 0]),
        rewards={},
        roles=["main", "sub"],
        groups=["a", "b"],
        rollouts=["x", "y"],
        transitions=["0", "1", "2", "3"],
    )


def test_key_gives_equal_tuples_equal_dense_ids() -> None:
    ids = key(torch.tensor([7, -3, 7, -3, 7]), torch.tensor([1, 1, 1, 2, 10**12]))
    assert ids.tolist() == [2, 0, 2, 1, 3]


def test_key_of_many_large_columns_does_not_overflow() -> None:
    columns = [torch.randint(0, 2**62, (50,)) for _ in range(6)]
    assert key(*columns).sort().values.tolist() == list(range(50))


def test_key_of_nothing_is_nothing() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert key(empty, empty).numel() == 0


def test_seg_reduces_per_id_and_gives_zero_without_members() -> None:
    x, ids = torch.tensor([1.0, -5.0, 3.0]), torch.tensor([2, 0, 2])
    assert reduce_by(x, ids).tolist() == [-5.0, 0.0, 4.0]
    assert reduce_by(x, ids, 4).tolist() == [-5.0, 0.0, 4.0, 0.0]
    assert reduce_by(x, ids, how="mean").tolist() == [-5.0, 0.0, 2.0]
    assert reduce_by(x, ids, how="amax").tolist() == [-5.0, 0.0, 3.0]
    assert reduce_by(x, ids, how="amin").tolist() == [-5.0, 0.0, 1.0]
    assert reduce_by(x[:0], ids[:0]).numel() == 0


def test_seg_sums_float32_in_float64() -> None:
    x = torch.full((1000,), 0.1)
    exact = 1000 * float(torch.tensor(0.1))
    assert reduce_by(x, torch.zeros(1000, dtype=torch.int64)).item() == pytest.approx(
        exact, abs=1e-12
    )


def test_a_mean_is_of_what_is_known() -> None:
    x, ids = torch.tensor([1.0, torch.nan, 4.0, torch.nan]), torch.tensor([0, 0, 0, 1])
    mean, *nothing = known_mean(x, ids, 3).tolist()
    assert mean == 2.5
    assert all(value != value for value in nothing)


def test_scan_discounts_along_the_links() -> None:
    following = torch.tensor([1, 2, -1])
    assert scan(torch.tensor([0.0, 0, 1]), 0.9, following).tolist() == pytest.approx([0.81, 0.9, 1])
    assert scan(torch.tensor([0.0, 0, 1]), 0.0, following).tolist() == [0, 0, 1]


def test_scan_takes_a_decay_per_unit_and_links_in_any_order() -> None:
    y = scan(torch.tensor([1.0, 10, 100]), torch.tensor([0.5, 0.1, 9]), torch.tensor([2, 0, -1]))
    assert y.tolist() == [51.0, pytest.approx(15.1), 100.0]


def test_scan_lets_a_missing_end_reach_all_that_lead_to_it() -> None:
    y = scan(torch.tensor([1.0, float("nan"), 1.0]), 0.0, torch.tensor([1, -1, -1]))
    assert y.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("links", [[0], [1, 0], [1, 2, 0, -1]])
def test_scan_refuses_a_cycle(links: list[int]) -> None:
    with pytest.raises(TrainingError, match="cycle"):
        scan(torch.ones(len(links)), 1.0, torch.tensor(links))


def test_units_read_any_unit_above_a_level(two_rollouts: Batch) -> None:
    assert units(two_rollouts, "token", "all").tolist() == [0, 0, 0, 0, 0]
    assert units(two_rollouts, "token", "transition").tolist() == [0, 2, 1, 3, 3]
    assert units(two_rollouts, "token", "row").tolist() == [0, 0, 1, 2, 2]
    assert units(two_rollouts, "token", "role").tolist() == [0, 0, 1, 1, 1]
    assert units(two_rollouts, "token", "rollout").tolist() == [0, 0, 0, 1, 1]
    assert units(two_rollouts, "token", "group").tolist() == [1, 1, 1, 0, 0]
    assert units(two_rollouts, "transition", "group", "role").tolist() == [1, 2, 1, 0]
    assert units(two_rollouts, "rollout", "rollout").tolist() == [0, 1]


def test_units_refuse_a_unit_below_the_level(two_rollouts: Batch) -> None:
    with pytest.raises(TrainingError, match="a rollout belongs to no single role"):
        units(two_rollouts, "rollout", "group", "role")
    with pytest.raises(TrainingError, match="a transition belongs to no single row"):
        units(two_rollouts, "transition", "row")
