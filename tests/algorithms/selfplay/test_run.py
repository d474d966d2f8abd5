"""A run against a pool that is killed and started again meets the same opponents, with the same
ratings, and ends with bitwise the same weights.

python -m tests.algorithms.selfplay.test_run FOLDER MODEL POINT:NUMBER   strikes as `steady` does
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from agentrl.core.config import RunConfig, resolve
from agentrl.core.config.schema import CheckpointConfig
from agentrl.core.types import Attempt, Json, Outcome, Reward, Rollout, Scope, Transition
from agentrl.store import open_store
from tests import factories, warm
from tests.system import steady

SEATS = ["player_0", "player_1"]
STEPS = 5


def config(folder: Path, model: Path) -> RunConfig:
    settings = steady.config(folder, model)
    spiral = replace(settings.algorithm, preset="spiral", minibatches=1, epochs=1)
    games = {"opponents": "pfsp", "seats": SEATS, "self_share": 0.25, "every": 1, "pool": 2}
    selfplay = resolve({"selfplay": games}, source="test").selfplay
    return replace(settings, algorithm=spiral, selfplay=selfplay, steps=STEPS)


def played(attempt: Attempt, policies: list[str]) -> tuple[list[Transition], Outcome]:
    """A call of each seat; tokens and winner drawn from the rollout's id and who plays."""
    seats = attempt.rollout.seats
    dice = random.Random(f"{attempt.rollout.id} {sorted(seats.items())}")
    calls = [
        factories.call(
            f"{attempt.id}/{index}",
            [dice.randrange(512) for _ in range(4)],
            [dice.randrange(512)],
            attempt=attempt.id,
            index=index,
            role=role,
            policy=seats[role],
            logprob=-6.0,
        )
        for index, role in enumerate(SEATS)
    ]
    won = dice.choice([-1.0, 0.0, 1.0])
    rewards = [
        Reward(value=value, scope=Scope.ROLE, target=role)
        for role, value in zip(SEATS, (won, -won), strict=True)
    ]
    return calls, Outcome(attempt=attempt.id, fence=attempt.fence, rewards=rewards)


def run(settings: RunConfig, strike: steady.Strike = lambda point: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steady, "played", played)
        asyncio.run(steady.run(settings, strike))


async def read(folder: Path) -> tuple[list[dict[str, float]], list[Rollout], Path]:
    """Metrics of the games of every step, all rollouts, and the last checkpoint."""
    async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
        rows = [row for row in await store.steps("steady") if row.committed]
        rollouts = await store.rollouts("steady")
        state = await store.run("steady")
    assert state is not None
    assert state.checkpoint is not None
    games = [{k: v for k, v in row.metrics.items() if "selfplay" in k} for row in rows]
    return games, rollouts, folder / "out" / state.checkpoint


def remembered(checkpoint: Path) -> Json:
    return json.loads((checkpoint / "state.json").read_text())["state"]


def test_killed_anywhere_a_run_meets_the_same_opponents(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    run(config(whole, tiny_model_dir))
    command = ["-m", "tests.algorithms.selfplay.test_run", str(broken), str(tiny_model_dir)]
    # With a snapshot written and nothing committed, and with one committed and not yet served.
    for where in ("checkpoint:2", "commit:2"):
        killed = warm.run(*command, where)
        assert killed.returncode == -signal.SIGKILL
    run(config(broken, tiny_model_dir))

    (games, asked, last), (expected, rollouts, end) = (
        asyncio.run(read(folder)) for folder in (broken, whole)
    )
    assert len(games) == STEPS
    assert games == expected
    assert {row.id: row.seats for row in asked} == {row.id: row.seats for row in rollouts}
    assert len({name for row in asked for name in row.seats.values()}) > 2
    assert remembered(last) == remembered(end)
    mine, theirs = (load_file(path / "model.safetensors") for path in (last, end))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    kept = {path.name for path in (broken / "out" / "pool").iterdir()}
    assert kept == {"policy@000000", "policy@000005"}
    assert kept == {row["name"] for row in remembered(last)["selfplay"]["snapshots"]}
    assert not (broken / "out" / "pool" / "policy@000005" / "optimizer.safetensors").exists()


def test_a_run_continues_though_its_opponents_were_dropped(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    run(config(whole, tiny_model_dir))
    settings = replace(config(broken, tiny_model_dir), checkpoint=CheckpointConfig(every=3))
    with pytest.raises(steady.Interrupted):  # after four steps, of which the checkpoint has three
        run(settings, steady.strike_at("optimizer", 5, steady.interrupt))
    kept = {path.name for path in (broken / "out" / "pool").iterdir()}
    assert kept == {"policy@000000", "policy@000003", "policy@000004"}
    run(settings)
    (games, *_, last), (expected, *_, end) = (asyncio.run(read(path)) for path in (broken, whole))
    assert games == expected
    assert remembered(last) == remembered(end)
    kept = {path.name for path in (broken / "out" / "pool").iterdir()}
    assert kept == {"policy@000000", "policy@000005"}


def test_only_the_learner_is_trained(tmp_path: Path, tiny_model_dir: Path) -> None:
    run(replace(config(tmp_path, tiny_model_dir), steps=2))
    games, rollouts, last = asyncio.run(read(tmp_path))
    against = [row for row in rollouts if set(row.seats.values()) != {"policy"}]
    assert against
    assert all(sorted(row.seats.values())[0] == "policy" for row in against)
    assert {row["selfplay/unscored"] for row in games} == {0.0}
    assert games[0]["selfplay/pool"] == 1.0
    assert last.name == "000002"


if __name__ == "__main__":
    torch.set_num_threads(1)
    point, _, number = sys.argv[3].partition(":")
    act = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    settings = config(Path(sys.argv[1]), Path(sys.argv[2]))
    run(settings, steady.strike_at(point, int(number), act))
