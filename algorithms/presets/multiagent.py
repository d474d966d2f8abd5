"""Teams with discrete joint actions: VDN, QMIX and COMA.

Episodes are made from rollouts or any other source. A batch of episodes is padded to the longest;
every statistic and target masks the padding. In the episode of a rollout, joint step k is the k-th
call of every role. The action of a call is the index of its answer in a declared list of texts,
with one more for any other answer. Its observation is the vector of hashed word counts of the
messages since the agent's last answer.

VDN and QMIX are mixers of agents' utilities into a team value. A mixer maps the agents' utilities
q [..., n] and the team's state [..., s] to the value of the joint action [...]. It is monotone in
every utility, so the best joint action consists of each agent's best action: agents trained
together can act separately.

Q-learning on a mixer chooses among discrete actions without a trained policy, for example which
frozen language models talk to each other (Agent Q-Mix, arXiv 2604.00344). The learner has
utilities, mixer, target copies of both, optimizer, and a count of learned episodes. Invariant:
learners with the same seed and episodes are equal.

COMA, arXiv 1705.08926, computes counterfactual advantages from a critic of the team. central: a
network that maps the state and the other agents' actions to a value of every action of an agent.
vdn and qmix: mixed utilities of each agent's own actions (1706.05296, 1803.11485); as critics of
policies, 2007.12322. All learn TD(lambda) targets of the acting policy, together with a model of
that policy. Each step learns from its own episodes only, without off-policy correction, so that the
critic does not learn values of an outdated policy (as in the authors' code).
"""

from __future__ import annotations

import base64
import copy
import hashlib
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, ClassVar, Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn
from torch.nn import functional

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level
from agentrl.algorithms.data.merge import new_messages
from agentrl.algorithms.data.state import RememberedColumn, StatePart
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.declare import PPO_CLIP, Discount, Names, preset
from agentrl.core.config import Count, Positive
from agentrl.core.errors import TrainingError, nearest
from agentrl.core.types import Json, Rollout, Transition

WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class TeamEpisode:
    """T joint steps of n agents, and the observation after the last one, which is required, and
    read, only if the episode was truncated."""

    observations: Tensor  # float32 [T + 1, n, o]
    states: Tensor  # float32 [T + 1, s]
    actions: Tensor  # int64 [T, n]
    rewards: Tensor  # float32 [T], of the team
    terminated: bool = True  # False: truncated
    available: Tensor | None = None  # bool [T + 1, n, a]; None: all actions, always
    acting: Tensor | None = None  # bool [T + 1, n]: the agents that act in a step; None: all


@dataclass(frozen=True, slots=True)
class Episodes:
    """B episodes of up to T steps, padded with zeros."""

    observations: Tensor  # float32 [B, T + 1, n, o]
    states: Tensor  # float32 [B, T + 1, s]
    actions: Tensor  # int64 [B, T, n]
    rewards: Tensor  # float32 [B, T]
    live: Tensor  # bool [B, T]: not padding
    last: Tensor  # bool [B, T]: the last step of its episode
    terminated: Tensor  # bool [B, T]: the last step of an episode that was not truncated
    available: Tensor  # bool [B, T + 1, n, a]
    acting: Tensor  # bool [B, T + 1, n]

    @property
    def acted(self) -> Tensor:
        """The agents that acted, without padding, bool [B, T, n]."""
        return self.acting[:, :-1] & self.live[..., None]


def pad_episodes(episodes: Sequence[TeamEpisode], actions: int) -> Episodes:
    """Stack episodes with padding. actions: number of actions. Raises TrainingError for columns of
    inconsistent length and for actions out of range."""
    for number, episode in enumerate(episodes):
        _check(number, episode, actions)
    count, longest = len(episodes), max(len(episode.rewards) for episode in episodes)
    n, width = episodes[0].observations.shape[1:]
    steps = torch.tensor([len(episode.rewards) for episode in episodes])
    at = torch.arange(longest)
    last = at == steps[:, None] - 1
    ended = torch.tensor([episode.terminated for episode in episodes])
    padded = Episodes(
        observations=torch.zeros(count, longest + 1, n, width),
        states=torch.zeros(count, longest + 1, episodes[0].states.shape[-1]),
        actions=torch.zeros(count, longest, n, dtype=torch.int64),
        rewards=torch.zeros(count, longest),
        live=at < steps[:, None],
        last=last,
        terminated=last & ended[:, None],
        available=torch.ones(count, longest + 1, n, actions, dtype=torch.bool),
        acting=torch.ones(count, longest + 1, n, dtype=torch.bool),
    )
    for row, episode in enumerate(episodes):
        for name in ("observations", "states", "actions", "rewards", "available", "acting"):
            column = getattr(episode, name)
            if column is not None:
                getattr(padded, name)[row, : len(column)] = column
    return padded


