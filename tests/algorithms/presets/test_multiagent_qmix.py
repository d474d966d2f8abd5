"""Teams that learn values: what VDN and QMIX can and cannot represent, masks, checkpoints."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from agentrl.algorithms.presets.multiagent import (
    VDN,
    FactoredQLearner,
    QMix,
    TeamEpisode,
    pad_episodes,
)
from agentrl.core.errors import TrainingError


def learned(
    kind: type[FactoredQLearner], data: Sequence[TeamEpisode], steps: int, actions: int = 2
) -> FactoredQLearner:
    """With utilities that see their place alone."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, actions))

    team = kind(2, 3, actions, 3, network=network, embed=8, lr=0.02, every=64)
    for _ in range(steps):
        team.learn(data)
    return team


PAYS = {1: [[7, 7], [7, 7]], 2: [[0, 1], [1, 8]]}  # by where the first agent went


def two_step(first: Sequence[int], second: Sequence[int]) -> TeamEpisode:
    """The game of the QMIX paper: the first agent chooses the matrix that both then play."""
    where = 1 + first[0]
    states = torch.eye(3)[[0, where]]
    reward = float(PAYS[where][second[0]][second[1]])
    observations = states[:, None].expand(2, 2, 3)
    return TeamEpisode(
        observations, states, torch.tensor([first, second]), torch.tensor([0.0, reward])
    )


def greedy(team: FactoredQLearner) -> int:
    """What the team gets when every agent does what it finds best."""
    nothing = random.Random(0)
    start = torch.eye(3)[[0]][:, None].expand(1, 2, 3)
    where = 1 + team.act(start, 0.0, nothing)[0]
    history = torch.eye(3)[[0, where]][:, None].expand(2, 2, 3)
    first, second = team.act(history, 0.0, nothing)
    return PAYS[where][first][second]


@pytest.mark.parametrize(("kind", "reached"), [(VDN, 7), (QMix, 8)])
def test_the_two_step_game(kind: type[FactoredQLearner], reached: int) -> None:
    """arXiv 1803.11485: the sum cannot value (1, 1) at 8 while the others are 0 and 1, so VDN goes
    for the safe 7; QMIX can, as the matrix is monotone."""
    joint = list(product((0, 1), repeat=2))
    team = learned(kind, [two_step(a, b) for a, b in product(joint, joint)], 200)
    assert greedy(team) == reached


@pytest.mark.parametrize("kind", [VDN, QMix])
def test_what_is_not_monotone_is_out_of_reach_of_both(kind: type[FactoredQLearner]) -> None:
    """A failed joint action costs so much that each agent finds best what is safe, (0, 0) being
    best together. The matrix of QTRAN, arXiv 1905.05408."""
    pays = [[8.0, -12.0, -12.0], [-12.0, 0.0, 0.0], [-12.0, 0.0, 0.0]]
    state = torch.eye(3)[[0]]
    data = [
        TeamEpisode(
            state[:, None].expand(1, 2, 3), state, torch.tensor([[a, b]]), torch.tensor([x])
        )
        for a, row in enumerate(pays)
        for b, x in enumerate(row)
    ]
    team = learned(kind, data, 60, actions=3)
    first, second = team.act(state[:, None].expand(1, 2, 3), 0.0, random.Random(0))
    assert pays[first][second] == 0


# -- masks and targets -----------------------------------------------------------------------------


def random_episode(seed: int, steps: int, *, terminated: bool = True) -> TeamEpisode:
    draw = torch.Generator().manual_seed(seed)
    available = torch.rand(steps + 1, 2, 3, generator=draw) < 0.7
    available[..., 0] = True
    return TeamEpisode(
        torch.rand(steps + 1, 2, 4, generator=draw),
        torch.rand(steps + 1, 5, generator=draw),
        torch.randint(0, 3, (steps, 2), generator=draw),
        torch.rand(steps, generator=draw),
        terminated,
        available,
        torch.rand(steps + 1, 2, generator=draw) < 0.8,
    )


