"""Worlds of the benchmark of credit: their exact gradients, and what the default makes of some."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from tests.benchmarks import held_out_worlds, world_figures, world_list
from tests.benchmarks.worlds import Array, Compiled, World, estimates, figures, samples

WORLDS = {w.name: w for w in [*world_list.all_worlds(), *held_out_worlds.all_worlds()]}


def test_names_tell_worlds_apart() -> None:
    assert len(WORLDS) == len(world_list.all_worlds()) + len(held_out_worlds.all_worlds())


def by_enumeration(world: World) -> Array:
    """The gradient by autograd through the expected outcome of every possible rollout."""
    compiled = Compiled(world)
    logits = torch.from_numpy(compiled.policy).clamp(min=1e-300).log()
    shared = torch.zeros(compiled.exact.shape, dtype=torch.float64, requires_grad=True)
    policy = (logits + shared[torch.from_numpy(compiled.context)]).softmax(1)
    actions, branches = compiled.policy.shape[1], compiled.chance.shape[2]

    def value(v: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for a, k in product(range(actions), range(branches)):
            chance, after = compiled.chance[v, a, k], int(compiled.after[v, a, k])
            if chance > 0:
                later = value(after) if after >= 0 else 0.0
                total = total + policy[v, a] * chance * (compiled.reward[v, a, k] + later)
        return total

    tasks = len(world.tasks or (world.start,))
    expected = sum((value(v) for v in range(tasks)), torch.zeros(())) / tasks
    found: Array = torch.autograd.grad(expected, shared)[0].numpy()
    return found


@pytest.mark.parametrize(
    "name",
    ["ok x 2", "corridor, few calls", "chain, 0.6", "budget", "opposed tasks", "when to stop"],
)
def test_exact_gradients_are_those_of_all_rollouts(name: str) -> None:
    np.testing.assert_allclose(
        Compiled(WORLDS[name]).exact, by_enumeration(WORLDS[name]), atol=1e-9
    )


def within(compiled: Compiled, cells: Array) -> float:
    """Variance of the expected reward to come of actions within cells, by how often they occur."""
    weight, q, total = compiled.visits[:, None] * compiled.policy, compiled.q(), 0.0
    for cell in np.unique(cells):
        w, x = weight[cells == cell], q[cells == cell]
        mean = (w * x).sum(0) / np.maximum(w.sum(0), 1e-300)
        total += float((w * (x - mean) ** 2).sum())
    return total


def test_states_that_recur_and_tell_the_truth_do_so() -> None:
    recurring = [world for world in WORLDS.values() if world.recurring]
    assert len(recurring) > 8
    for world in recurring:
        for task in world.tasks or (world.start,):
            compiled = Compiled(replace(world, start=task, tasks=()))
            everywhere = np.zeros(len(compiled.nodes))
            assert within(compiled, compiled.sees) < 1e-9 < within(compiled, everywhere), world.name
            paid = (compiled.reward != 0) & (compiled.after >= 0)
            assert world.process or not paid.any(), world.name


def of(
    name: str, preset: str, groups: int, size: int, batches: int, memory: bool = False
) -> tuple[float, float]:
    """Share of the gradient, and the ratio of its error to RLOO's."""
    world = Compiled(WORLDS[name])
    sampled = samples(world, groups, size, batches, 1)
    base = estimates(world_figures.RLOO, world, sampled)
    credit = world_figures.credit_of(preset, world.world)
    credit = world_figures.remembering(credit) if memory else credit
    found = estimates(credit, world, sampled)
    ratio, _ = world_figures.compared(found, base, world.exact)
    return figures(found, world.exact).share, ratio


@pytest.mark.parametrize("name", ["ok x 2", "certain rooms", "doors"])
def test_rloo_has_all_of_the_gradient(name: str) -> None:
    world = Compiled(WORLDS[name])
    found = estimates(world_figures.RLOO, world, samples(world, 1, 16, 400, 1))
    along = found @ world.exact.reshape(-1) / (world.exact**2).sum()
    assert abs(along.mean() - 1) < 4 * along.std() / len(along) ** 0.5 < 0.25


@pytest.mark.parametrize(
    "name", ["ok x 4", "-9 or -10, ok x 4", "lengths", "30 unique calls, 1.0 or 0.0"]
)
def test_the_default_learns_where_it_once_did_not(name: str) -> None:
    """The share was .05, .05, -.49 and .23."""
    share, ratio = of(name, "peers", 1, 16, 40)
    assert share > 0.85
    assert ratio < 1.1


def test_the_default_has_less_noise_where_states_tell_the_truth() -> None:
    assert of("long doors", "auto", 1, 16, 40)[1] < 0.6


@pytest.mark.parametrize(("name", "most"), [("rooms", 0.6), ("team", 0.5), ("doors", 0.4)])
def test_with_a_memory_it_has_less_noise_where_luck_decides_late(name: str, most: float) -> None:
    """One batch does not show that states tell the truth; many do."""
    share, ratio = of(name, "peers", 1, 16, 60, memory=True)
    assert share > 0.85
    assert ratio < most


@pytest.mark.parametrize("name", ["ok x 4", "flaky x 1", "walk", "walk, sum shown", "lengths"])
def test_with_a_memory_no_gradient_is_lost(name: str) -> None:
    share, ratio = of(name, "peers", 1, 16, 60, memory=True)
    assert share > 0.85
    assert ratio < 1.1


def test_figures_are_numbers_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["chain, 0.6", "aliased, no memory"]
    monkeypatch.setattr(world_list, "all_worlds", lambda: [WORLDS[name] for name in names])
    monkeypatch.setattr(held_out_worlds, "all_worlds", list)
    found = world_figures.measure(12)
    json.dumps(found, allow_nan=False)
    assert list(found["worlds"]) == names
    assert found["recurring world"].startswith("chain")
    assert found["minimax"] >= found["recurring"] >= found["recurring mean"] > 0
    assert "chain, 0.6" in world_figures.table(found["worlds"])
    assert found["worlds"]["aliased, no memory"]["1 x 16"]["auto"]["share"] is None


def test_an_error_has_no_scale_where_there_is_nothing_to_learn() -> None:
    world = Compiled(WORLDS["noise"])
    sampled = samples(world, 1, 16, 30, 1)
    one, many = (
        estimates(lambda batch, by=by: by * world_figures.RLOO(batch), world, sampled)
        for by in (1, 1000)
    )
    np.testing.assert_allclose(one, many, atol=1e-12)
    assert world_figures.compared(many, one, world.exact)[0] == pytest.approx(1)
