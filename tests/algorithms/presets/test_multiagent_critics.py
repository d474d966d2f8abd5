"""Counterfactual credit of teams: against loops, through JSON, and where its values are known."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import isnan
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.multiagent import (
    CentralCritic,
    CriticKind,
    CriticTraining,
    MixedCritic,
    TeamCritic,
    TeamEpisode,
    TeamShape,
    counterfactual_advantage,
    pad_episodes,
)
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.policies import LoadedModel
from agentrl.algorithms.train.stages import make_updater
from agentrl.core.errors import PolicyError, TrainingError
from agentrl.core.types import Group, Reward, Rollout
from tests import factories
from tests.benchmarks.learner import network, tokenizer

KINDS: tuple[CriticKind, ...] = ("central", "vdn", "qmix")
OPTIONS = {"roles": ["planner", "solver"], "actions": ["left", "right"], "width": 8}
SHAPE = TeamShape(agents=2, observation=3, actions=3, state=4)
TRAINING = CriticTraining(gamma=0.9, hidden=8, embed=4)


def test_the_published_baseline() -> None:
    """E6 of the catalogue."""
    q, policy = torch.tensor([1.0, 2.0]), torch.tensor([0.2, 0.8])
    both = [counterfactual_advantage(q, policy, torch.tensor(a)).item() for a in (0, 1)]
    assert both == pytest.approx([-0.8, 0.2])
    # Where only some actions are available, the policy is that over these.
    policy = torch.tensor([0.1, 0.4])
    assert counterfactual_advantage(q, policy, torch.tensor(0)).item() == pytest.approx(-0.8)


def episodes(seed: int, lengths: Sequence[int] = (1, 3, 2)) -> list[TeamEpisode]:
    """Of random steps; in some of them an agent does not act."""
    draw = torch.Generator().manual_seed(seed)
    return [
        TeamEpisode(
            torch.rand(steps, 2, 3, generator=draw),
            torch.rand(steps, 4, generator=draw),
            torch.randint(0, 3, (steps, 2), generator=draw),
            torch.rand(steps, generator=draw),
            acting=torch.tensor([[True, True], [False, True], [True, True]])[:steps],
        )
        for steps in lengths
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_are_those_of_loops_over_agents(kind: CriticKind) -> None:
    critic = TeamCritic(kind, SHAPE, TRAINING)
    data = episodes(0)
    found = critic.advantages(data)
    for row, episode in enumerate(data):
        for t, agent in product(range(3), range(2)):
            a = found[row, t, agent].item()
            if t >= len(episode.rewards) or not episode.acting[t, agent]:  # type: ignore[index]
                assert isnan(a)
                continue
            assert a == pytest.approx(alone(critic, episode, t, agent), abs=1e-6)


def alone(critic: TeamCritic, episode: TeamEpisode, t: int, agent: int) -> float:
    """Q of the joint action minus its mean over what the agent could do, each valued anew."""
    who = torch.eye(2)[agent]
    seen = torch.cat([episode.observations[t, agent], who])
    policy = critic.online["policy"].body(seen).softmax(-1)
    values = []
    for action in range(3):
        joint = episode.actions.clone()
        joint[t, agent] = action
        changed = pad_episodes([replace(episode, actions=joint)], 3)
        values.append(critic.online["critic"](changed)[0, t, agent, action])
    q = torch.stack(values)
    return (q[episode.actions[t, agent]] - (policy * q).sum()).item()


def test_a_central_critic_never_sees_the_action_that_it_values() -> None:
    central, data = CentralCritic(SHAPE, 8), pad_episodes(episodes(1), 3)
    other = replace(data, actions=data.actions.clone())
    other.actions[:, 0, 0] = (other.actions[:, 0, 0] + 1) % 3
    before, after = central(data)[:, 0], central(other)[:, 0]
    assert torch.equal(before[:, 0], after[:, 0])
    assert not torch.allclose(before[:, 1], after[:, 1])


@pytest.mark.parametrize("kind", ["vdn", "qmix"])
def test_a_mixed_critic_replaces_one_utility_at_a_time(kind: CriticKind) -> None:
    assert kind != "central"
    mixed, data = MixedCritic(kind, SHAPE, TRAINING), pad_episodes(episodes(2), 3)
    q, values = mixed.utilities(data.observations[:, :3]), mixed(data)
    for row, t, agent, action in product(range(3), range(3), range(2), range(3)):
        joint = [
            q[row, t, i, action if i == agent else data.actions[row, t, i]]
            if i == agent or data.acting[row, t, i]
            else torch.tensor(0.0)
            for i in range(2)
        ]
        expected = mixed.mixer(torch.stack(joint), data.states[row, t])
        assert values[row, t, agent, action].item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_learning_is_of_a_copy_and_padding_changes_nothing(kind: CriticKind) -> None:
    critic = TeamCritic(kind, SHAPE, TRAINING)
    before = json.dumps(critic.dump())
    short = episodes(3, (1, 2))
    after = critic.learned(short)
    assert json.dumps(critic.dump()) == before != json.dumps(after.dump())
    wide = pad_episodes(short, 3)
    other = copy.deepcopy(critic)
    grown = replace(
        wide,
        **{
            name: torch.cat([x, torch.ones_like(x[:, -1:])], 1)
            for name in ("observations", "states", "actions", "rewards", "available", "acting")
            for x in [getattr(wide, name)]
        },
        **{
            name: torch.cat([x, torch.zeros_like(x[:, -1:])], 1)
            for name in ("live", "last", "terminated")
            for x in [getattr(wide, name)]
        },
    )
    for _ in range(TRAINING.updates):
        other._step(grown)
    for p, q in zip(after.online.parameters(), other.online.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_goes_on_from_its_checkpoint_bit_for_bit(kind: CriticKind) -> None:
    critic = TeamCritic(kind, SHAPE, TRAINING).learned(episodes(4))
    again = TeamCritic(kind, SHAPE, TRAINING, seed=1)
    again.restore(json.loads(json.dumps(critic.dump())))
    left, right = critic.learned(episodes(5)), again.learned(episodes(5))
    assert left.dump() == right.dump() != critic.dump()


def team(pays: Callable[[int, int], float], count: int) -> list[TeamEpisode]:
    """One step of two agents that act at random."""
    draw = random.Random(0)
    joint = [(draw.randrange(2), draw.randrange(2)) for _ in range(count)]
    one = torch.ones(1, 2, 3), torch.ones(1, 4)
    return [TeamEpisode(*one, torch.tensor([[a, b]]), torch.tensor([pays(a, b)])) for a, b in joint]


@pytest.mark.parametrize("kind", KINDS)
def test_credit_goes_to_the_agent_whose_action_it_was(kind: CriticKind) -> None:
    """The reward is the first agent's action; the second one's does nothing."""
    played = team(lambda a, b: float(a), 64)
    critic = TeamCritic(kind, SHAPE, replace(TRAINING, updates=60, lr=0.01)).learned(played)
    a = critic.advantages(played)[:, 0]
    first = torch.tensor([episode.actions[0, 0].item() for episode in played])
    often = (first == 1).float().mean().item()
    assert a[first == 1, 0].mean().item() == pytest.approx(1 - often, abs=0.1)
    assert a[first == 0, 0].mean().item() == pytest.approx(-often, abs=0.1)
    assert a[:, 1].abs().max().item() < 0.1


# -- rollouts --------------------------------------------------------------------------------------

SAYS = ("left", " RIGHT ", "what?")


def rollout(name: str, says: Sequence[int], outcome: float | None) -> Rollout:
    """Calls of planner and solver in turns, which see a number and answer."""
    calls = [
        factories.call(
            f"{name}/{i}",
            [i + 1],
            [5] * (1 + i % 2),
            attempt=name,
            index=i,
            role=("planner", "solver")[i % 2],
            messages=[{"role": "user", "content": f"see {i} {says[:i]}"}],
            answer={"role": "assistant", "content": SAYS[said]},
        )
        for i, said in enumerate(says)
    ]
    return factories.rollout(name, calls, [] if outcome is None else [Reward(value=outcome)])


def step_of(seed: int) -> list[Group]:
    draw = random.Random(seed)
    rollouts = [
        rollout(
            f"{seed}-{i}",
            [draw.randrange(3) for _ in range(draw.randint(1, 5))],
            draw.choice([0.0, 1.0, None]) if i else 1.0,
        )
        for i in range(5)
    ]
    return [factories.group(*rollouts, step=seed)]


def taken(algo: Algo, state: AlgorithmState, groups: list[Group]) -> Batch:
    batch = build_batch(groups, reward_names=algo.rewards)
    recall = state.recall(batch, groups)
    state.adopt(recall)
    return replace(batch, remembered=recall.columns)


def psi_of(algo: Algo, batch: Batch) -> Tensor:
    terms = objective.loss_terms(algo, batch, GivenLogProbs(), fresh=True)
    return objective.loss_coefficients(
        algo, terms, batch.sampler_logprobs.double(), torch.arange(batch.n_tokens)
    )


def test_a_step_that_is_begun_again_comes_to_the_same() -> None:
    algo = make("coma", OPTIONS)
    state = AlgorithmState(algo.remembered)
    taken(algo, state, step_of(0))
    saved = json.loads(json.dumps(state.dump()))
    first = psi_of(algo, taken(algo, state, step_of(1)))
    again = AlgorithmState(algo.remembered, seed=1)
    again.restore(saved)
    assert torch.equal(psi_of(algo, taken(algo, again, step_of(1))), first)
    assert again.dump() == state.dump() != saved


def test_the_critic_of_a_run_begins_with_the_seed_of_the_run() -> None:
    algo = make("coma", OPTIONS)
    model = LoadedModel("-", network(64, 64, 1, torch.float32), tokenizer(), policies=["policy"])

    def begun(seed: int) -> dict[str, Any]:
        settings = {"seed": seed, "policy": {"model": "-"}, "learner": {"threads": 1}}
        updater = make_updater(factories.config(**settings), "policy", algo, model)
        return updater.state.dump()

    first, again, other = (begun(seed) for seed in (1, 1, 2))
    assert first == again != other


def test_nothing_known_teaches_nothing() -> None:
    algo = make("coma", OPTIONS)
    state = AlgorithmState(algo.remembered)
    before = json.dumps(state.dump())
    groups = [factories.group(rollout("x", [0, 1], None))]
    assert (psi_of(algo, taken(algo, state, groups)) == 0).all()
    assert json.dumps(state.dump()) == before


def test_what_it_cannot_use_is_refused() -> None:
    wrong = make("coma", {**OPTIONS, "roles": ["planer", "solver"]})
    with pytest.raises(TrainingError, match=r"in the role 'planer'; did you mean 'planner'\?"):
        taken(wrong, AlgorithmState(wrong.remembered), step_of(0))
    algo = make("coma", OPTIONS)
    (name,) = AlgorithmState(algo.remembered).parts
    other = TeamCritic("central", SHAPE, TRAINING).dump()
    for broken in (other, "!", 3):
        with pytest.raises(PolicyError, match=r"is damaged \("):
            AlgorithmState(algo.remembered).restore({name: broken})
