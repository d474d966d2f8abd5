"""What the training of a role is worth: from rollouts to numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_roles_that_cannot_be_replaced_are_refused(tmp_path: Path) -> None:
    members = {name: {"roles": [name], "lora": {"rank": 2}} for name in ("solver", "planner")}
    members["judge"] = {"roles": ["judge"], "frozen": True, "model": "m"}
    config = run_of(tmp_path, policies=members)
    assert ablation.trained_roles(config) == {"solver": "solver", "planner": "planner"}
    with pytest.raises(ConfigError, match="--role judge: no trained policy plays it"):
        ablation.ablate(config, ["judge"], None)
    with pytest.raises(ConfigError, match="name one, such as --role"):
        ablation.ablate(run_of(tmp_path), [], None)
