"""COMA, arXiv 1705.08926: counterfactual advantages from a critic of the team.

central: a network that maps the state and the other agents' actions to a value of every action of
an agent. vdn and qmix: mixed utilities of each agent's own actions (1706.05296, 1803.11485); as
critics of policies, 2007.12322. All learn TD(lambda) targets of the acting policy, together with a
model of that policy. Each step learns from its own episodes only, without off-policy correction, so
that the critic does not learn values of an outdated policy (as in the authors' code).
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import ClassVar, Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn
from torch.nn import functional

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level
from agentrl.algorithms.data.state import RememberedColumn, StatePart
from agentrl.algorithms.multiagent.episodes import (
    Episodes,
    JointActionSpace,
    TeamEpisode,
    pad_episodes,
)
from agentrl.algorithms.multiagent.qmix import build_mixer, lambda_returns, of_action
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.declare import PPO_CLIP, Discount, Names, preset
from agentrl.config import Count, Positive
from agentrl.types import Json, Rollout

Kind = Literal["central", "vdn", "qmix"]


@dataclass(frozen=True, slots=True)
class TeamShape:
    """Number of agents and actions, and sizes of observations and states."""

    agents: int
    observation: int
    actions: int
    state: int


@dataclass(frozen=True, slots=True)
class CriticTraining:
    gamma: float = 0.99
    lam: float = 0.8
    lr: float = 5e-3
    updates: int = 8  # optimizer steps per training step
    hidden: int = 64
    embed: int = 32
    max_grad_norm: float = 10.0


class AgentNetwork(nn.Module):
    """An MLP from features [..., n, f] and the agent's index to numbers of actions [..., n, a]."""

    def __init__(self, agents: int, features: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.agents = agents
        self.body = nn.Sequential(
            nn.Linear(features + agents, hidden), nn.ReLU(), nn.Linear(hidden, actions)
        )

    def forward(self, features: Tensor) -> Tensor:
        names = torch.eye(self.agents).expand(*features.shape[:-1], self.agents)
        out: Tensor = self.body(torch.cat([features, names], -1))
        return out


class CentralCritic(nn.Module):
    """COMA's critic: Q(s, (u_-i, a)) for every action a of each agent i."""

    def __init__(self, shape: TeamShape, hidden: int) -> None:
        super().__init__()
        self.actions = shape.actions
        features = shape.state + shape.agents * shape.actions
        self.each = AgentNetwork(shape.agents, features, shape.actions, hidden)

    def forward(self, data: Episodes) -> Tensor:
        n = data.actions.shape[-1]
        chosen = functional.one_hot(data.actions, self.actions).float()
        chosen = chosen * data.acting[:, :-1, :, None]
        others = chosen[:, :, None] * (1 - torch.eye(n))[:, :, None]  # mask the agent's own action
        state = data.states[:, :-1, None].expand(-1, -1, n, -1)
        out: Tensor = self.each(torch.cat([state, others.flatten(-2)], -1))
        return out


class MixedCritic(nn.Module):
    """Q(s, (u_-i, a)) from mixed utilities, with the utility of a in the place of agent i's."""

    def __init__(
        self, kind: Literal["vdn", "qmix"], shape: TeamShape, training: CriticTraining
    ) -> None:
        super().__init__()
        self.utilities = AgentNetwork(
            shape.agents, shape.observation, shape.actions, training.hidden
        )
        self.mixer = build_mixer(kind, shape.agents, shape.state, training.embed)

    def forward(self, data: Episodes) -> Tensor:
        q = self.utilities(data.observations[:, :-1])
        taken = torch.where(data.acting[:, :-1], of_action(q, data.actions), 0.0)
        own = torch.eye(data.actions.shape[-1], dtype=torch.bool)[:, None]  # [n, 1, n]
        utilities = torch.where(own, q[..., None], taken[:, :, None, None])  # [B, T, n, a, n]
        state = data.states[:, :-1, None, None].expand(*utilities.shape[:-1], -1)
        out: Tensor = self.mixer(utilities, state)
        return out


class TeamCritic:
    """The critic as a `StatePart`, with its networks, target copies and optimizer. Invariant: the
    advantages of a step come from the networks before they learned that step, so that a baseline
    does not depend on the action it is compared with."""

    def __init__(
        self, kind: Kind, shape: TeamShape, training: CriticTraining, seed: int = 0
    ) -> None:
        self.shape, self.training = shape, training
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            critic = (
                CentralCritic(shape, training.hidden)
                if kind == "central"
                else MixedCritic(kind, shape, training)
            )
            policy = AgentNetwork(shape.agents, shape.observation, shape.actions, training.hidden)
        self.online = nn.ModuleDict({"critic": critic, "policy": policy})
        self.target = copy.deepcopy(critic).requires_grad_(False)
        self.optimizer = torch.optim.RMSprop(
            self.online.parameters(), training.lr, alpha=0.99, eps=1e-5
        )

    def advantages(self, episodes: Sequence[TeamEpisode]) -> Tensor:
        """Q of the joint action minus its mean over the agent's own actions under its policy, with
        the others' actions fixed, [B, T, n]; NaN for an agent that did not act."""
        data = pad_episodes(episodes, self.shape.actions)
        with torch.no_grad():
            q = self.online["critic"](data)
            policy = self.online["policy"](data.observations[:, :-1]).softmax(-1)
        advantage = counterfactual_advantage(q, policy, data.actions)
        return torch.where(data.acted, advantage, torch.nan)

    def learned(self, episodes: Sequence[TeamEpisode]) -> TeamCritic:
        """A copy of the critic, trained for one step on these episodes."""
        after = copy.deepcopy(self)
        after.target.load_state_dict(self.online["critic"].state_dict())
        data = pad_episodes(episodes, self.shape.actions)
        for _ in range(self.training.updates):
            after._step(data)
        return after

    def _step(self, data: Episodes) -> None:
        with torch.no_grad():
            target = self._targets(data)
        q = of_action(self.online["critic"](data), data.actions)
        error = torch.where(data.acted, q - target[..., None], 0.0).square().sum()
        logits = self.online["policy"](data.observations[:, :-1])
        chosen = of_action(logits.log_softmax(-1), data.actions)
        loss = error - torch.where(data.acted, chosen, 0.0).sum()
        loss = loss / data.acted.sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.online.parameters(), self.training.max_grad_norm)
        self.optimizer.step()

    def _targets(self, data: Episodes) -> Tensor:
        """TD(lambda) targets [B, T]; a state's value is the mean Q of the agents that acted."""
        q = of_action(self.target(data), data.actions)
        v = torch.where(data.acted, q, 0.0).sum(-1) / data.acted.sum(-1).clamp(min=1)
        following = functional.pad(v[:, 1:], (0, 1))
        gamma, lam = self.training.gamma, self.training.lam
        return lambda_returns(data.rewards, following, data.terminated, data.last, gamma, lam)

    def dump(self) -> Json:
        """All tensors as one safetensors file in base64."""
        return base64.b64encode(safetensors.save(self._tensors())).decode()

    def restore(self, data: Json) -> None:
        try:
            saved = safetensors.load(base64.b64decode(msgspec.convert(data, str)))
        except (ValueError, SafetensorError) as error:
            raise msgspec.ValidationError(f"it cannot be read as a critic: {error}") from None
        own = self._tensors()
        if {k: x.shape for k, x in saved.items()} != {k: x.shape for k, x in own.items()}:
            raise msgspec.ValidationError("it is of a critic of other roles, actions or sizes")
        for name, tensor in own.items():
            tensor.copy_(saved[name])

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name."""
        squares: dict[str, Tensor] = {}
        for number, p in enumerate(self.online.parameters()):
            state = self.optimizer.state[p]
            if not state:  # initialise it as the first step would
                state |= {"step": torch.zeros(()), "square_avg": torch.zeros_like(p)}
            squares |= {f"optimizer.{number}.{name}": x for name, x in state.items()}
        online = {f"online.{name}": p.detach() for name, p in self.online.named_parameters()}
        target = {f"target.{name}": p.detach() for name, p in self.target.named_parameters()}
        return online | target | squares


def counterfactual_advantage(q: Tensor, policy: Tensor, actions: Tensor) -> Tensor:
    """q [..., n, a] of the actions [..., n], minus its mean over the same agent's actions under
    the policy [..., n, a]; [..., n]. COMA, arXiv 1705.08926."""
    return of_action(q, actions) - (policy * q).sum(-1) / policy.sum(-1)


@dataclass(frozen=True, slots=True)
class Counterfactual(RememberedColumn):
    """COMA's advantage of a call's action over the other actions of its role, with the other roles'
    actions fixed, [S]; arXiv 1705.08926. Missing for calls of roles outside the team and for
    rollouts without a reward. Raises TrainingError for a role that made no call.

    It reads whole rollouts, so the team includes roles played by other policies."""

    kind: Kind
    stage: JointActionSpace
    training: CriticTraining
    reward: str = "outcome"
    stored_as: ClassVar[str] = "team-critic"

    @property
    def level(self) -> Level:
        return "transition"

    def part(self, seed: int) -> TeamCritic:
        n, width = len(self.stage.roles), self.stage.width
        shape = TeamShape(n, width, self.stage.choices, n * width)
        return TeamCritic(self.kind, shape, self.training, seed)

    def recall(
        self, part: StatePart, batch: Batch, rollouts: Sequence[Rollout]
    ) -> tuple[Tensor, TeamCritic]:
        assert isinstance(part, TeamCritic)
        self.stage.check(rollouts)
        known = [
            row for row in rollouts if not isnan(row.reward(self.reward)) and self.stage.moves(row)
        ]
        if not known:
            return torch.full((len(batch.transitions),), torch.nan, dtype=torch.float64), part
        episodes = [self.stage.episode(row, row.reward(self.reward)) for row in known]
        advantages = part.advantages(episodes).tolist()
        of_call = {
            call: advantages[number][step][agent]
            for number, row in enumerate(known)
            for call, (step, agent) in self.stage.moves(row).items()
        }
        column = [of_call.get(call, nan) for call in batch.transitions]
        return torch.tensor(column, dtype=torch.float64), part.learned(episodes)


@preset("coma", clip=PPO_CLIP)
def coma(
    reward: str,
    *,
    roles: Names,
    actions: Names,
    critic: Kind = "central",
    width: Count = 64,
    gamma: Discount = 0.99,
    lam: Discount = 0.8,
    critic_lr: Positive = 5e-3,
    updates: Count = 8,
    std: bool = False,
) -> Algo:
    """Calls compared with the other possible answers of their role, with the other roles' answers
    fixed, by a critic of the team: a central one of joint actions, or the roles' utilities mixed by
    VDN (1706.05296) or QMIX (1803.11485). `actions`: the answers to distinguish; all others count
    as one more action. The team includes roles played by other policies. arXiv 1705.08926."""
    stage = JointActionSpace(tuple(roles), tuple(actions), width)
    value = Counterfactual(critic, stage, CriticTraining(gamma, lam, critic_lr, updates), reward)
    credit = GroupRelative(value, by=("role",), base="none", norm="std" if std else "none")
    return Algo(credit)
