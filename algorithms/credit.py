"""Credit: what every action token is worth, from rewards to advantages.

Credit is a function of the batch that returns A float64 [N]. NaN in it means *missing*: a rollout
without a reward is in no statistic and not in the loss. 0 means *no lesson*: a rollout that nothing
can be compared with, or that did as well as the others; it counts in the denominators of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.batch import Batch
from agentrl.algorithms.ids import Unit, scan, seg, units
from agentrl.config import nearest
from agentrl.errors import TrainingError

Credit = Callable[[Batch], Tensor]
"""Batch -> A [N]."""
Column = Callable[[Batch], Tensor]
"""Batch -> one number per unit of a level."""
Base = Literal["none", "mean", "loo"]
Norm = Literal["none", "std", "mean"]

SPREAD = 1e-6  # differences below this share of the largest reward are rounding, not information


def standardise(
    x: Tensor,
    by: Tensor,
    *,
    base: Base | Tensor = "mean",
    norm: Norm = "none",
    norm_by: Tensor | None = None,
    w: Tensor | None = None,
    bw: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    tol: float = SPREAD,
) -> Tensor:
    """(x - baseline) / scale within units of equal id, float64 [U].

    x [U]: NaN = missing: in no statistic, result 0. by, norm_by (default `by`) int64 [U]: whom to
    compare with, and whose scale to divide by. base: nothing, the mean, the mean of the others, or
    given values [U]. norm: the standard deviation of x - baseline (plus eps), or the mean of x.
    w, bw [U]: frequency weights of all statistics, and of the baseline alone.

    The result is exactly 0, never rounding noise over eps, for a unit without others to compare
    with, for one within tol of its baseline (relative to the largest |x| of its id) and where the
    scale is not positive."""
    known = ~(x - base if isinstance(base, Tensor) else x).isnan()
    x = torch.where(known, x.double(), 0.0)
    weight = known.double() if w is None else known * w.double()
    centred = x - _baseline(x, by, base, weight if bw is None else known * bw.double())
    live = centred.isfinite() & (centred.abs() > tol * seg(x.abs(), by, how="amax")[by])
    if not isinstance(base, Tensor) and base != "none":
        live &= seg(weight > 0, by)[by] > 1
    centred = torch.where(known & live, centred, 0.0)
    if norm == "none":
        return centred
    by = by if norm_by is None else norm_by
    total = seg(weight, by)
    if norm == "mean":
        scale = seg(weight * x, by) / total
    else:
        mean = seg(weight * centred, by) / total
        variance = seg(weight * (centred - mean[by]) ** 2, by) / (total - ddof)
        scale = variance.sqrt()
        scale = torch.where(scale > tol * seg(x.abs(), by, how="amax"), scale + eps, 0.0)
    return torch.where(scale[by] > 0, centred / scale[by], 0.0)


def _baseline(x: Tensor, by: Tensor, base: Base | Tensor, weight: Tensor) -> Tensor:
    if isinstance(base, Tensor):
        return base.double()
    if base == "none":
        return torch.zeros_like(x)
    total = seg(weight, by)[by]
    mean = seg(weight * x, by)[by] / total
    # Weights are frequencies: leaving one out takes away a whole unit of weight.
    return mean - (x - mean) / (total - 1).clamp(min=0) if base == "loo" else mean


def gae(
    r: Tensor, v: Tensor, following: Tensor, gamma: float, lam: float, boot: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and returns, float64 [U] each, along links (-1 ends a chain).

    boot: value after the last unit, 0 if terminated, V(last state) if cut off. arXiv 1506.02438."""
    after = torch.where(following >= 0, v.double()[following], boot)
    advantage = scan(r + gamma * after - v, gamma * lam, following)
    return advantage, advantage + v


