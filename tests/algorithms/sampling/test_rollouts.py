"""What a rollout is asked for with."""

from __future__ import annotations

from typing import Any

from agentrl.algorithms.sampling.tasks import new_rollout
from agentrl.core.config import resolve


def seeds(**tables: Any) -> list[int | None]:
    config = resolve({"name": "r", **tables}, source="test")
    rows = [new_rollout(config, "r/train/0", n, {}, 0, config.sampling) for n in range(3)]
    return [row.sampling.seed for row in rows]


def test_the_runs_seed_gives_each_rollout_its_own() -> None:
    found = seeds()
    assert len(set(found)) == 3
    assert found == seeds() != seeds(seed=1)
    assert seeds(engine={"kind": "vllm"}) == [None] * 3
    config = resolve({"name": "other"}, source="test")
    other = [new_rollout(config, "other/train/0", n, {}, 0, config.sampling) for n in range(3)]
    assert [row.sampling.seed for row in other] == found


def test_a_seed_of_the_run_file_gives_each_rollout_its_own() -> None:
    found = seeds(sampling={"seed": 7})
    assert len(set(found)) == 3
    assert found == seeds(sampling={"seed": 7})
    assert found != seeds(sampling={"seed": 8})


def test_one_step_off_can_be_repeated_without_being_asked() -> None:
    engine = {"kind": "vllm"}
    ahead = {"preset": "grpo+tis", "max_staleness": 1, "async_sampling": "one_step_off"}
    found = seeds(algorithm=ahead, engine=engine)
    assert None not in found
    again, other = (seeds(algorithm=ahead, engine=engine, seed=seed) for seed in (0, 1))
    assert found == again != other
