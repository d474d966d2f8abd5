"""The benchmark of overlap in small: a random model, answers of given lengths, a made-up clock."""

from __future__ import annotations

import heapq
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algorithms.simulation import Simulation
from tests.benchmarks.overlap import logprob_error
from tests.benchmarks.virtual_run import Costs, Mode, VirtualRun

# Two calls of about 10 tokens; as in the benchmark, what takes longest are a few slow tools.
AGENT = Costs(update=0.3, tool=(0.15, 0.8), length=(10.0, 0.5, 4, 24), calls=2)
SMALL: dict[str, Any] = {"groups": 2, "group_size": 4, "slots": 16, "steps": 10, "costs": AGENT}
MODES = (Mode(), Mode(1.0), Mode(1.0, True), Mode(4.0, True))
pytestmark = pytest.mark.timeout(600)  # of a machine that does much else


@pytest.fixture(scope="module")
def runs(tiny_model_dir: Path) -> dict[Mode, VirtualRun]:
    return {mode: VirtualRun(tiny_model_dir, mode, **SMALL).run() for mode in MODES}


def test_weights_in_flight_are_named_and_steps_are_faster(
    runs: dict[Mode, VirtualRun],
) -> None:
    for ahead, gain in ((1.0, 1.5), (4.0, 2.5)):
        flight = runs[Mode(ahead, True)]
        assert runs[Mode()].per_step / flight.per_step > gain
        assert logprob_error(flight) < 1e-5
    assert runs[Mode(1.0)].per_step > runs[Mode(1.0, True)].per_step


def test_the_simulation_is_within_a_tenth_of_the_run(runs: dict[Mode, VirtualRun]) -> None:
    for mode, run in runs.items():
        told = Simulation(run.workload(), mode.ahead, in_flight=mode.in_flight)
        assert told.run(10).seconds == pytest.approx(run.per_step, rel=0.1), mode


@pytest.mark.parametrize("ahead", [0, 2])
def test_with_instant_sampling_the_lag_is_the_number_of_updates(
    tiny_model_dir: Path, ahead: int
) -> None:
    """The oracle is a loop, which samples groups in the batches in which they are asked for."""
    costs = Costs(step=0.0, per_row=0.0, per_token=0.0, update=1.0, length=(8.0, 0.5, 4, 24))
    changed = SMALL | {"slots": 99, "costs": costs, "steps": 4}
    flight = VirtualRun(tiny_model_dir, Mode(ahead, True, asked=True), **changed).run()
    oracle = VirtualRun(tiny_model_dir, Mode(ahead), **changed)
    oracle.learn = lambda: None  # type: ignore[method-assign]
    thread = ThreadPoolExecutor(1)  # as the training loop does, which changes no bit
    for step in range(4):
        oracle.ask()
        while oracle.events:  # all that was asked for ends under the present version
            heapq.heappop(oracle.events)[2]()
        plays = [oracle.ended.pop(step * oracle.groups + n) for n in range(oracle.groups)]
        groups = [oracle.group(each) for each in plays]
        thread.submit(oracle.policies.update, step, groups).result()
        oracle.version += 1
        weights = oracle.snapshot()
        oracle.engine.swap(0, oracle.version, partial(oracle.served.load_state_dict, weights))
        oracle.run_commands()
    for name, weight in oracle.learned.state_dict().items():
        assert torch.equal(weight, flight.weights[-1][name]), name
    assert any(not torch.equal(flight.weights[0][n], w) for n, w in flight.weights[-1].items())
    assert flight.max_lag == ahead
    thread.shutdown()