def team_of(seed: int = 0, kind: type[FactoredQLearner] = QMix) -> FactoredQLearner:
    team = kind(2, 4, 3, 5, hidden=8, embed=4, every=2, seed=seed)
    with torch.no_grad():
        for p in team.target.parameters():  # so that the two can be told apart
            p += 0.1
    return team


def loss_of(team: FactoredQLearner, data: Sequence[TeamEpisode]) -> float:
    return copy.deepcopy(team).learn(data)["loss"]


def test_targets_are_double_q_step_by_step() -> None:
    team = team_of()
    for terminated in (True, False):
        episode = random_episode(0, 3, terminated=terminated)
        assert episode.available is not None
        assert episode.acting is not None
        online, target = (
            part["utilities"](episode.observations[None])[0] for part in (team.online, team.target)
        )
        expected = []
        for t in range(3):
            joint = []
            for agent in range(2):
                allowed = episode.available[t + 1, agent].nonzero().squeeze(1).tolist()
                action = max(allowed, key=lambda a, t=t, i=agent: online[t + 1, i, a].item())
                acts = bool(episode.acting[t + 1, agent])
                joint.append(target[t + 1, agent, action] if acts else torch.tensor(0.0))
            after = team.target["mixer"](torch.stack(joint), episode.states[t + 1]).item()
            over = terminated and t == 2
            expected.append(episode.rewards[t].item() + (0.0 if over else 0.99 * after))
        assert team.targets(pad_episodes([episode], 3))[0].tolist() == pytest.approx(
            expected, abs=1e-5
        )


def test_an_episode_teaches_the_same_beside_a_longer_one() -> None:
    team, short, long = team_of(), random_episode(1, 1), random_episode(2, 4, terminated=False)
    losses = loss_of(team, [short]), loss_of(team, [long])
    assert loss_of(team, [short, long]) == pytest.approx((losses[0] + 4 * losses[1]) / 5, rel=1e-5)


def test_after_the_end_there_is_nothing_to_see() -> None:
    team, whole = team_of(), random_episode(3, 2)
    columns = ("observations", "states", "available", "acting")
    cut = replace(whole, **{name: getattr(whole, name)[:2] for name in columns})
    assert loss_of(team, [cut]) == loss_of(team, [whole])


def test_the_target_follows_after_so_many_episodes() -> None:
    team, data = team_of(), [random_episode(4, 2)]

    def same() -> bool:
        online, target = team.online.parameters(), team.target.parameters()
        return all(torch.equal(p, q) for p, q in zip(online, target, strict=True))

    team.learn(data)
    assert not same()
    team.learn(data)
    assert same()
    team.learn(data)
    assert not same()


def test_agents_do_their_best_of_what_is_available_or_anything() -> None:
    team, seen = team_of(), random_episode(5, 2).observations
    q: Tensor = team.online["utilities"](seen[None])[0, -1]
    assert team.act(seen, 0.0, random.Random(0)) == q.argmax(-1).tolist()
    available = torch.tensor([[True, False, True], [False, True, False]])
    rng = random.Random(0)
    drawn = [team.act(seen, 1.0, rng, available) for _ in range(50)]
    assert {a for a, _ in drawn} == {0, 2}
    assert {b for _, b in drawn} == {1}


@pytest.mark.parametrize("kind", [VDN, QMix])
def test_a_team_goes_on_from_what_it_saved(kind: type[FactoredQLearner]) -> None:
    first, data = team_of(0, kind), [random_episode(6, 3), random_episode(7, 2)]
    first.learn(data)
    second = team_of(1, kind)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert [first.learn(data) for _ in range(3)] == [second.learn(data) for _ in range(3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actions": torch.zeros(1, 2, dtype=torch.int64)}, "1 rows of actions for 2 steps"),
        ({"states": torch.zeros(2, 5)}, "2 rows of states for 2 steps; give 3"),
        ({"actions": torch.full((2, 2), 3)}, r"an action is not in \[0, 3\)"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    episode = replace(random_episode(8, 2, terminated=False), **change)
    with pytest.raises(TrainingError, match=message):
        pad_episodes([episode], 3)