def _check(number: int, episode: TeamEpisode, actions: int) -> None:
    steps = len(episode.rewards)
    rows = {steps + 1, steps} if episode.terminated else {steps + 1}
    for name, allowed in {
        "actions": {steps}, "observations": rows, "states": rows, "available": rows, "acting": rows
    }.items():  # fmt: skip
        column = getattr(episode, name)
        if column is not None and len(column) not in allowed:
            raise TrainingError(
                f"episode {number}: {len(column)} rows of {name} for {steps} steps; give "
                f"{' or '.join(map(str, sorted(allowed)))}"
            )
    if steps and not 0 <= int(episode.actions.min()) <= int(episode.actions.max()) < actions:
        raise TrainingError(f"episode {number}: an action is not in [0, {actions})")


@dataclass(frozen=True, slots=True)
class JointActionSpace:
    """The roles that act, the answers that count as actions, and the size of observations."""

    roles: tuple[str, ...]
    actions: tuple[str, ...]
    width: int = 64

    @property
    def choices(self) -> int:
        return len(self.actions) + 1

    def action(self, call: Transition) -> int:
        """The index of the answer in the declared texts, ignoring case and surrounding spaces;
        the last index for any other answer."""
        content = (call.answer or {}).get("content")
        text = content.strip().casefold() if isinstance(content, str) else ""
        declared = [action.strip().casefold() for action in self.actions]
        return declared.index(text) if text in declared else len(declared)

    def check(self, rollouts: Sequence[Rollout]) -> None:
        """Raise TrainingError for a role that made no call."""
        roles = {call.role for rollout in rollouts for call in rollout.transitions}
        for role in self.roles:
            if roles and role not in roles:
                raise TrainingError(
                    f"algorithm.options.roles: none of the calls of {len(rollouts)} rollouts was "
                    f"made in the role {role!r}; {nearest(role, roles)}"
                )

    def moves(self, rollout: Rollout) -> dict[str, tuple[int, int]]:
        """The joint step and agent of every call of these roles, by call id."""
        counts = dict.fromkeys(self.roles, 0)
        moves = {}
        for call in rollout.transitions:
            if call.role in counts:
                moves[call.id] = counts[call.role], self.roles.index(call.role)
                counts[call.role] += 1
        return moves

    def episode(self, rollout: Rollout, reward: float) -> TeamEpisode:
        """The rollout as an episode with the team's reward at its end. It is always terminated: the
        reward is for its final state. The state is the observations of all agents."""
        moves = self.moves(rollout)
        steps, n = 1 + max((step for step, _ in moves.values()), default=-1), len(self.roles)
        observations = torch.zeros(steps, n, self.width)
        actions = torch.zeros(steps, n, dtype=torch.int64)
        acting = torch.zeros(steps, n, dtype=torch.bool)
        for call in rollout.transitions:
            if call.id in moves:
                at = moves[call.id]
                observations[at] = hashed_words(observed_text(call), self.width)
                actions[at], acting[at] = self.action(call), True
        rewards = torch.zeros(steps)
        rewards[-1:] = reward
        return TeamEpisode(observations, observations.flatten(1), actions, rewards, acting=acting)


def observed_text(call: Transition) -> str:
    """The text of the messages after the agent's latest answer."""
    contents = (message.get("content") for message in new_messages(call))
    return "\n".join(text for text in contents if isinstance(text, str))


def hashed_words(text: str, width: int) -> Tensor:
    """Unit vector of signed word counts, each at the index of its hash, float32 [width]. arXiv
    0902.2206."""
    counts = [0.0] * width
    for word in WORD.findall(text.casefold()):
        digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
        counts[int.from_bytes(digest[1:]) % width] += 1.0 if digest[0] % 2 else -1.0
    length = math.sqrt(sum(x * x for x in counts))
    return torch.tensor(counts) / (length or 1.0)


MixerKind = Literal["vdn", "qmix"]


class VdnMixer(nn.Module):
    """Q_tot = sum of the utilities. VDN, arXiv 1706.05296."""

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        return q.sum(-1)


