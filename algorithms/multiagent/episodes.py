"""What a team did, joint step by joint step, as learners of its value read it.

A batch of them is padded to the longest. Padding is behind a mask in every statistic and target, so
it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Episode:
    """T joint steps of n agents, and what was seen after the last.

    Of an episode that terminated, what was seen after the last step is never read and may be left
    out; one that was cut off needs it."""

    observations: Tensor  # float32 [T + 1, n, o]
    states: Tensor  # float32 [T + 1, s]
    actions: Tensor  # int64 [T, n]
    rewards: Tensor  # float32 [T], the team's
    terminated: bool = True  # False: cut off
    available: Tensor | None = None  # bool [T + 1, n, a]; none: every action always is
    acting: Tensor | None = None  # bool [T + 1, n]: who decides in a step; none: all do


@dataclass(frozen=True, slots=True)
class Episodes:
    """B episodes of up to T steps, padded with zeros."""

    observations: Tensor  # float32 [B, T + 1, n, o]
    states: Tensor  # float32 [B, T + 1, s]
    actions: Tensor  # int64 [B, T, n]
    rewards: Tensor  # float32 [B, T]
    live: Tensor  # bool [B, T]: a step that was made
    last: Tensor  # bool [B, T]: the last step of its episode
    terminated: Tensor  # bool [B, T]: the same, of an episode that was not cut off
    available: Tensor  # bool [B, T + 1, n, a]
    acting: Tensor  # bool [B, T + 1, n]


def pad_episodes(episodes: Sequence[Episode], actions: int) -> Episodes:
    """`actions`: how many there are. Raises TrainingError for columns of different lengths."""
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


def _check(number: int, episode: Episode, actions: int) -> None:
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
        raise TrainingError(f"episode {number}: an action that is none of the {actions} there are")
