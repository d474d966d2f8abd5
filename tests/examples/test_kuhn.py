"""Kuhn poker, trained as users train it, for a few steps: against itself, and against its pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.core.types import Purpose, Rollout, RolloutState, StepRow, Transition
from agentrl.store import open_store
from tests import warm
from tests.benchmarks.selfplay import EXAMPLE, rated

pytest.importorskip("pyspiel")

UNIFORM = 0.458333  # exploitability of passing and betting half of the time each
Trained = tuple[list[StepRow], list[Rollout], list[Transition]]


def train(output: Path, *settings: str) -> Trained:
    """Committed steps, rollouts, and the calls of the last step."""
    small = [f"output={output}", "audit.before=false", "algorithm.group_size=8"]
    command = ["-m", "agentrl", "train", str(EXAMPLE / "run.toml")]
    trained = warm.run(*command, *small, *settings, timeout=110)
    assert trained.returncode == 0, trained.stderr
    return asyncio.run(read(output))


async def read(output: Path) -> Trained:
    async with open_store(f"sqlite:///{output / 'store.db'}") as store:
        steps = [row for row in await store.steps("kuhn") if row.committed]
        rollouts = await store.rollouts("kuhn", purpose=Purpose.TRAIN)
        last = [row.id for row in rollouts if row.step == steps[-1].step]
        traces = [await store.trace(name) for name in last]
    return steps, rollouts, [call for trace in traces if trace for call in trace.transitions]


async def read_all(output: Path) -> list[StepRow]:
    async with open_store(f"sqlite:///{output / 'store.db'}") as store:
        return await store.steps("kuhn")


@pytest.mark.slow
def test_against_itself_it_begins_to_learn(tmp_path: Path) -> None:
    output, settings = (
        tmp_path,
        ("steps=8", "algorithm.groups=6", "algorithm.schedule=constant", "eval.every=4"),
    )
    steps, rollouts, calls = train(output, *settings)
    assert {row.state for row in rollouts} == {RolloutState.SUCCEEDED}
    assert {row.seats["player_0"] for row in rollouts} == {"policy"}
    assert {(call.role, call.policy) for call in calls} == {
        ("player_0", "policy"), ("player_1", "policy"),
    }  # fmt: skip
    assert steps[-1].metrics["selfplay/unscored"] == 0
    last = max((output / "checkpoints").glob("0*"))
    before, after = rated(output / "policy", last)
    assert before["exploitability"] == pytest.approx(UNIFORM, abs=0.02)
    assert before["illegal_max"] < 0.05
    assert after["exploitability"] < 0.95 * before["exploitability"]
    assert after["against_first"] > 0
    found = [row.metrics for row in asyncio.run(read_all(output))]
    curve = [x for row in found if (x := row.get("eval/function/kuhn/exploitability")) is not None]
    assert len(curve) == 3
    assert curve[0] == pytest.approx(before["exploitability"], rel=1e-5)
    assert curve[-1] == pytest.approx(after["exploitability"], rel=1e-5)


def test_snapshots_play_the_other_seat(tmp_path: Path) -> None:
    settings = ["opponents=uniform", "self_share=0.0", "every=1", "pool=2"]
    steps, rollouts, calls = train(
        tmp_path, "steps=3", "algorithm.groups=2", *(f"selfplay.{s}" for s in settings)
    )
    assert {row.state for row in rollouts} == {RolloutState.SUCCEEDED}
    seats = {row.id: row.seats for row in rollouts}
    assert all(list(seat.values()).count("policy") == 1 for seat in seats.values())
    names = {name for seat in seats.values() for name in seat.values()}
    assert {"policy", "policy@000000"} < names
    played = {(call.policy, call.version) for call in calls}
    assert ("policy", 2) in played
    assert played - {("policy", 2)} <= {("policy@000000", 0), ("policy@000002", 2)}
    trained = steps[-1].metrics["calls"]
    assert trained == sum(call.policy == "policy" for call in calls)
    assert {path.name for path in (tmp_path / "pool").iterdir()} == {
        "policy@000000", "policy@000003",
    }  # fmt: skip
