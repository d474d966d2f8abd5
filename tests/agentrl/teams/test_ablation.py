"""What the training of a role is worth: from rollouts to numbers."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.errors import ConfigError
from agentrl.teams import ablation
from tests.agentrl.games import game, run_of


def test_a_loss_is_paired_by_task() -> None:
    whole = [game(outcome=1.0), game(outcome=0.5), game(outcome=1.0), game()]
    without = [game(outcome=0.0), game(outcome=0.5), game(), game(outcome=1.0)]
    found = ablation.ablation_row("solver", "solver@000000", whole, without)
    assert (found.pairs, found.loss, found.error) == (2, 0.5, 0.5)
    assert found.team == pytest.approx(2.5 / 3)
    assert found.without == 0.5


@pytest.mark.parametrize(("lost", "said"), [(0.0, "75.0%"), (-1.0, "0.500")])
def test_means_of_wins_and_losses_are_no_percentages(lost: float, said: str) -> None:
    whole = [game(outcome=x) for x in (1.0, lost, 1.0, 1.0)]
    row = ablation.ablation_row("solver", "solver@000000", whole, whole)
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(ablation.table([row]))
    assert said in shown.export_text()


def test_roles_that_cannot_be_replaced_are_refused(tmp_path: Path) -> None:
    members = {name: {"roles": [name], "lora": {"rank": 2}} for name in ("solver", "planner")}
    members["judge"] = {"roles": ["judge"], "frozen": True, "model": "m"}
    config = run_of(tmp_path, policies=members)
    assert ablation.trained_roles(config) == {"solver": "solver", "planner": "planner"}
    with pytest.raises(ConfigError, match="--role judge: no trained policy plays it"):
        ablation.ablate(config, ["judge"], None)
    with pytest.raises(ConfigError, match="name one, such as --role"):
        ablation.ablate(run_of(tmp_path), [], None)
