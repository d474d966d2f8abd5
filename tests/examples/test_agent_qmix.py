"""Topologies are those of the paper, and episodes are learned from as the store has them."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from agentrl.store import open_store
from tests.examples.parts import modules

Parts = dict[str, ModuleType]
NAMES = ("agent", "network", "policy", "topology", "train", "verifier", "world")


@pytest.fixture(scope="module")
def qmix() -> Iterator[Parts]:
    with modules("agent_qmix", *NAMES) as parts:
        yield parts


def test_modes_make_these_edges(qmix: Parts) -> None:
    topology = qmix["topology"]
    expected = [
        set(),
        {(0, 1), (0, 2), (1, 2)},
        {(0, 1), (1, 2)},
        {(1, 0), (2, 0), (2, 1)},
        {(0, 1), (1, 2)},
        {(0, 1), (1, 0), (1, 2), (2, 1)},
    ]
    assert [topology.graph([mode] * 3) for mode in range(6)] == expected
    assert topology.graph([0, 2, 2]) == {(1, 2), (2, 0)}
    assert topology.order({(1, 2), (2, 0)}, 3) == [1, 2, 0]
    assert topology.order({(1, 0), (2, 0), (2, 1)}, 3) == [2, 1, 0]


def test_everybody_speaks_once_after_those_they_listen_to(qmix: Parts) -> None:
    topology = qmix["topology"]
    for modes in itertools.product(range(6), repeat=3):
        edges = topology.graph(modes)
        spoken = topology.order(edges, 3)
        assert sorted(spoken) == [0, 1, 2]
        if 5 not in modes:
            assert all(spoken.index(a) < spoken.index(b) for a, b in edges)


def test_the_agents_know_the_answers_together(qmix: Parts) -> None:
    world = qmix["world"]
    for heldout in (False, True):
        for task in world.tasks("test", 100, heldout=heldout):
            said = task["question"]
            while world.hops(said):
                (shorter,) = {world.step(name, said) for name in world.RELATIONS} - {said}
                assert world.hops(shorter) == world.hops(said) - 1
                said = shorter
            assert said == task["answer"]


def test_heldout_questions_start_from_nobody_learned_from(qmix: Parts) -> None:
    world = qmix["world"]
    about = [
        {task["question"].split()[-1] for task in world.tasks("test", 500, heldout=heldout)}
        for heldout in (False, True)
    ]
    assert not about[0] & about[1]


def test_the_frozen_model_is_shown_every_word_it_needs(qmix: Parts) -> None:
    policy, dice = qmix["policy"], random.Random(0)
    for _ in range(100):
        conversation = policy.demonstrate(dice)
        assert set(" ".join(turn["content"] for turn in conversation).split()) <= set(policy.WORDS)


async def test_the_frozen_model_is_shown_what_the_agents_know_when_they_are_asked(
    qmix: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By role, and by how far each text that is known is from an answer."""
    agent, world, policy = qmix["agent"], qmix["world"], qmix["policy"]
    Call = tuple[str, tuple[int, ...]]
    shown, asked, dice = set[Call](), set[Call](), random.Random(0)

    def call(role: str, known: list[str]) -> Call:
        return role, tuple(world.hops(text) for text in known)

    async def ask(client: object, role: str, known: list[str]) -> tuple[str, int]:
        asked.add(call(role, known))
        return world.step(role, known[-1]), 0

    monkeypatch.setattr(agent, "ask", ask)
    team = agent.Team(lambda task, seen: [dice.randrange(6) for _ in range(3)])
    for task in world.tasks("test", 500):
        await team.play(None, task)
    for _ in range(2000):
        role, user, _ = (turn["content"] for turn in policy.demonstrate(dice))
        shown.add(call(role, user.split(" ; ")))
    assert {len(known) for _, known in asked} == {1, 2, 3, 4}
    assert asked <= shown


