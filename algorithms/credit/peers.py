"""Credit of calls from other rollouts that came to the same states, as far as a batch shows it to
be safe: see "Peers" in CREDIT.md.

What one batch shows of states is little, so a run remembers what earlier batches showed; a batch on
its own, without memory, is judged by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.calls import Returns
from agentrl.algorithms.credit.core import Column
from agentrl.algorithms.credit.scale import SCALE_DECAY, JudgedColumn
from agentrl.algorithms.credit.states import (
    LEAST_SCORE_NORM,
    Calls,
    baselines,
    calls_of,
    mean_by,
    missed_by_values,
    plain_baselines,
    time_terms,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, key, reduce_by
from agentrl.algorithms.data.state import StatePart
from agentrl.types import Json, Rollout

# Share of the outcome that is visible before the end: no trust, full trust.
VISIBLE_OUTCOME = (0.15, 0.5)
MISSED_EFFECT = (1.25, 2.5)  # squared effect that values miss, over its noise: full trust, no trust
EFFECT_AT = (1.5, 3.0)  # the same at some turns, where it is noisier
LAMBDA = 0.5  # of the lambda-returns, by default
# Weight of an earlier batch, where it takes many to tell the gradient from noise.
NOISY_DECAY = 0.97
# Of the noise of a batch's gradient: what one batch leaves unknown of the gradient.
GRADIENT_DOUBT = 0.3


def end_sums(calls: Calls, chosen: Tensor) -> Tensor:
    """Of the chosen calls' returns, [6]: squared deviations within groups and degrees of freedom,
    the same within pairs of state and action, calls that are not alone in theirs, and all calls."""
    x, group = calls.returns[chosen] / (calls.unit or 1.0), calls.group[chosen]
    cell = key(calls.state[chosen], calls.action[chosen])

    def spread(same: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, count = mean_by(x, key(same))
        return (x - mean).square().sum(), len(x) - (1 / count).sum(), count

    total, freedom, _ = spread(group)
    within, inner, count = spread(cell)
    met = (count > 1).double().sum()
    return torch.stack([total, freedom, within, inner, met, torch.tensor(float(len(x)))]).double()


def explained(sums: Tensor) -> float:
    """Share of the variance of returns, within groups, that states and actions explain (adjusted R
    squared, with one more degree of freedom that explains nothing), times the share of calls that
    are not alone with theirs. sums: see `end_sums`."""
    total, freedom, within, inner, met, calls = sums.tolist()
    if total <= core.ROUNDING_SPREAD**2 * calls or freedom < 0.5:
        return 0.0
    each = total / freedom
    share: float = max(0.0, 1 - (within + each) / (inner + 1) / each)
    return share * float(met / calls)


def shown_before_the_end(ends: Tensor) -> float:
    """Trust in values by how much of the outcome the calls before the last show, and the last."""
    low, high = VISIBLE_OUTCOME
    return min(max((min(map(explained, ends)) - low) / (high - low), 0.0), 1.0)


def stages(calls: Calls) -> Tensor:
    """0 for the first call of a rollout, 1 for the next 2, 2 for the next 4, ..."""
    return (calls.turn + 1).double().log2().floor().long()


def effect_sums(calls: Calls, missed: Tensor) -> Tensor:
    """How much the actions explain of what values miss, [contexts, 2, stages].

    The sum of `missed` times the score of each call, under a policy with a logit for each action in
    each context, is the gradient that values lose. Its square, and the square that it would have by
    chance, as the rollouts of a group differ: by stages, with states and with whole prompts as
    contexts."""
    stage, missed = stages(calls), missed / (calls.unit or 1.0)
    size = reduce_by(calls.following < 0, calls.group)[calls.group]
    sums = []
    for context in calls.contexts:
        at_stage = key(context, stage)
        (found,), (each,), (groups,) = (
            squared_scores(calls, unit, at_stage, missed)
            for unit in (torch.zeros_like(calls.rollout), calls.rollout, calls.group)
        )
        # Sum of n / (n - 1) times the squared deviations of a group's n rollouts from their mean.
        noise = (size * each - groups) / (size - 1)
        sums.append(torch.stack([reduce_by(found, stage), reduce_by(noise, stage)]))
    return torch.stack(sums)


def missed_effects(effects: Tensor) -> Tensor:
    """Trust in values at each stage by how little the actions explain of what values miss, in all
    and at this stage. effects: see `effect_sums`."""
    trust = torch.ones(effects.shape[-1], dtype=torch.float64)
    for found, noise in effects:
        trust = trust.minimum(fading(found, noise, EFFECT_AT))
        trust = trust.minimum(fading(found.sum(), noise.sum(), MISSED_EFFECT))
    return trust


def fading(found: Tensor, noise: Tensor, bounds: tuple[float, float]) -> Tensor:
    """1 up to the lower bound of found / noise, 0 from the upper one on."""
    low, high = bounds
    ratio = torch.where(found > 0, found / noise.clamp(min=1e-300), 0.0)
    return ((high - ratio) / (high - low)).clamp(0.0, 1.0)


def squared_scores(calls: Calls, unit: Tensor, context: Tensor, *sums: Tensor) -> list[Tensor]:
    """For each x of `sums`, the squared norm of the sum of x times score over the calls of each
    pair of unit and context, at one call of the pair, 0 at its others. A score is 1 at the call's
    action minus the policy, whose probabilities are known for what was said; the sum of their
    squares is their mean. A call that was certain, or has no tokens, has none."""
    scored = (calls.weight > LEAST_SCORE_NORM).double()
    chance = calls.chance * scored
    pair = key(unit, context)
    cell = key(pair, calls.action)
    mean = reduce_by(chance, context) / reduce_by(scored, context).clamp(min=1.0)
    place = torch.arange(len(scored))
    at, of_cell = (reduce_by(place, same, how="amax").long() for same in (pair, cell))
    owner, likely = at[pair[of_cell]], mean[context[at]]

    def squared(x: Tensor) -> Tensor:
        total, expected = reduce_by(x, pair), reduce_by(x * chance, pair)
        square = torch.zeros_like(x).index_add_(0, owner, reduce_by(x, cell) ** 2)
        square[at] += total**2 * likely - 2 * total * expected
        return square

    return [squared(x * scored) for x in sums]


@dataclass(slots=True)
class Evidence:
    """What batches showed of values. One weighs `SCALE_DECAY` or `NOISY_DECAY` of the next."""

    time: Tensor  # [4], see `time_terms`
    ends: Tensor  # [2, 6], `end_sums` of last calls and those before
    effects: Tensor  # [contexts, 2, stages], see `effect_sums`
    gains: Tensor  # [contexts, 3, 2], see `gain_sums`
    batches: float = 1.0
    trusted: float = 0.0  # mean `trust` in the last batch, which is not saved

    def then(self, now: Evidence) -> Evidence:
        """Of this and the next batch."""
        longest = max(self.effects.shape[-1], now.effects.shape[-1])
        before, after = (pad(x.effects, (0, longest - x.effects.shape[-1])) for x in (self, now))
        return Evidence(
            SCALE_DECAY * self.time + now.time,
            SCALE_DECAY * self.ends + now.ends,
            SCALE_DECAY * before + after,
            NOISY_DECAY * self.gains + now.gains,
            NOISY_DECAY * self.batches + now.batches,
        )

    def metrics(self) -> dict[str, float]:
        return {"credit/by_state": self.trusted}

    def dump(self) -> Json:
        sums = (self.time, self.ends, self.effects, self.gains)
        return [*(x.tolist() for x in sums), self.batches]

    def restore(self, data: Json) -> None:
        *sums, self.batches = msgspec.convert(data, Saved)
        self.time, self.ends, self.effects, self.gains = (
            torch.tensor(x, dtype=torch.float64) for x in sums
        )


Table = list[list[float]]
Saved = tuple[list[float], Table, list[Table], list[Table], float]


def no_evidence() -> Evidence:
    shapes = ((4,), (2, 6), (2, 2, 1), (2, 3, 2))
    time, ends, effects, gains = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
    return Evidence(time, ends, effects, gains, batches=0.0)


def evidence(calls: Calls, lam: float, past: Tensor | None = None) -> tuple[Tensor, Evidence]:
    """What values miss (`missed_by_values`), and what a batch shows of values."""
    last = calls.following < 0
    before = ~last & last[calls.following]
    missed = missed_by_values(calls, lam, past)
    now = Evidence(
        time_terms(calls, calls.returns).sum(1),
        torch.stack([end_sums(calls, last), end_sums(calls, before)]),
        effect_sums(calls, centred(calls, missed)),
        gain_sums(calls, missed, lam, past),
    )
    return missed, now


def centred(calls: Calls, missed: Tensor) -> Tensor:
    """Less its mean over other rollouts in the state."""
    mean, count = mean_by(missed, calls.state, calls.rollout)
    return missed - torch.where(count > 0, mean, 0.0)


def gain_sums(calls: Calls, missed: Tensor, lam: float, past: Tensor | None) -> Tensor:
    """Of the gradients of what values miss, of returns and of both, [contexts, 3, 2]: the square,
    and its part that is not noise, from the product of the gradients of two halves of the rollouts
    that know nothing of each other."""
    half, everywhere = calls.rollout % 2, torch.zeros_like(calls.rollout)
    apart = calls._replace(group=key(calls.group, half), state=key(calls.state, half))
    found = []
    for part, lost in ((calls, missed), (apart, missed_by_values(apart, lam, past))):
        returns = (part.returns - plain_baselines(part)) / calls.unit
        lost = centred(part, lost) / calls.unit
        found.append((lost, returns, lost + returns))
    whole, halves = found

    def gains(context: Tensor) -> Tensor:
        together = squared_scores(calls, everywhere, context, *whole, *halves)
        separate = squared_scores(calls, half, context, *halves)
        squares, joined, own = (
            torch.stack([x.sum() for x in some])
            for some in (together[: len(whole)], together[len(whole) :], separate)
        )
        return torch.stack([squares, 2 * (joined - own)], dim=1)

    return torch.stack([gains(context) for context in calls.contexts])


def earned(past: Evidence) -> float:
    """How much of what values miss to take out of returns, from 0 to 1, so that the gradient has
    the least error at its full length, by what earlier batches showed: see "Peers" in CREDIT.md."""
    if not past.batches:
        return 0.0
    found = 1.0
    for missed, returns, both in past.gains.tolist():
        (square, product), (signal, lost) = (
            (returns[i], (both[i] - returns[i] - missed[i]) / 2) for i in (0, 1)
        )
        noise, shared = square - signal, product - lost
        doubt = GRADIENT_DOUBT * noise / past.batches**0.5
        share = min(max((lost + doubt) / (signal + doubt), 0.0), 1.0) if signal > -doubt else 1.0
        gain, cost = shared - share * noise, missed[0] - share * shared
        found = min(found, gain / cost if gain > 0 and cost > 0 else 0.0)
    return found


def trust(calls: Calls, judged: Evidence, past: Evidence | None = None) -> Tensor:
    """How far values of states replace returns, from 0 to 1, [S]. judged: all evidence; past: that
    of earlier batches."""
    shown = max(shown_before_the_end(judged.ends), earned(past) if past else 0.0)
    return shown * missed_effects(judged.effects)[stages(calls)]


@dataclass(frozen=True, slots=True)
class PeerAdvantages(JudgedColumn):
    """The return of each call, without what later calls did to it as far as values of states can be
    trusted (`lambda_returns`), minus `baselines`, [S]; 0 without others to compare with. A constant
    that is added to all outcomes changes nothing; a factor is one of the advantages."""

    stored_as: ClassVar[str] = "peers"
    reward: str | Column = "outcome"
    gamma: float = 1.0
    lam: float = LAMBDA

    @property
    def level(self) -> Level:
        return "transition"

    def part(self, seed: int) -> StatePart:
        return no_evidence()

    def recall(
        self, part: StatePart, batch: Batch, rollouts: Sequence[Rollout]
    ) -> tuple[Tensor, StatePart]:
        assert isinstance(part, Evidence)
        total = Returns(self.reward, 1.0)(batch)
        calls, index = calls_of(batch, self.reward, self.gamma, total)
        advantage = torch.where(total.isnan(), total, 0.0)
        if not calls.unit:
            return advantage, part
        missed, now = evidence(calls, self.lam, SCALE_DECAY * part.time)
        judged = part.then(now)
        trusted = trust(calls, judged, part)
        judged.trusted = float(trusted.mean())
        x = calls.returns - trusted * missed
        base = baselines(calls, x, SCALE_DECAY * part.time)
        advantage[index] = core.standardise(x, calls.group, base=base).advantage
        return advantage, judged
