"""What a rollout is asked for with."""

from __future__ import annotations

from typing import Any

from agentrl.algorithms.sampling.rollouts import new_rollout
from agentrl.config import resolve


def seeds(**tables: Any) -> list[int | None]:
    config = resolve({"name": "r", **tables}, source="test")
    rows = [new_rollout(config, "r/train/0", n, {}, 0, config.sampling) for n in range(3)]
    return [row.sampling.seed for row in rows]


def test_a_seed_of_the_run_file_gives_each_rollout_one_of_its_own() -> None:
    assert seeds() == [None] * 3
    found = seeds(sampling={"seed": 7})
    assert len(set(found)) == 3
    assert found == seeds(sampling={"seed": 7})
    assert found != seeds(sampling={"seed": 8})


def test_one_step_off_can_be_repeated_without_being_asked() -> None:
    ahead = {"preset": "grpo+tis", "max_staleness": 1, "overlap": "one_step_off"}
    found = seeds(algorithm=ahead)
    assert None not in found
    assert found == seeds(algorithm=ahead) != seeds(algorithm=ahead, seed=1)