class QmixMixer(nn.Module):
    """Q_tot = w2^T elu(W1^T q + b1) + v with weights that are functions of the state, W1 and w2
    nonnegative. QMIX, arXiv 1803.11485, with its single-layer hypernetworks."""

    def __init__(self, agents: int, state: int, embed: int = 32) -> None:
        super().__init__()
        self.agents, self.embed = agents, embed
        self.w1 = nn.Linear(state, agents * embed)
        self.b1 = nn.Linear(state, embed)
        self.w2 = nn.Linear(state, embed)
        self.v = nn.Sequential(nn.Linear(state, embed), nn.ReLU(), nn.Linear(embed, 1))

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        w1 = self.w1(state).unflatten(-1, (self.agents, self.embed))
        return qmix_value(q, w1, self.b1(state), self.w2(state), self.v(state).squeeze(-1))


def qmix_value(q: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, v: Tensor) -> Tensor:
    """QMIX's value of q [..., n] for |w1| [..., n, e], b1 [..., e], |w2| [..., e], v [...]."""
    hidden = functional.elu((q.unsqueeze(-1) * w1.abs()).sum(-2) + b1)
    return (hidden * w2.abs()).sum(-1) + v


def build_mixer(kind: MixerKind, agents: int, state: int, embed: int = 32) -> VdnMixer | QmixMixer:
    """The mixer of a kind. state: size of the state."""
    return VdnMixer() if kind == "vdn" else QmixMixer(agents, state, embed)


def of_action(x: Tensor, actions: Tensor) -> Tensor:
    """The entries of x [..., n, a] at the actions [..., n]; [..., n]."""
    return x.gather(-1, actions[..., None]).squeeze(-1)


def best_action(q: Tensor, available: Tensor) -> Tensor:
    """The available action with the highest value q [..., a], int64 [...]."""
    return q.masked_fill(~available, -torch.inf).argmax(-1)


