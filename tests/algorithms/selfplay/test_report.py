"""What the console and the report show of self-play."""

from __future__ import annotations

from agentrl.algorithms.ratings import game_figures, win_rate_table
from agentrl.core.config import resolve
from agentrl.core.types import StepRow
from agentrl.telemetry.console import Progress
from agentrl.telemetry.report import score_table
from tests.agentrl.telemetry.test_report import row


def test_games_show_what_each_seat_got_and_how_they_went() -> None:
    games = {
        "selfplay/games": 8.0, "rollouts": 8.0, "calls": 20.0, "reward/mean": 0.0,
        "reward/role:outcome/mean": 0.0, "reward/role:invalid/mean": -0.25,
        "reward/role:outcome/player_0/mean": -0.5, "reward/role:outcome/player_0/std": 1.25,
        "reward/role:outcome/player_1/mean": 0.5, "reward/role:outcome/player_1/std": 1.0,
    }  # fmt: skip
    pool = {"selfplay/win_rate": 0.6, "selfplay/win_rate/policy@000000": 0.75}
    assert game_figures(games | pool) == {
        "player_0": "-0.500 ± 1.250",
        "player_1": "0.500 ± 1.000",
        "calls a game": "2.5",
        "illegal moves": "0.50",
        "against the first": "75%",
        "against the pool": "60%",
    }
    legal = games | {"reward/role:invalid/mean": 0.0}
    assert game_figures(legal)["illegal moves"] == "0.00"  # not -0.00
    assert game_figures({"reward/mean": 0.0}) == {}
    measured = {"eval/function/kuhn/exploitability": 0.446}
    rows = [
        row(0, **games, **measured),
        row(9, **games | pool),
        row(10, **{"eval/function/kuhn/exploitability": 0.122}),
    ]
    table = score_table(rows)
    cells = list(zip(*(column.cells for column in table.columns), strict=True))
    assert cells[0] == ("kuhn/exploitability", "0.446", "0.122")
    assert ("training: player_0", "-0.500 ± 1.250", "-0.500 ± 1.250") in cells
    assert cells[-1] == ("training: against the pool", "-", "60%")
    progress = Progress(resolve({"steps": 12}, source="test"), rows=rows)
    line = progress.line(rows[0])
    assert "player_0 -0.500 ± 1.250  player_1 0.500 ± 1.000  calls a game 2.5" in line
    assert "exploitability" not in line  # it has a line of its own, before the step
    assert progress.scores_line(rows[0]) == "untrained:  kuhn/exploitability 0.446"


def test_a_pool_is_shown_as_who_beat_whom_by_when() -> None:
    first, second = "policy@000000", "policy@000002"
    before = {"selfplay/elo": 1010.0, f"selfplay/elo/{first}": 990.0}
    after = {"selfplay/elo": 1030.0, f"selfplay/elo/{first}": 980.4, f"selfplay/elo/{second}": 1001}
    rates = {f"selfplay/win_rate/{first}": 0.9, f"selfplay/win_rate/{second}": 0.55}
    steps = [
        row(1, **before, **{f"selfplay/win_rate/{first}": 0.75}),
        row(2, **after, **rates),
        StepRow(run="run", step=3, metrics={"eval/score": 1.0}, committed=False, at=0.0),
    ]
    table = win_rate_table(steps)
    assert table is not None
    assert [column.header for column in table.columns] == ["", "@0", "@2", "Elo"]
    shown = list(zip(*(column.cells for column in table.columns), strict=True))
    assert shown == [
        ("@0", "", "", "980"), ("@2", "75%", "", "1001"), ("final", "90%", "55%", "1030"),
    ]  # fmt: skip
    assert win_rate_table([row(0, **{"reward/mean": 0.5})]) is win_rate_table([]) is None
