"""Rollouts of a team as episodes of enumerable actions: who chose what, seeing what.

A joint step is a round: the k-th call of every role. An action is what a call answered, as one of a
declared list of texts, or one more that stands for any other answer. An observation is what the
call saw last, as counts of words hashed into a vector of fixed width.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.multiagent.episodes import Episode
from agentrl.errors import TrainingError, nearest
from agentrl.types import Rollout, Transition

WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class JointActionSpace:
    """Who acts, and what they can do. width: of an observation."""

    roles: tuple[str, ...]
    actions: tuple[str, ...]
    width: int = 64

    @property
    def choices(self) -> int:
        return len(self.actions) + 1

    def action(self, call: Transition) -> int:
        """Which of the declared texts the answer is, apart from case and spaces around it; the last
        number: none of them."""
        said = (call.answer or {}).get("content")
        text = said.strip().casefold() if isinstance(said, str) else ""
        known = [action.strip().casefold() for action in self.actions]
        return known.index(text) if text in known else len(known)

    def check(self, rollouts: Sequence[Rollout]) -> None:
        """Raises TrainingError for a role that made no call."""
        made = {call.role for rollout in rollouts for call in rollout.transitions}
        for role in self.roles:
            if made and role not in made:
                raise TrainingError(
                    f"algorithm.options.roles: none of the calls of {len(rollouts)} rollouts was "
                    f"made in the role {role!r}; {nearest(role, made)}"
                )

    def moves(self, rollout: Rollout) -> dict[str, tuple[int, int]]:
        """The round and agent of every call of these roles, by id."""
        made = dict.fromkeys(self.roles, 0)
        found = {}
        for call in rollout.transitions:
            if call.role in made:
                found[call.id] = made[call.role], self.roles.index(call.role)
                made[call.role] += 1
        return found

    def episode(self, rollout: Rollout, reward: float) -> Episode:
        """With the team's reward at the end. It has terminated: the reward is for how it ended,
        whatever ended it. The state is what all agents saw."""
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
        return Episode(observations, observations.flatten(1), actions, rewards, acting=acting)


def observed_text(call: Transition) -> str:
    """The text of the messages after the newest answer."""
    newest = len(call.messages)
    while newest and call.messages[newest - 1].get("role") != "assistant":
        newest -= 1
    contents = (message.get("content") for message in call.messages[newest:])
    return "\n".join(text for text in contents if isinstance(text, str))


def hashed_words(text: str, width: int) -> Tensor:
    """float32 [width] of length 1: signed counts of words, each in a place of its hash. arXiv
    0902.2206."""
    counts = [0.0] * width
    for word in WORD.findall(text.casefold()):
        digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
        counts[int.from_bytes(digest[1:]) % width] += 1.0 if digest[0] % 2 else -1.0
    length = math.sqrt(sum(x * x for x in counts))
    return torch.tensor(counts) / (length or 1.0)
