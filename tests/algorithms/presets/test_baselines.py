"""Credit from earlier steps: against loops, through JSON, and over a step that is begun again."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from msgspec import structs
from torch import Tensor

from agentrl.algorithms.credit.calls import CallRewards, CountedMeans, Ema, EmaMeans, Returns
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch, last_observation
from agentrl.algorithms.data.state import AlgorithmState, Recalled
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.core.errors import ConfigError, PolicyError, TrainingError
from agentrl.core.types import Group, Purpose, Reward, Rollout, Scope, float32
from tests import factories

ROLES = ("black", "white")


def play(name: str, group: str, outcomes: dict[str, float], game: str, cells: list[int]) -> Rollout:
    """A rollout of one call per cell, by the roles in turn; each call is one state."""
    calls = [
        factories.call(
            f"{name}/{i}",
            [cell, i],
            [50, 60][: 1 + cell % 2],
            attempt=name,
            index=i,
            logprobs=float32([-0.5, -1.0][: 1 + cell % 2]),
            role=ROLES[i % 2],
            messages=[{"role": "user", "content": f"cell {cell}"}],
        )
        for i, cell in enumerate(cells)
    ]
    scores = [Reward(value=v, scope=Scope.ROLE, target=role) for role, v in outcomes.items()]
    total = [Reward(value=sum(outcomes.values()))] if outcomes else []
    return factories.rollout(name, calls, scores + total, group=group, task={"game": game})


def step_of(seed: int, step: int) -> list[Group]:
    """Three groups of three random games; some players get no reward."""
    draw = random.Random(f"{seed}/{step}")
    groups = []
    for g in range(3):
        name = f"{step}-{g}"
        rollouts = [
            play(
                f"{name}/{i}",
                name,
                {role: draw.randint(-2, 2) / 2 for role in ROLES if draw.random() < 0.8},
                "go" if g else "chess",
                [draw.randint(0, 3) for _ in range(draw.randint(2, 4))],
            )
            for i in range(3)
        ]
        groups.append(factories.group(*rollouts, id=name, step=step))
    return groups


def recalled(algo: Algo, state: AlgorithmState, groups: list[Group]) -> Batch:
    """The batch of a step with what is remembered; the state then is that after the step."""
    batch = build_batch(groups, reward_names=algo.rewards)
    recall = state.recall(batch, groups)
    state.adopt(recall)
    return replace(batch, remembered=recall.columns)


def psi_of(algo: Algo, batch: Batch) -> torch.Tensor:
    terms = objective.loss_terms(algo, batch, GivenLogProbs(), fresh=True)
    index = torch.arange(batch.n_tokens)
    return objective.loss_coefficients(algo, terms, batch.sampler_logprobs.double(), index)


# -- SPIRAL ----------------------------------------------------------------------------------------


def test_any_comparison_may_be_with_the_running_mean() -> None:
    algo = make("reinforce+ema", {"ema_decay": 0.5})
    state = AlgorithmState(algo.remembered)
    groups = [
        factories.group(
            *[play(str(i), "g", {"black": x}, "go", [0]) for i, x in enumerate((1.0, 3.0))]
        )
    ]
    assert objective.compute_advantages(algo, recalled(algo, state, groups)).tolist() == [1.0, 2.5]
    assert objective.compute_advantages(algo, recalled(algo, state, groups)).tolist() == [
        -0.75,
        1.625,
    ]
    per_role = make("grpo+per-role+ema", {})
    assert per_role.remembered[0].level == "role"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"\+ema replaces the baseline of a comparison"):
        make("reinforce+++ema", {})


def test_a_field_that_the_task_does_not_have_is_refused() -> None:
    algo = make("spiral", {"key": "gmae"})
    with pytest.raises(TrainingError, match=r"group '0-0' has no field 'gmae'.*'game'"):
        recalled(algo, AlgorithmState(algo.remembered), step_of(0, 0))


# -- value tables ----------------------------------------------------------------------------------


def test_a_table_has_the_mean_return_of_earlier_steps() -> None:
    algo = make("agent-r1+tabular", {"tabular_gamma": 0.9})
    (table,) = algo.remembered
    state, seen = AlgorithmState(algo.remembered), dict[tuple[str, object], list[float]]()
    for step in range(4):
        groups = step_of(2, step)
        batch = recalled(algo, state, groups)
        values, returns = [], []
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            calls = rollout.transitions
            for i, call in enumerate(calls):
                place = (rollout.task["game"], last_observation(call))
                past = seen.get(place, [])
                values.append(math.fsum(past) / len(past) if past else 0.0)
                if not math.isnan(rollout.reward()):
                    returns.append((place, rollout.reward() * 0.9 ** (len(calls) - 1 - i)))
        for place, value in returns:
            seen.setdefault(place, []).append(value)
        assert batch.remembered[table.name].tolist() == pytest.approx(values)
    assert any(value != 0 for value in values)


def test_a_mean_counts_what_it_has_seen() -> None:
    x = torch.tensor([1.0, 3.0, math.nan, 5.0], dtype=torch.float64)
    before, after = CountedMeans({"a": (1.0, 2)}).read(["a", "b", "b", "a"], x)
    assert before.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert after == {"a": (2.0, 4), "b": (3.0, 1)}


def test_nothing_known_changes_nothing() -> None:
    missing = torch.tensor([math.nan], dtype=torch.float64)
    assert EmaMeans(0.9, {"a": 2.0}).read(["a"], missing)[1] == {"a": 2.0}
    assert CountedMeans().read(["a"], missing)[1] == {}
    assert EmaMeans(0.9).read([], torch.empty(0, dtype=torch.float64))[1] == {}


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["spiral", "agent-r1+tabular"])
def test_a_replayed_step_has_the_same_psi_bit_for_bit(name: str) -> None:
    algo = make(name, {})
    state = AlgorithmState(algo.remembered)
    checkpoints, made = [json.dumps(state.dump())], []
    for step in range(4):
        made.append(psi_of(algo, recalled(algo, state, step_of(3, step))))
        checkpoints.append(json.dumps(state.dump()))
    for step, (before, after) in enumerate(pairwise(checkpoints)):
        again = AlgorithmState(algo.remembered)
        again.restore(json.loads(before))
        assert torch.equal(psi_of(algo, recalled(algo, again, step_of(3, step))), made[step])
        assert json.dumps(again.dump()) == after
    assert not torch.equal(made[0], psi_of(algo, recalled(algo, state, step_of(3, 0))))


def test_a_step_that_is_not_trained_is_not_remembered() -> None:
    algo = make("spiral", {})
    state, groups = AlgorithmState(algo.remembered), step_of(4, 0)
    batch = build_batch(groups, reward_names=algo.rewards)
    first = state.recall(batch, groups)
    assert state.recall(batch, groups).after == first.after
    assert list(state.dump().values()) == [{}]
    state.adopt(first)
    assert state.recall(batch, groups).after != first.after


def test_credit_without_what_it_remembers_is_refused() -> None:
    algo = make("spiral", {})
    with pytest.raises(TrainingError, match=r"step 1: Ema\(.*reads values of earlier steps"):
        algo.credit(build_batch(step_of(0, 0), reward_names=algo.rewards))


def test_an_older_checkpoint_begins_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    state = AlgorithmState(make("spiral", {}).remembered)
    with caplog.at_level(logging.WARNING):
        state.restore({})
    assert "has no state of Ema(reward='role:outcome'" in caplog.text
    assert list(state.dump().values()) == [{}]


def test_the_state_of_another_algorithm_is_refused() -> None:
    spiral = AlgorithmState(make("spiral", {}).remembered)
    for state in (AlgorithmState(), AlgorithmState(make("spiral", {"decay": 0.9}).remembered)):
        with pytest.raises(PolicyError, match="of another algorithm"):
            state.restore(spiral.dump())
    (name,) = spiral.dump()
    with pytest.raises(PolicyError, match="is damaged"):
        spiral.restore({name: {"/black": "x"}})


def test_rollouts_that_are_not_trained_change_no_baseline() -> None:
    algo = make("spiral", {})
    (group, *_) = step_of(5, 0)
    evaluated = [structs.replace(r, purpose=Purpose.EVAL) for r in group.rollouts[1:]]
    mixed = structs.replace(group, rollouts=[group.rollouts[0], *evaluated])
    alone = structs.replace(group, rollouts=group.rollouts[:1])
    states = AlgorithmState(algo.remembered), AlgorithmState(algo.remembered)
    for state, one in zip(states, (mixed, alone), strict=True):
        recalled(algo, state, [one])
    assert states[0].dump() == states[1].dump()


# Names in checkpoints are for ever: a line here never changes.
STORED: dict[tuple[str, str], str] = {
    ("spiral", "{}"): "running-mean('role:outcome')",
    ("spiral", '{"decay": 0.9, "key": "game"}'): "running-mean('role:outcome',0.9,'game')",
    ("grpo+ema", "{}"): "running-mean()",
    ("dapo+ema", '{"overlong_limit": 6}'): "running-mean(('outcome',6,4096))",
    ("agent-r1+tabular", "{}"): "mean-return()",
    ("coma", '{"roles": ["a"], "actions": ["b"]}'): "team-critic('central',(['a'],['b']),())",
}


@pytest.mark.parametrize(("name", "options"), STORED)
def test_the_names_of_states_in_checkpoints_stay(name: str, options: str) -> None:
    memories = make(name, json.loads(options)).remembered
    assert [memory.name for memory in memories] == [STORED[name, options]]


def test_a_baseline_of_an_own_reward_survives_a_restart() -> None:
    def column() -> Callable[[Batch], Tensor]:
        """Another process has the function at another address."""

        def style(batch: Batch) -> Tensor:
            return batch.rewards["style"]

        return style

    one, two = (AlgorithmState((Ema(column()),)) for _ in range(2))
    one.adopt(Recalled({}, {Ema(column()).name: EmaMeans(0.95, {"/": 0.5})}))
    two.restore(one.dump())
    assert list(two.dump().values()) == [{"/": 0.5}]


def test_columns_that_differ_never_share_a_state() -> None:
    with pytest.raises(TrainingError, match=r"share the state running-mean\(\(\)\)"):
        AlgorithmState((Ema(CallRewards()), Ema(Returns())))
