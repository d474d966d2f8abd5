"""Elo, smoothed win rates and prioritised opponents, against the catalogue's numbers."""

from __future__ import annotations

from math import log10

import pytest

from agentrl.algorithms.ratings import elo, expected, fit_ratings, priorities, win_rate

RATES = (0.9, 0.5, 0.1)


def test_a_win_over_a_weaker_player_is_worth_little() -> None:
    assert elo(1600, 1500, 1.0, 32) == pytest.approx(1611.518, abs=5e-4)
    assert elo(1500, 1600, 0.0, 32) == pytest.approx(1488.482, abs=5e-4)
    assert elo(1500, 1600, 1.0, 32) == pytest.approx(1520.482, abs=5e-4)


def test_a_draw_moves_nobody_who_was_expected_to_draw() -> None:
    assert elo(1500, 1500, 0.5, 32) == 1500
    assert elo(1600, 1500, 0.5, 32) < 1600
    assert expected(1500, 1900) == pytest.approx(1 / 11)


def test_a_win_rate_begins_at_a_half_and_never_ends() -> None:
    assert win_rate(0, 0) == 0.5
    assert win_rate(3, 3) == 0.8
    assert win_rate(0, 3) == 0.2
    assert win_rate(5 * 0.5, 5) == 0.5  # draws alone


def test_opponents_by_priority() -> None:
    found = priorities(RATES)
    assert found == pytest.approx((0.009346, 0.233645, 0.757009), abs=5e-7)
    assert sum(found) == pytest.approx(1)


def test_shares_are_a_distribution_even_where_no_weight_is_left() -> None:
    assert priorities([1.0, 1.0]) == [0.5, 0.5]
    assert priorities([0.5] * 4) == [0.25] * 4


def test_a_fit_of_two_is_their_odds() -> None:
    found = fit_ratings([[0, 30], [10, 0]], [[0, 40], [40, 0]], prior=0)
    assert found == pytest.approx([200 * log10(3), -200 * log10(3)])


@pytest.mark.parametrize("prior", [0.0, 1.0])
def test_a_fit_expects_what_was_scored(prior: float) -> None:
    scores, games = [[0, 7, 3], [3, 0, 12], [1, 8, 0]], [[0, 10, 4], [10, 0, 20], [4, 20, 0]]
    ratings = fit_ratings(scores, games, prior)
    assert sum(ratings) == pytest.approx(0)
    for i in range(3):
        others = [j for j in range(3) if j != i]
        due = [(games[i][j] + 2 * prior) * expected(ratings[i], ratings[j]) for j in others]
        assert sum(due) == pytest.approx(sum(scores[i]) + 2 * prior, abs=1e-6)


def test_who_never_lost_has_a_rating() -> None:
    found = fit_ratings([[0, 5, 0], [0, 0, 0], [0, 0, 0]], [[0, 5, 0], [5, 0, 0], [0, 0, 0]])
    assert found[0] - found[1] == pytest.approx(400 * log10(6))  # 6 wins to 1, with the prior
