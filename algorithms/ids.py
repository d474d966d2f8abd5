"""Integer id vectors: who is compared, pooled or averaged with whom is a column, never a code path.

All functions are pure and work on flat tensors of one level with U units.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.batch import Batch
from agentrl.errors import TrainingError

Level = Literal["token", "transition", "rollout"]
Unit = Literal["all", "transition", "row", "role", "rollout", "group"]
How = Literal["sum", "mean", "amax", "amin"]


def key(*columns: Tensor) -> Tensor:
    """Dense ids int64 [U] of the tuples that one or more integer columns [U] spell out."""
    ids: Tensor = torch.unique(columns[0], return_inverse=True)[1]
    for column in columns[1:]:
        other: Tensor = torch.unique(column, return_inverse=True)[1]
        pairs = ids * max(other.numel(), 1) + other
        ids = torch.unique(pairs, return_inverse=True)[1]
    return ids


def seg(x: Tensor, ids: Tensor, n: int | None = None, how: How = "sum") -> Tensor:
    """Reduce x [U] to one value per id, float64 [n]; an id without members gets 0."""
    size = n if n is not None else int(ids.max()) + 1 if ids.numel() else 0
    total = torch.zeros(size, dtype=torch.float64, device=x.device)
    if how == "sum":
        return total.index_add_(0, ids, x.double())
    return total.scatter_reduce_(0, ids, x.double(), how, include_self=False)


def scan(x: Tensor, decay: Tensor | float, following: Tensor) -> Tensor:
    """y_i = x_i + decay_i * y_following_i along links, float64 [U]; following_i = -1 ends a chain.

    Pointer jumping: log2(longest chain) vectorised rounds, for links in any order. Raises
    TrainingError if the links form a cycle."""
    y, link = x.double().clone(), following.clone()
    factor = torch.as_tensor(decay, dtype=torch.float64, device=x.device).expand_as(y).clone()
    live = (link >= 0).nonzero().squeeze(1)
    for _ in range(x.numel().bit_length()):
        after = link[live]
        y[live] += factor[live] * y[after]
        factor[live] *= factor[after]
        link[live] = link[after]
        live = live[link[live] >= 0]
    if live.numel():
        raise TrainingError(f"the links of {live.numel()} units form a cycle")
    return y


def units(batch: Batch, at: Level, *names: Unit) -> Tensor:
    """Ids [U] of the units that `names` together span, at a level: ("group", "role") compares
    within one role of one group.

    Raises TrainingError for a unit that is below the level or unknown."""
    columns = [_column(batch, at, name) for name in names]
    return columns[0] if len(columns) == 1 else key(*columns)


def _column(batch: Batch, at: Level, name: Unit) -> Tensor:
    if at == "token" and name == "row":
        return batch.token_row
    if at == "token" and name in ("transition", "role"):
        return _column(batch, "transition", name)[batch.token_transition]
    if at == "transition" and name == "transition":
        return torch.arange(len(batch.transitions))
    if at == "transition" and name == "role":
        return batch.transition_role
    if name not in ("all", "rollout", "group"):
        raise TrainingError(f"a {at} belongs to no single {name}: compare at a lower level")
    if at == "rollout":
        rollout = torch.arange(len(batch.rollouts))
    else:
        rollout = batch.token_rollout if at == "token" else batch.transition_rollout
    if name == "all":
        return torch.zeros_like(rollout)
    return batch.rollout_group[rollout] if name == "group" else rollout