def one_step_targets(reward: Tensor, following: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    """Targets r + gamma * (1 - terminated) * V(next); a truncated episode is not terminated."""
    return reward + gamma * torch.where(terminated, 0.0, following)


def lambda_returns(
    reward: Tensor, following: Tensor, terminated: Tensor, last: Tensor, gamma: float, lam: float
) -> Tensor:
    """TD(lambda) targets [B, T]: G_t = r_t + gamma * ((1 - lam) * V(next) + lam * G_{t+1}).

    following [B, T]: V of the state after each step. terminated, last: bool [B, T], steps at which
    an episode terminates, and the last step of each episode. arXiv 1705.08926."""
    out = torch.zeros_like(reward)
    after = torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        v = torch.where(terminated[:, t], 0.0, following[:, t])
        mixed = torch.where(last[:, t], v, (1 - lam) * v + lam * after)
        out[:, t] = after = reward[:, t] + gamma * mixed
    return out


class Utilities(nn.Module):
    """A recurrent network from observations [B, T, n, o] to utilities [B, T, n, a], shared by all
    agents, with the agent's index as input. As in pymarl."""

    def __init__(self, agents: int, observation: int, actions: int, hidden: int = 64) -> None:
        super().__init__()
        self.agents = agents
        self.enter = nn.Linear(observation + agents, hidden)
        self.memory = nn.GRU(hidden, hidden, batch_first=True)
        self.leave = nn.Linear(hidden, actions)

    def forward(self, observations: Tensor) -> Tensor:
        count, steps, agents, _ = observations.shape
        names = torch.eye(agents).expand(count, steps, agents, agents)
        encoded = self.enter(torch.cat([observations, names], -1)).relu()
        sequences = encoded.transpose(1, 2).flatten(0, 1)  # one sequence per agent, [B * n, T, h]
        hidden = self.memory(sequences)[0].unflatten(0, (count, agents)).transpose(1, 2)
        out: Tensor = self.leave(hidden)
        return out


class FactoredQLearner:
    """Double Q-learning on the factored value of a team, with pymarl's settings.

    network: builds the module from observations [B, T, n, o] to utilities [B, T, n, a]; default
    `Utilities`. every: number of episodes between updates of the target."""

    kind: ClassVar[MixerKind]

    def __init__(
        self, agents: int, observation: int, actions: int, state: int, *,
        network: Callable[[], nn.Module] | None = None, hidden: int = 64, embed: int = 32,
        gamma: float = 0.99, lr: float = 5e-4, max_grad_norm: float = 10.0, every: int = 200,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.agents, self.actions = agents, actions
        self.gamma, self.max_grad_norm, self.every = gamma, max_grad_norm, every
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            utilities = network() if network else Utilities(agents, observation, actions, hidden)
            parts = {"utilities": utilities, "mixer": build_mixer(self.kind, agents, state, embed)}
        self.online = nn.ModuleDict(parts)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = torch.optim.RMSprop(self.online.parameters(), lr, alpha=0.99, eps=1e-5)
        self.learned = self.copied = 0  # episodes

    def act(
        self,
        observations: Tensor,
        epsilon: float,
        rng: random.Random,
        available: Tensor | None = None,
    ) -> list[int]:
        """Epsilon-greedy actions of all agents after the observations so far, [t, n, o].
        available: bool [n, a]; None: all actions."""
        allowed = torch.ones(self.agents, self.actions).bool() if available is None else available
        with torch.no_grad():
            q = self.online["utilities"](observations[None])[0, -1]
        chosen = best_action(q, allowed).tolist()
        explored = [rng.choice(row.nonzero().squeeze(1).tolist()) for row in allowed]
        return [e if rng.random() < epsilon else c for e, c in zip(explored, chosen, strict=True)]

    def learn(self, episodes: Sequence[TeamEpisode]) -> dict[str, float]:
        """Take one optimizer step on the episodes; returns metrics."""
        data = pad_episodes(episodes, self.actions)
        value = self.value(self.online, data, data.actions)
        with torch.no_grad():
            target = self.targets(data)
        error = torch.where(data.live, value - target, 0.0)
        loss = error.square().sum() / data.live.sum()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.online.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.learned += len(episodes)
        if self.learned - self.copied >= self.every:
            self.target.load_state_dict(self.online.state_dict())
            self.copied = self.learned
        mean = value.detach()[data.live].mean()
        return {"loss": float(loss.detach()), "grad_norm": float(norm), "value": float(mean)}

    def targets(self, data: Episodes) -> Tensor:
        """Double Q-learning targets [B, T]: the online utilities choose the next actions, the
        target copy evaluates them."""
        chosen = best_action(self.online["utilities"](data.observations), data.available)
        following = self.value(self.target, data, chosen[:, 1:], first=1)
        return one_step_targets(data.rewards, following, data.terminated, self.gamma)

    def value(
        self, parts: nn.ModuleDict, data: Episodes, actions: Tensor, first: int = 0
    ) -> Tensor:
        """Values [B, T] of the joint actions [B, T, n] in the states from step `first` on. An agent
        that does not act has utility 0."""
        steps = slice(first, first + actions.shape[1])
        q = of_action(parts["utilities"](data.observations)[:, steps], actions)
        taken = torch.where(data.acting[:, steps], q, 0.0)
        value: Tensor = parts["mixer"](taken, data.states[:, steps])
        return value

    def state_dict(self) -> dict[str, Any]:
        return {
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "episodes": (self.learned, self.copied),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.online.load_state_dict(state["online"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.learned, self.copied = state["episodes"]


class VDN(FactoredQLearner):
    """Learner whose team value is the sum of the agents' utilities. arXiv 1706.05296."""

    kind = "vdn"


class QMix(FactoredQLearner):
    """Learner whose team value is a state-dependent monotone function of the agents' utilities.
    arXiv 1803.11485."""

    kind = "qmix"


CriticKind = Literal["central", "vdn", "qmix"]


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
        is_own = torch.eye(data.actions.shape[-1], dtype=torch.bool)[:, None]  # [n, 1, n]
        utilities = torch.where(is_own, q[..., None], taken[:, :, None, None])  # [B, T, n, a, n]
        state = data.states[:, :-1, None, None].expand(*utilities.shape[:-1], -1)
        out: Tensor = self.mixer(utilities, state)
        return out


class TeamCritic:
    """The critic as a `StatePart`, with its networks, target copies and optimizer. Invariant: the
    advantages of a step come from the networks before they learned that step, so that a baseline
    does not depend on the action it is compared with."""

    def __init__(
        self, kind: CriticKind, shape: TeamShape, training: CriticTraining, seed: int = 0
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
        current = self._tensors()
        if {k: x.shape for k, x in saved.items()} != {k: x.shape for k, x in current.items()}:
            raise msgspec.ValidationError("it is of a critic of other roles, actions or sizes")
        for name, tensor in current.items():
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

    kind: CriticKind
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
        usable = [
            row for row in rollouts if not isnan(row.reward(self.reward)) and self.stage.moves(row)
        ]
        if not usable:
            return torch.full((len(batch.transitions),), torch.nan, dtype=torch.float64), part
        episodes = [self.stage.episode(row, row.reward(self.reward)) for row in usable]
        advantages = part.advantages(episodes).tolist()
        of_call = {
            call: advantages[number][step][agent]
            for number, row in enumerate(usable)
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
    critic: CriticKind = "central",
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