async def test_which_topology_answers_depends_on_the_question(
    qmix: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that make their step without fail: what is left is who hears whom."""
    agent, world, topology = qmix["agent"], qmix["world"], qmix["topology"]

    async def ask(client: object, role: str, known: list[str]) -> tuple[str, int]:
        return world.step(role, known[-1]), len(" ".join(known).split())

    monkeypatch.setattr(agent, "ask", ask)
    plans = {mode: [mode] * agent.ROUNDS for mode in topology.MODES}
    plans["changing"] = ["broadcast", "aggregate"]
    right: dict[str, set[str]] = {}
    tokens: dict[str, int] = {}
    for name, plan in plans.items():

        def choose(task: object, seen: list[object], plan: list[str] = plan) -> list[int]:
            return agent.fixed(plan[len(seen) - 1])(task, seen)

        for chain in world.CHAINS:
            question = world.ask(chain, world.RELATIONS[chain[0]][0][0])
            played = await agent.Team(choose).play(None, {"question": question})
            if not world.hops(played["answer"]):
                right.setdefault(name, set()).add("-".join(chain))
            tokens[name] = tokens.get(name, 0) + played["tokens"]
    alone = {"manager", "city", "mayor"}
    forward, back = {"manager-city", "city-mayor"}, {"mayor-manager", "mayor-city"}
    assert right["solo"] == alone
    assert right["broadcast"] == alone | forward
    assert right["aggregate"] == alone | back
    assert right["changing"] == alone | forward | back
    assert tokens["solo"] < min(tokens[mode] for mode in tokens.keys() - {"solo"})


def test_a_reward_pays_for_tokens(qmix: Parts) -> None:
    task = {"input": {"answer": "Oslo"}}
    verify = qmix["verifier"].verify
    assert verify(task, {"answer": "Oslo", "tokens": 80})["return"] == pytest.approx(0.96)
    assert verify(task, {"answer": "Lima", "tokens": 99_999})["return"] == pytest.approx(-0.1)


def test_observations_are_as_wide_as_they_say(qmix: Parts) -> None:
    agent = qmix["agent"]
    seen = agent.observe("city of Ada", ["Oslo", "", ""], [50, 0, 0], {(0, 1)})
    assert {len(row) for row in seen} == {agent.OBSERVATION}
    assert len(agent.state(seen, {(0, 1)})) == agent.STATE
    assert seen[0][agent.BYTES + agent.NAMES :] == [1.0, 1 / 3, 0.25, 0.0, 0.0, 0.0]
    assert seen[1][agent.BYTES + agent.NAMES :] == [0.0, 1 / 3, 0.0, 1.0, 0.0, 0.0]
    assert sum(value**2 for value in agent.fold("city of Ada")) == pytest.approx(1.0)


def test_agents_hear_each_other_along_the_graph_only(qmix: Parts) -> None:
    agent = qmix["agent"]
    torch.manual_seed(0)
    talk = qmix["network"].Talk(agent.OBSERVATION, 3, 6)
    seen = torch.rand(1, 1, 3, agent.OBSERVATION)
    seen[..., -3:] = 0.0
    seen[0, 0, 1, -3] = 1.0  # agent 1 hears agent 0
    other = seen.clone()
    other[0, 0, 0, 0] += 1.0
    change = (talk(other) - talk(seen)).abs().sum(-1)[0, 0]
    assert change[0] > 0
    assert change[1] > 0
    assert change[2] == 0


async def test_it_learns_from_the_store_and_goes_on_where_it_stopped(
    qmix: Parts, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tiny model says is noise; everything around it is as in any run."""
    train = qmix["train"]
    monkeypatch.setattr(train, "EPISODES", 4)
    shutil.copytree(tiny_model_dir, tmp_path / "frozen")
    options = argparse.Namespace(output=tmp_path, seed=0, steps=1, tasks=2)
    result = await asyncio.wait_for(train.run(options), 60)
    assert result.keys() == {"learned", "random", *qmix["topology"].MODES}
    assert result["broadcast"]["tokens"] > result["solo"]["tokens"] > 0
    options.steps = 2
    await asyncio.wait_for(train.run(options), 60)
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        assert [row.step for row in await store.steps(train.RUN) if row.committed] == [0, 1]
        rows = await store.rollouts(train.RUN, trained=0)
        assert len(rows) == 4
        trace = await store.trace(rows[0].id)
        assert trace is not None
        assert {(call.policy, call.version) for call in trace.transitions} == {("policy", 0)}
        assert [call.role for call in trace.transitions].count("city") == 2
        episode = train.episode(rows[0])
    assert episode.rewards.tolist() == [0.0, pytest.approx(rows[0].reward("return"))]
    assert episode.terminated
    learned = train.learner(0)
    learned.load_state_dict(torch.load(tmp_path / "checkpoints" / "000002" / "learner.pt"))
    assert learned.learned == train.UPDATES * (4 + 8)  # the second step also of the first's


def test_the_last_round_is_learned_from(qmix: Parts) -> None:
    """The target of the last joint step is its reward, and of the first what it leads to."""
    train, agent = qmix["train"], qmix["agent"]
    torch.manual_seed(0)
    mixed, dice = train.learner(0), random.Random(0)
    observations = torch.rand(3, 3, agent.OBSERVATION)
    observations[..., -3:] = 0.0
    states = torch.rand(3, agent.STATE)
    episodes = []
    for _ in range(100):
        modes = torch.tensor([[dice.randrange(6) for _ in range(3)] for _ in range(2)])
        rewards = torch.tensor([0.0, float(modes[1, 0] == 3)])  # of the last round
        episodes.append(train.TeamEpisode(observations, states, modes, rewards))
    for _ in range(200):
        mixed.learn(dice.sample(episodes, 32))
    assert mixed.act(observations[:2], 0.0, dice)[0] == 3
