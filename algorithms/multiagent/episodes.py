"""Episodes of a team with discrete joint actions, from rollouts or any other source.

A batch of episodes is padded to the longest; every statistic and target masks the padding.

A rollout becomes an episode as follows. Joint step k is the k-th call of every role. The action of
a call is the index of its answer in a declared list of texts, with one more for any other answer.
Its observation is the vector of hashed word counts of the messages since the agent's last answer.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.data.merge import new_messages
from agentrl.errors import TrainingError, nearest
from agentrl.types import Rollout, Transition

WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class TeamEpisode:
    """T joint steps of n agents, and the observation after the last one, which is only read, and
    required, if the episode was truncated."""

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
    whole = Episodes(
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
                getattr(whole, name)[row, : len(column)] = column
    return whole


def _check(number: int, episode: TeamEpisode, actions: int) -> None:
    steps = len(episode.rewards)
    seen = {steps + 1, steps} if episode.terminated else {steps + 1}
    for name, allowed in {
        "actions": {steps}, "observations": seen, "states": seen, "available": seen, "acting": seen
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
        known = [action.strip().casefold() for action in self.actions]
        return known.index(text) if text in known else len(known)

    def check(self, rollouts: Sequence[Rollout]) -> None:
        """Raise TrainingError for a role that made no call."""
        found = {call.role for rollout in rollouts for call in rollout.transitions}
        for role in self.roles:
            if found and role not in found:
                raise TrainingError(
                    f"algorithm.options.roles: none of the calls of {len(rollouts)} rollouts was "
                    f"made in the role {role!r}; {nearest(role, found)}"
                )

    def moves(self, rollout: Rollout) -> dict[str, tuple[int, int]]:
        """The joint step and agent of every call of these roles, by call id."""
        counts = dict.fromkeys(self.roles, 0)
        found = {}
        for call in rollout.transitions:
            if call.role in counts:
                found[call.id] = counts[call.role], self.roles.index(call.role)
                counts[call.role] += 1
        return found

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
