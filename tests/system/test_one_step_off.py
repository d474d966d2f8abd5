"""With `algorithm.async_sampling = "one_step_off"` the weights that sample a group follow from its
number, however long its calls take and wherever the run is cut off."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import ConfigError
from agentrl.core.types import Purpose
from agentrl.store import open_store
from tests.system import steady
from tests.system.steady import POINTS, STEPS, Silent
from tests.system.test_resume import assert_same


def config(folder: Path, model: Path) -> RunConfig:
    made = steady.config(folder, model)
    how: Any = {"preset": "grpo+tis", "max_staleness": 1.0, "async_sampling": "one_step_off"}
    return replace(made, algorithm=replace(made.algorithm, **how))


def agents(chance: random.Random) -> Any:
    """Agents that take their time, and whose reward tells which weights were served to them."""

    async def answer(settings: RunConfig) -> None:
        async with open_store(settings.store) as store:
            while True:
                for attempt in await store.claim(1, runner="r", lease=1.0, timeout=5.0):
                    while not (served := await store.policies(settings.name)):
                        await store.wait(0)  # the run was started again just now
                    version = served["policy"].version
                    await asyncio.sleep(chance.choice([0.0, 0.0, 0.1]))
                    calls, outcome = steady.played(attempt, ["policy"])
                    value = random.Random(f"{attempt.rollout.id}/{version}").random()
                    reward = replace(outcome.rewards[0], value=value)
                    await store.add_transitions([replace(call, version=version) for call in calls])
                    await store.finish([replace(outcome, rewards=[reward])])

    return answer


async def versions(folder: Path) -> list[tuple[int, int | None]]:
    """The step and the weights of every call."""
    async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
        rows = await store.rollouts("steady", purpose=Purpose.TRAIN)
        traces = [(row, await store.trace(row.id)) for row in rows]
        return [(row.step, c.version) for row, trace in traces if trace for c in trace.transitions]


def test_of_the_same_rollouts_a_run_has_bitwise_one_result(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Silent, "in_flight", True, raising=False)
    folders = [tmp_path / name for name in ("whole", "interrupted")]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        monkeypatch.setattr(steady, "answer", agents(random.Random(seed)))
        settings = config(folder, tiny_model_dir)
        steady.break_off(settings, *(POINTS[1:3] if folder.name == "interrupted" else ()))
        steady.finish(settings)
        found = asyncio.run(versions(folder))
        assert {step for step, _ in found} == set(range(STEPS))
        assert all(version == max(0, step - 1) for step, version in found), found
    assert_same(*folders)


@pytest.mark.parametrize("wrong", [{"max_staleness": 2}, {"group_order": "completed"}])
def test_it_is_refused_where_it_promises_nothing(wrong: dict[str, Any]) -> None:
    algorithm = {"preset": "grpo+tis", "max_staleness": 1, "async_sampling": "one_step_off"}
    with pytest.raises(ConfigError, match="one_step_off' samples one step ahead"):
        resolve({"name": "r", "algorithm": algorithm | wrong}, source="test")