def rel(
    reward: str | Column = "outcome",
    *,
    at: Literal["transition", "rollout"] = "rollout",
    by: tuple[Unit, ...] = ("group",),
    base: Base | Column = "mean",
    norm: Norm = "none",
    norm_by: tuple[Unit, ...] | None = None,
    w: Column | None = None,
    bw: Column | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Credit:
    """Rewards standardised among the units of a level, copied to their tokens: GRPO and relatives.

    Arguments as in `standardise`; a function is given the batch and returns values at the level."""

    def credit(batch: Batch) -> Tensor:
        x = rewards(batch, reward)
        if at == "transition" and isinstance(reward, str):
            x = x[batch.transition_rollout]
        advantage = standardise(
            x,
            units(batch, at, *by),
            base=base(batch) if callable(base) else base,
            norm=norm,
            norm_by=None if norm_by is None else units(batch, at, *norm_by),
            w=None if w is None else w(batch),
            bw=None if bw is None else bw(batch),
            ddof=ddof,
            eps=eps,
        )
        return torch.where(x.isnan(), torch.nan, advantage)[units(batch, "token", at)]

    return credit


def togo(reward: str | Column = "outcome", gamma: float = 1.0) -> Credit:
    """Discounted reward-to-go per token, the rollout's reward falling on its last action token.

    gamma counts action tokens only: a tool result in between costs nothing."""

    def credit(batch: Batch) -> Tensor:
        following = links(batch)
        return scan(terminal(batch, reward, following), gamma, following)

    return credit


def gae_tokens(
    value: Column, reward: str | Column = "outcome", gamma: float = 1.0, lam: float = 0.95
) -> Credit:
    """GAE over the action tokens of a rollout; `value` gives V [N]. PPO, arXiv 1707.06347."""

    def credit(batch: Batch) -> Tensor:
        following = links(batch)
        r = terminal(batch, reward, following)
        return gae(r, value(batch), following, gamma, lam)[0]

    return credit


def tok_whiten(credit: Credit) -> Credit:
    """Mean 0 and standard deviation 1 over all tokens of the batch. REINFORCE++, 2501.03262."""

    def whitened(batch: Batch) -> Tensor:
        advantage = credit(batch)
        one = units(batch, "token", "all")
        white = standardise(advantage, one, norm="std", eps=1e-8)
        return torch.where(advantage.isnan(), torch.nan, white)

    return whitened


def plus(*terms: tuple[Credit, float | Column]) -> Credit:
    """Weighted sum of credits; a weight may be a column [N]. What is missing in one term counts as
    0 there; a token that every term misses is missing."""

    def credit(batch: Batch) -> Tensor:
        parts = torch.stack([c(batch) * (w(batch) if callable(w) else w) for c, w in terms])
        return torch.where(parts.isnan().all(0), torch.nan, parts.nansum(0))

    return credit


def rewards(batch: Batch, reward: str | Column) -> Tensor:
    """The values of a reward by name (float64 [U], NaN = missing) or of a function of the batch.

    Raises TrainingError for a name that no rollout carries and for an infinite reward."""
    if isinstance(reward, str) and reward not in batch.rewards:
        raise TrainingError(f"no rollout has a reward {reward!r}; {nearest(reward, batch.rewards)}")
    x = batch.rewards[reward].double() if isinstance(reward, str) else reward(batch)
    if infinite := int(x.isinf().sum()):
        raise TrainingError(f"{infinite} of {x.numel()} values of reward {reward!r} are infinite")
    return x


def terminal(batch: Batch, reward: str | Column, following: Tensor) -> Tensor:
    """The rollout's reward at its last action token, 0 at the others, float64 [N]."""
    return torch.where(following < 0, rewards(batch, reward)[batch.token_rollout], 0.0)


def links(batch: Batch) -> Tensor:
    """int64 [N]: the next action token of the same rollout in order of its calls, -1 at its end."""
    rollout = batch.token_rollout
    order = (rollout * len(batch.transitions) + batch.token_transition).argsort(stable=True)
    following = torch.full_like(order, -1)
    same = rollout[order[1:]] == rollout[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def lengths(batch: Batch) -> Tensor:
    """Action tokens per rollout, float64 [U]."""
    return seg(torch.ones(batch.n_tokens), batch.token_rollout, len(batch.rollouts))


def spread(batch: Batch, reward: str | Column = "outcome") -> Tensor:
    """bool [U]: whether the known rewards of the rollout's group differ."""
    x, group = rewards(batch, reward), batch.rollout_group
    high = seg(x.nan_to_num(nan=-torch.inf), group, how="amax")
    low = seg(x.nan_to_num(nan=torch.inf), group, how="amin")
    largest = seg(x.nan_to_num(nan=0.0).abs(), group, how="amax")
    return (high - low > SPREAD * largest)[group]


def alive(reward: str = "outcome") -> Column:
    """bool [N]: tokens of groups whose rewards differ. DAPO's filter, arXiv 2503.14476."""
    return lambda batch: spread(batch, reward)[batch.token_rollout]


def survivors(reward: str = "outcome") -> Column:
    """The reward [U], missing where the rewards of the group do not differ."""
    return lambda batch: torch.where(spread(batch, reward), rewards(batch, reward), torch.nan)


def compensated(reward: str = "outcome") -> Column:
    """The reward [U] times known / surviving rollouts, which makes up for the zero gradients of
    groups whose rewards do not differ. GPG, arXiv 2504.02546."""

    def column(batch: Batch) -> Tensor:
        x = rewards(batch, reward)
        return x * (~x.isnan()).sum() / spread(batch, reward).logical_and(~x.isnan()).sum().clamp(1)

    return column
