"""A critic of teams: what the joint action was worth, and what each agent's other actions were.

central: a network that reads the state and what the others did, and values every action of an
agent (COMA, arXiv 1705.08926). vdn and qmix: utilities of each agent's own actions, mixed
(1706.05296, 1803.11485); as critics of policies, 2007.12322. All learn TD(lambda) targets of the
policy that acted and, next to them, what that policy does, from what it did. Each step learns from
its own episodes alone: the targets are the acting policy's returns, without a correction for what
an earlier policy did, so an episode of an earlier step would teach the value of a policy that is no
more (COMA is on-policy, as its authors' code is).

Owns: its networks, target copies and optimizer. Always true: advantages of a step are those of the
networks before it learned that step, so a baseline never knows the action it is compared with.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn
from torch.nn import functional

from agentrl.algorithms.multiagent.episodes import Episode, Episodes, pad_episodes
from agentrl.algorithms.multiagent.mixers import build_mixer, lambda_returns
from agentrl.types import Json

Kind = Literal["central", "vdn", "qmix"]


@dataclass(frozen=True, slots=True)
class TeamShape:
    """n agents, observations [o], a actions, states [s]."""

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
    """A number for every action of every agent [..., n, a], from features [..., n, f] and who the
    agent is."""

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
        n, steps = data.actions.shape[-1], data.actions.shape[1]
        chosen = functional.one_hot(data.actions, self.actions).float()
        chosen = chosen * data.acting[:, :steps, :, None]
        others = chosen[:, :, None] * (1 - torch.eye(n))[:, :, None]  # without one's own
        state = data.states[:, :steps, None].expand(-1, -1, n, -1)
        out: Tensor = self.each(torch.cat([state, others.flatten(-2)], -1))
        return out


class MixedCritic(nn.Module):
    """The mixed utilities, with each agent's own replaced by that of each of its actions."""

    def __init__(
        self, kind: Literal["vdn", "qmix"], shape: TeamShape, training: CriticTraining
    ) -> None:
        super().__init__()
        self.utilities = AgentNetwork(
            shape.agents, shape.observation, shape.actions, training.hidden
        )
        self.mixer = build_mixer(kind, shape.agents, shape.state, training.embed)

    def forward(self, data: Episodes) -> Tensor:
        n, steps = data.actions.shape[-1], data.actions.shape[1]
        q = self.utilities(data.observations[:, :steps])
        taken = q.gather(-1, data.actions[..., None]).squeeze(-1)
        taken = torch.where(data.acting[:, :steps], taken, 0.0)
        own = torch.eye(n, dtype=torch.bool)[:, None]  # [n, 1, n]: whose utility is replaced
        instead = torch.where(own, q[..., None], taken[:, :, None, None])  # [B, T, n, a, n]
        state = data.states[:, :steps, None, None].expand(*instead.shape[:-1], -1)
        out: Tensor = self.mixer(instead, state)
        return out


def build_critic(
    kind: Kind, shape: TeamShape, training: CriticTraining
) -> CentralCritic | MixedCritic:
    if kind == "central":
        return CentralCritic(shape, training.hidden)
    return MixedCritic(kind, shape, training)


class TeamCritic:
    """See above; a `StatePart` of a run's state."""

    def __init__(
        self, kind: Kind, shape: TeamShape, training: CriticTraining, seed: int = 0
    ) -> None:
        self.shape, self.training = shape, training
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            critic = build_critic(kind, shape, training)
            policy = AgentNetwork(shape.agents, shape.observation, shape.actions, training.hidden)
        self.online = nn.ModuleDict({"critic": critic, "policy": policy})
        self.target = copy.deepcopy(critic).requires_grad_(False)
        self.optimizer = torch.optim.RMSprop(
            self.online.parameters(), training.lr, alpha=0.99, eps=1e-5
        )

    def advantages(self, episodes: Sequence[Episode]) -> Tensor:
        """[B, T, n]: Q of what was done minus its mean over what the agent's policy does there, the
        others' actions as they were; NaN where an agent did not act."""
        data = pad_episodes(episodes, self.shape.actions)
        steps = data.actions.shape[1]
        with torch.no_grad():
            q = self.online["critic"](data)
            policy = self.online["policy"](data.observations[:, :steps]).softmax(-1)
        acted = data.acting[:, :steps] & data.live[..., None]
        return torch.where(acted, counterfactual_advantage(q, policy, data.actions), torch.nan)

    def learned(self, episodes: Sequence[Episode]) -> TeamCritic:
        """What it is after a training step on these episodes; it stays as it is itself."""
        after = copy.deepcopy(self)
        after.target.load_state_dict(self.online["critic"].state_dict())
        data = pad_episodes(episodes, self.shape.actions)
        for _ in range(self.training.updates):
            after._step(data)
        return after

    def _step(self, data: Episodes) -> None:
        steps = data.actions.shape[1]
        acted = data.acting[:, :steps] & data.live[..., None]
        with torch.no_grad():
            target = self._targets(data, acted)
        q = self.online["critic"](data).gather(-1, data.actions[..., None]).squeeze(-1)
        error = torch.where(acted, q - target[..., None], 0.0).square().sum()
        logits = self.online["policy"](data.observations[:, :steps])
        chosen = logits.log_softmax(-1).gather(-1, data.actions[..., None]).squeeze(-1)
        loss = (error - torch.where(acted, chosen, 0.0).sum()) / acted.sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.online.parameters(), self.training.max_grad_norm)
        self.optimizer.step()

    def _targets(self, data: Episodes, acted: Tensor) -> Tensor:
        """[B, T], from the mean over the agents that acted of what each finds the step worth."""
        q = self.target(data).gather(-1, data.actions[..., None]).squeeze(-1)
        v = torch.where(acted, q, 0.0).sum(-1) / acted.sum(-1).clamp(min=1)
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
            raise msgspec.ValidationError(f"no critic can be read from it: {error}") from None
        own = self._tensors()
        if {k: x.shape for k, x in saved.items()} != {k: x.shape for k, x in own.items()}:
            raise msgspec.ValidationError("it is of a critic of other roles, actions or sizes")
        for name, tensor in own.items():
            tensor.copy_(saved[name])

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor that learning changes, by name."""
        squares: dict[str, Tensor] = {}
        for number, p in enumerate(self.online.parameters()):
            state = self.optimizer.state[p]
            if not state:  # as the first step would make it
                state |= {"step": torch.zeros(()), "square_avg": torch.zeros_like(p)}
            squares |= {f"optimizer.{number}.{name}": x for name, x in state.items()}
        online = {f"online.{name}": p.detach() for name, p in self.online.named_parameters()}
        target = {f"target.{name}": p.detach() for name, p in self.target.named_parameters()}
        return online | target | squares


def counterfactual_advantage(q: Tensor, policy: Tensor, actions: Tensor) -> Tensor:
    """[..., n]: q [..., n, a] of the actions [..., n] minus its mean under the policy [..., n, a]
    over the same agent's actions. COMA, arXiv 1705.08926."""
    taken = q.gather(-1, actions[..., None]).squeeze(-1)
    return taken - (policy * q).sum(-1) / policy.sum(-1)
