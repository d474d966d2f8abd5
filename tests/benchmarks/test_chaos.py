"""What the chaos benchmark counts, with a few faults that are the same each time."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.benchmarks import chaos
from tests.system.machines import possible


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not possible(), reason="users have no network namespaces here")
def test_a_few_faults_lose_nothing_and_train_nothing_twice(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(chaos.ROOT))
    monkeypatch.setattr(chaos, "WEIGHTS", dict.fromkeys(chaos.WEIGHTS, 1))
    figures = chaos.measure(faults=6, over=0, seed=1, model=tiny_model_dir)
    assert figures["by_fault"] == chaos.WEIGHTS
    assert (figures["lost"], figures["twice"]) == (0, 0)
    assert figures["final_step"] == figures["steps"]


def test_every_kind_of_fault_comes_and_every_machine_is_struck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    for name in chaos.FAULTS:
        monkeypatch.setitem(chaos.FAULTS, name, lambda *_, name=name: made.append(name))
    roles = dict.fromkeys(["store", "learner", *chaos.policy_names(), *chaos.runner_names()])
    chance, cluster = random.Random(0), SimpleNamespace(roles=roles)
    names = list(islice(chaos.kinds(chance), 2 * sum(chaos.WEIGHTS.values())))
    struck = [chaos.strike(cluster, name, chance).split() for name in names * 5]
    assert [name for name, _ in struck] == made == names * 5
    assert {name: names.count(name) / 2 for name in chaos.WEIGHTS} == chaos.WEIGHTS
    assert set(made) == set(chaos.FAULTS) == set(chaos.WEIGHTS)
    assert {victim for _, victim in struck} == set(roles)
