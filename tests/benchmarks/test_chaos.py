"""What the chaos benchmark counts, with a few faults that are the same each time."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from agentrl.algorithms.engines.vllm.server import vllm_server
from agentrl.algorithms.model.load import load_model
from agentrl.core.config import resolve
from tests.benchmarks import chaos
from tests.benchmarks.chaos_policy import PolicyUrl
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


def test_faults_are_spread_over_the_whole_time() -> None:
    times = chaos.schedule(200, 3600.0, random.Random(0))
    assert [int(each // 18) for each in times] == list(range(200))
    assert len({each % 18 for each in times}) == 200, "at no fixed time of its part"


async def test_a_policy_server_takes_weights_as_vllm_does(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Log-probs are compared with the learner's after each publish, which raises otherwise."""
    served = [PolicyUrl(*load_model(tiny_model_dir, device="cpu")) for _ in range(2)]
    for each in served:
        await each.start()
    engine = {"kind": "vllm", "vllm": {"urls": [each.base_url for each in served]}}
    config = resolve({"output": str(tmp_path), "engine": engine}, source="test")
    model, tokenizer = load_model(tiny_model_dir, device="cpu")
    server = vllm_server(config, model, tokenizer)
    await server.start()
    try:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
        await server.publish(1)
        assert [each.reloads for each in served] == [2, 2]
    finally:
        await server.close()
        for each in served:
            await each.close()


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
