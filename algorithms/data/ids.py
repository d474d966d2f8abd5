"""Integer id vectors. Units with equal ids are compared, pooled or averaged together.

All functions are pure and work on flat tensors over the U units of one level.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.core.errors import TrainingError

Level = Literal["token", "transition", "role", "rollout"]
"""The kind of unit that a value belongs to. "role": each role of each rollout, [U * K]."""
Unit = Literal[
    "all", "transition", "row", "role", "turn", "state", "prompt", "node", "tree", "rollout",
    "group",
]  # fmt: skip
"""A grouping of units. turn: number of earlier calls in the rollout; state, prompt, node: see
Batch; tree: rollouts that share their first call."""
How = Literal["sum", "mean", "amax", "amin"]


def key(*columns: Tensor) -> Tensor:
    """Dense ids of the tuples formed by one or more integer columns; all int64 [U]."""
    ids = _dense(columns[0])
    for column in columns[1:]:
        dense = _dense(column)
        ids = _dense(ids * (int(dense.max()) + 1 if dense.numel() else 1) + dense)
    return ids


def _dense(ids: Tensor) -> Tensor:
    """The rank of each id among the distinct ids; small ids are counted, which takes a tenth of the
    time of sorting."""
    least, most = torch.stack(ids.aminmax()).tolist() if ids.numel() else (-1, -1)
    if least < 0 or most > 4 * ids.numel():
        ranks: Tensor = torch.unique(ids, return_inverse=True)[1]
        return ranks
    present = torch.zeros(most + 1, dtype=torch.int64, device=ids.device)
    present[ids] = 1
    return present.cumsum(0)[ids] - 1


def reduce_by(x: Tensor, ids: Tensor, n: int | None = None, how: How = "sum") -> Tensor:
    """Reduce x [U] to one value per id, float64 [n]; 0 for an id without members."""
    size = n if n is not None else int(ids.max()) + 1 if ids.numel() else 0
    total = torch.zeros(size, dtype=torch.float64, device=x.device)
    if how == "sum":
        return total.index_add_(0, ids, x.double())
    return total.scatter_reduce_(0, ids, x.double(), how, include_self=False)


def known_mean(x: Tensor, ids: Tensor, n: int | None = None) -> Tensor:
    """Mean of the x [U] that are not NaN, per id, float64 [n]; NaN if all are missing."""
    return reduce_by(x.nan_to_num(nan=0.0), ids, n) / reduce_by(~x.isnan(), ids, n)


def scan(x: Tensor, decay: Tensor | float, following: Tensor) -> Tensor:
    """Discounted sums along linked lists: y_i = x_i + decay_i * y[following_i], float64 [U].

    following [U]: index of the next unit, in any order; -1 ends a chain. Pointer jumping takes
    log2(longest chain) vectorised rounds. Raises TrainingError if the links form a cycle."""
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
    """Ids [U], at level `at`, of the combination of `names`: ("group", "role") gives one id per
    role of each group. Raises TrainingError for a name that is below the level or unknown."""
    columns = [_column(batch, at, name) for name in names]
    return columns[0] if len(columns) == 1 else key(*columns)


def owner(batch: Batch, at: Level) -> Tensor:
    """Index of each token's unit at a level, int64 [N]."""
    if at == "token":
        return torch.arange(batch.n_tokens)
    if at == "transition":
        return batch.token_transition
    if at == "rollout":
        return batch.token_rollout
    return batch.token_rollout * len(batch.roles) + batch.transition_role[batch.token_transition]


def lift(batch: Batch, x: Tensor, level: Level, at: Level) -> Tensor:
    """Copy values from `level` to a lower level `at`; NaN for a role that made no call.

    Raises TrainingError if `at` is above `level`."""
    if level == at:
        return x
    if level == "rollout" and at == "role":
        roles = len(batch.roles)
        called = torch.full((len(batch.rollouts) * roles,), torch.nan, dtype=torch.float64)
        called[batch.transition_rollout * roles + batch.transition_role] = 0.0
        return x.repeat_interleave(roles) + called
    if at == "transition" and level == "rollout":
        return x[batch.transition_rollout]
    if at == "transition" and level == "role":
        return x[batch.transition_rollout * len(batch.roles) + batch.transition_role]
    if at == "token":
        return x[owner(batch, level)]
    raise TrainingError(f"a value per {level} is not one per {at}: compare at a lower level")


def next_same(ids: Tensor, order: Tensor | None = None) -> Tensor:
    """Index of the next unit with the same id, int64 [U]; -1 for the last one.

    order [U]: sort key, >= 0; default: position."""
    ranks = torch.arange(ids.numel()) if order is None else order
    index = (ids * (int(ranks.max()) + 1 if ranks.numel() else 1) + ranks).argsort(stable=True)
    following = torch.full_like(index, -1)
    same = ids[index[1:]] == ids[index[:-1]]
    following[index[:-1][same]] = index[1:][same]
    return following


def previous(following: Tensor) -> Tensor:
    """Invert `following`: index of the unit before each one, int64 [U]; -1 for the first."""
    before = torch.full_like(following, -1)
    linked = following >= 0
    before[following[linked]] = linked.nonzero().squeeze(1)
    return before


def _column(batch: Batch, at: Level, name: Unit) -> Tensor:
    if at == "token" and name == "row":
        return batch.token_row
    if name in ("transition", "turn", "state", "prompt", "node") and at in ("token", "transition"):
        ids = of_calls(batch, name)
        return ids if at == "transition" else ids[batch.token_transition]
    if name == "role":
        if at == "role":
            return torch.arange(len(batch.roles)).repeat(len(batch.rollouts))
        if at != "rollout":
            role = batch.transition_role
            return role if at == "transition" else role[batch.token_transition]
    if name not in ("all", "tree", "rollout", "group"):
        raise TrainingError(f"a {at} belongs to no single {name}: compare at a lower level")
    rollout = rollout_of(batch, at)
    if name == "all":
        return torch.zeros_like(rollout)
    if name == "tree":
        return _trees(batch)[rollout]
    return batch.rollout_group[rollout] if name == "group" else rollout


def rollout_of(batch: Batch, at: Level) -> Tensor:
    """Index of the rollout that each unit of a level belongs to, int64 [U]."""
    if at == "token":
        return batch.token_rollout
    if at == "transition":
        return batch.transition_rollout
    rollout = torch.arange(len(batch.rollouts))
    return rollout if at == "rollout" else rollout.repeat_interleave(len(batch.roles))


def of_calls(batch: Batch, name: str) -> Tensor:
    """The column `transition_{name}` [S] of calls, or for "transition" their index. Raises
    TrainingError if the batch does not have it."""
    if name == "transition":
        return torch.arange(len(batch.transitions))
    ids: Tensor = getattr(batch, f"transition_{name}")
    if ids.numel() != len(batch.transitions):
        raise TrainingError(
            f"step {batch.step}: the {len(batch.transitions)} calls of this batch carry no {name}; "
            "build it with `build_batch`"
        )
    return ids


def _trees(batch: Batch) -> Tensor:
    """Tree id of each rollout, int64 [U]: the node of its first call, unique without calls."""
    nodes, first = of_calls(batch, "node"), batch.transition_turn == 0
    trees = len(batch.transitions) + torch.arange(len(batch.rollouts))
    trees[batch.transition_rollout[first]] = nodes[first]
    return trees
