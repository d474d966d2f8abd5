"""Credit of calls by their states: from calls of other rollouts in the same states, as far as a
batch shows it to be safe (see "Peers" in CREDIT.md); and the scale of GRPO, remembered over
batches.

Calls without a later known reward are left out. Tensors are float64 [S] over the calls that remain.
Means are over other rollouts than the call's own, so that they do not depend on the call. One batch
contains little evidence about states, so a run remembers the evidence of earlier batches; a batch
without memory is judged by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.calls import Returns, call_rewards
from agentrl.algorithms.credit.core import Column, Credit
from agentrl.algorithms.data import ids
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, key, next_same, reduce_by, scan, units
from agentrl.algorithms.data.state import RememberedColumn, StatePart
from agentrl.core.types import Json, Rollout

SCALE_DECAY = 0.9  # weight of a batch in the memory, relative to the next batch


class JudgedColumn(RememberedColumn):
    """A column with an optional memory of earlier batches: a batch without stored memory is judged
    by itself."""

    __slots__ = ()

    def __call__(self, batch: Batch) -> Tensor:
        column = batch.remembered.get(self.name)
        if column is None or bool(column.isnan().all()):
            return self.recall(self.part(0), batch, ())[0]
        return column


@dataclass(slots=True)
class Spread:
    """Squared deviations of returns within groups, and degrees of freedom, of earlier batches."""

    squares: float = 0.0
    freedom: float = 0.0

    def dump(self) -> Json:
        return [self.squares, self.freedom]

    def restore(self, data: Json) -> None:
        self.squares, self.freedom = msgspec.convert(data, tuple[float, float])


@dataclass(frozen=True, slots=True)
class ReturnScale(JudgedColumn):
    """Standard deviation of the returns of each rollout's group, [U], with equal weight for each
    rollout regardless of its number of calls: the group's deviation as in GRPO, shrunk towards that
    of earlier batches as additional degrees of freedom. The group's deviation alone depends on its
    samples, so dividing by it would weight groups by luck."""

    stored_as: ClassVar[str] = "return-scale"
    reward: str | Column = "outcome"

    @property
    def level(self) -> Level:
        return "rollout"

    def part(self, seed: int) -> StatePart:
        return Spread()

    def recall(
        self, part: StatePart, batch: Batch, rollouts: Sequence[Rollout]
    ) -> tuple[Tensor, StatePart]:
        assert isinstance(part, Spread)
        returns = Returns(self.reward)(batch)
        group, owner = units(batch, "transition", "group"), batch.transition_rollout
        has_return = (~returns.isnan()).double()
        weight = has_return / reduce_by(has_return, owner)[owner].clamp(min=1.0)
        scale = core.standardise(returns, group, norm="std", w=weight).scale
        freedom = torch.where(scale > 0, reduce_by(weight, group)[group] - 1, 0.0)
        squares = freedom * scale.square()
        memory = Spread(SCALE_DECAY * part.squares, SCALE_DECAY * part.freedom)
        variance = (squares + memory.squares) / (freedom + memory.freedom).clamp(min=1e-300)
        scales = torch.zeros(len(batch.rollouts), dtype=torch.float64)
        scales[owner] = torch.where(freedom > 0, variance.sqrt(), 0.0)
        memory.squares += float((squares * weight / (freedom + 1)).sum())
        memory.freedom += float((freedom * weight / (freedom + 1)).sum())
        return scales, memory


@dataclass(frozen=True, slots=True)
class GrpoScale:
    """A credit [N] that is the reward minus the mean of the others', times the factor that makes it
    GRPO's: (n - 1) / n over the standard deviation of the returns of the group's n rollouts."""

    credit: Credit
    reward: str | Column = "outcome"
    scale: Column | None = None

    def __call__(self, batch: Batch) -> Tensor:
        has_return = ~Returns(self.reward)(batch).isnan()
        rollouts = reduce_by(has_return, batch.transition_rollout, len(batch.rollouts)) > 0
        n = reduce_by(rollouts, batch.rollout_group)[batch.rollout_group]
        scale = (self.scale or ReturnScale(self.reward))(batch)
        factor = torch.where(scale > 0, (n - 1) / n / scale, 0.0)
        return self.credit(batch) * factor[batch.token_rollout]


MIN_SCORE_NORM = 1e-6  # smallest squared norm of a call's score


class Calls(NamedTuple):
    """The calls of a batch that have a return."""

    returns: Tensor  # discounted sum of the call's and later rewards
    received: Tensor  # the call's reward
    gamma: float
    rollout: Tensor  # int64, also of the following
    group: Tensor
    turn: Tensor  # number of earlier calls
    following: Tensor  # index of the rollout's next call; -1: none
    state: Tensor  # id of (group, role, state)
    action: Tensor  # id of the answer's text or tool calls
    # Ids of the contexts in which the policy acted: state, whole prompt.
    contexts: tuple[Tensor, ...]
    chance: Tensor  # probability of the sampled answer
    weight: Tensor  # squared norm of the gradient of its log-prob by the logits, about
    unit: float  # standard deviation of returns within groups; 0: they are equal


def calls_of(
    batch: Batch, reward: str | Column, gamma: float, total: Tensor
) -> tuple[Calls, Tensor]:
    """The calls with a return that can be compared (another rollout of the group has a return,
    too), and their indices in the batch, int64 [K]. total: undiscounted return of each call,
    [S]."""
    group = units(batch, "transition", "group")
    has_return = ~total.isnan()
    compared = reduce_by(has_return & (batch.transition_turn == 0), group)[group] > 1
    index = (has_return & compared).nonzero().squeeze(1)
    sampled, call = batch.sampler_logprobs.double(), batch.token_transition
    logprob, norm = (torch.zeros(len(group), dtype=torch.float64) for _ in range(2))
    logprob.index_add_(0, call, sampled)
    norm.index_add_(0, call, (1 - sampled.exp()).square())
    rollout = batch.transition_rollout[index]
    returns = total if gamma == 1.0 else Returns(reward, gamma)(batch)
    calls = Calls(
        returns=returns[index].nan_to_num(nan=0.0),  # missing if gamma is 0 and rewards are later
        received=call_rewards(batch, reward)[index].nan_to_num(nan=0.0),
        gamma=gamma,
        rollout=key(rollout),
        group=key(group[index]),
        turn=batch.transition_turn[index],
        following=next_same(rollout),
        state=units(batch, "transition", "group", "role", "state")[index],
        action=ids.of_calls(batch, "action")[index],
        contexts=tuple(
            units(batch, "transition", "role", kind)[index] for kind in ("state", "prompt")
        ),
        chance=logprob.exp()[index],
        weight=norm.clamp(min=MIN_SCORE_NORM)[index],
        unit=0.0,
    )
    calls = from_lowest(calls) if gamma == 1.0 else calls
    return calls._replace(unit=deviation(calls)), index


def deviation(calls: Calls) -> float:
    """Standard deviation of returns within groups; 0 if it is a rounding error."""
    x = calls.returns
    if not x.numel():
        return 0.0
    std = float((x - mean_by(x, calls.group)[0]).square().mean().sqrt())
    return std if std > core.ROUNDING_SPREAD * float(x.abs().max()) else 0.0


def from_lowest(calls: Calls) -> Calls:
    """Outcomes minus the lowest of the group, so that equal outcomes are exactly 0: differences
    that `core.standardise` treats as rounding errors become 0. Rewards of calls are unchanged."""
    if calls.received[calls.following >= 0].any():
        return calls
    lowest = reduce_by(calls.returns, calls.group, how="amin")[calls.group]
    largest = reduce_by(calls.returns.abs(), calls.group, how="amax")[calls.group]
    over = calls.returns - lowest
    over = torch.where(over > core.ROUNDING_SPREAD * largest, over, 0.0)
    return calls._replace(returns=over, received=torch.where(calls.following < 0, over, 0.0))


def of_others(calls: Calls, x: Tensor, same: Tensor) -> Tensor:
    """Sum of x over the calls of other rollouts with the same id; a rollout's calls have one id."""
    return reduce_by(x, same)[same] - reduce_by(x, calls.rollout)[calls.rollout]


def state_values(calls: Calls, x: Tensor, past: Tensor | None = None) -> Tensor:
    """Mean x of other rollouts in each call's state (NaN if there are none) plus the effect of
    time, because a state that recurs later may be worth less: the slope over turns of the
    differences from the states' means, shrunk by the part that noise explains. past: `time_terms`
    of earlier batches.
    """
    mean, count = mean_by(x, calls.state, calls.rollout)
    turn, everywhere = calls.turn.double(), torch.zeros_like(calls.rollout)
    when = mean_by(turn, calls.state, calls.rollout)[0]
    before = torch.zeros(4, dtype=torch.float64) if past is None else past
    squares, product, total, pairs = (
        of_others(calls, y, everywhere) + earlier
        for y, earlier in zip(time_terms(calls, x), before, strict=True)
    )
    slope = torch.where(squares > 0, product / squares, 0.0)
    noise = (total - slope * product).clamp(min=0.0) / (pairs - 1).clamp(min=1.0)
    slope *= surplus(slope * product, noise)
    return torch.where(count > 0, mean + slope * (turn - when), torch.nan)


def time_terms(calls: Calls, x: Tensor) -> Tensor:
    """The terms to fit slopes, for each call, [4, S]: squared distance of its turn from the mean of
    its state, product with that of x, squared distance of x, and whether there is one."""
    turn = calls.turn.double()
    late = turn - mean_by(turn, calls.state)[0]
    off = x - mean_by(x, calls.state)[0]
    return torch.stack([late**2, late * off, off**2, (late != 0).double()])


def surplus(signal: Tensor, noise: Tensor) -> Tensor:
    """max(0, 1 - noise / signal): the share of a square that noise does not explain."""
    return torch.where(signal > noise, 1 - noise / signal, 0.0)


def lambda_returns(calls: Calls, value: Tensor, lam: float) -> Tensor:
    """Lambda-return of each call by the values of states; calls without a value are skipped."""
    after = torch.where(calls.following >= 0, value[calls.following], torch.nan)
    valued = ~after.isnan()
    step = calls.received + torch.where(valued, calls.gamma * (1 - lam) * after, 0.0)
    return scan(step, torch.where(valued, lam, 1.0) * calls.gamma, calls.following)


def missed_by_values(calls: Calls, lam: float, past: Tensor | None = None) -> Tensor:
    """Each return minus the lambda-return computed from the values of states. past: as in
    `state_values`."""
    return calls.returns - lambda_returns(calls, state_values(calls, calls.returns, past), lam)


def plain_baselines(calls: Calls) -> Tensor:
    """Mean return of the group's other rollouts at the same turn, or at their last call. For an
    outcome reward this is RLOO's baseline, arXiv 2402.14740."""
    last = (calls.following < 0).double()
    at = key(calls.group, calls.turn)  # in a group each turn follows the one before
    now, ended = reduce_by(calls.returns, at), reduce_by(calls.returns * last, at)
    before = torch.arange(len(now)) - 1
    before[at[calls.turn == 0]] = -1
    total = now + scan(ended, 1.0, before) - ended
    others = reduce_by(last, calls.group)[calls.group] - 1
    return (total[at] - calls.returns) / others.clamp(min=1.0)


def baselines(calls: Calls, x: Tensor, past: Tensor | None = None) -> Tensor:
    """`plain_baselines`, shifted towards the value of the state by the amount that reduces the
    variance of x most: least squares over the calls of other rollouts, weighted as in the gradient,
    shrunk by the part that noise explains.
    """
    base = plain_baselines(calls)
    moved = (state_values(calls, x, past) - base).nan_to_num(nan=0.0)
    everywhere, residual = torch.zeros_like(calls.rollout), x - base
    squares, product, total = (
        of_others(calls, calls.weight * y, everywhere)
        for y in (moved**2, moved * residual, residual**2)
    )
    others = int(calls.rollout.max())
    fit = torch.where(squares > 0, product / squares, 0.0)
    noise = (total - fit * product).clamp(min=0.0) / max(others - 1, 1)
    return base + (fit * surplus(fit * product, noise)).clamp(0.0, 1.0) * moved


def mean_by(x: Tensor, ids: Tensor, without: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and count of the x with the same id, [U] each; 0 if there are none. without: ids; units
    with the same id as x, including x, are excluded from its mean."""
    excluded = None if without is None else key(ids, without)

    def total(y: Tensor) -> Tensor:
        sums = reduce_by(y, ids)[ids]
        return sums if excluded is None else sums - reduce_by(y, excluded)[excluded]

    count = total(torch.ones_like(x))
    return torch.where(count > 0, total(x) / count, 0.0), count


# Share of the outcome that is visible before the end: no trust, full trust.
VISIBLE_OUTCOME = (0.15, 0.5)
# Squared effect missed by values, relative to its noise: limits of full trust and of no trust.
MISSED_EFFECT = (1.25, 2.5)
EFFECT_AT = (1.5, 3.0)  # the same at single turns, which are noisier
LAMBDA = 0.5  # default of the lambda-returns
# Weight of an earlier batch where many batches are needed to separate the gradient from noise.
NOISY_DECAY = 0.97
# Share of the noise of a batch's gradient: the uncertainty about the gradient after one batch.
GRADIENT_ERROR = 0.3


def end_sums(calls: Calls, chosen: Tensor) -> Tensor:
    """Sums over the returns of the chosen calls, [6]: squared deviations within groups and degrees
    of freedom, the same within pairs of state and action, the number of calls that share their
    pair, and of all calls."""
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
    """Share of the variance of returns within groups that states and actions explain (adjusted R
    squared, with one additional degree of freedom that explains nothing), times the share of calls
    that share their pair. sums: see `end_sums`."""
    total, freedom, within, inner, met, calls = sums.tolist()
    if total <= core.ROUNDING_SPREAD**2 * calls or freedom < 0.5:
        return 0.0
    variance = total / freedom
    share: float = max(0.0, 1 - (within + variance) / (inner + 1) / variance)
    return share * float(met / calls)


def shown_before_the_end(ends: Tensor) -> float:
    """Trust in values, from the smaller of two shares of the outcome: the share that the last calls
    of rollouts show, and the share that the calls before them show."""
    low, high = VISIBLE_OUTCOME
    return min(max((min(map(explained, ends)) - low) / (high - low), 0.0), 1.0)


def stages(calls: Calls) -> Tensor:
    """0 for the first call of a rollout, 1 for the next 2, 2 for the next 4, ..."""
    return (calls.turn + 1).double().log2().floor().long()


def effect_sums(calls: Calls, missed: Tensor) -> Tensor:
    """How much the actions explain of the part that values miss, [contexts, 2, stages]. The sum of
    `missed` times the score of each call, under a policy with one logit per action and context, is
    the gradient that values lose. Returned are its square, and the square expected by chance from
    the differences between rollouts of a group: by stage, with states and with whole prompts as
    contexts."""
    stage, missed = stages(calls), missed / (calls.unit or 1.0)
    size = reduce_by(calls.following < 0, calls.group)[calls.group]
    sums = []
    for context in calls.contexts:
        at_stage = key(context, stage)
        (square,), (by_rollout,), (by_group,) = (
            squared_scores(calls, unit, at_stage, missed)
            for unit in (torch.zeros_like(calls.rollout), calls.rollout, calls.group)
        )
        # Sum of n / (n - 1) times the squared deviations of a group's n rollouts from their mean.
        noise = (size * by_rollout - by_group) / (size - 1)
        sums.append(torch.stack([reduce_by(square, stage), reduce_by(noise, stage)]))
    return torch.stack(sums)


def missed_effects(effects: Tensor) -> Tensor:
    """Trust in values at each stage: high if actions explain little of the part that values miss,
    in total and at this stage. effects: see `effect_sums`."""
    trust = torch.ones(effects.shape[-1], dtype=torch.float64)
    for square, noise in effects:
        trust = trust.minimum(fading(square, noise, EFFECT_AT))
        trust = trust.minimum(fading(square.sum(), noise.sum(), MISSED_EFFECT))
    return trust


def fading(square: Tensor, noise: Tensor, bounds: tuple[float, float]) -> Tensor:
    """1 up to the lower bound of found / noise, 0 from the upper one on."""
    low, high = bounds
    ratio = torch.where(square > 0, square / noise.clamp(min=1e-300), 0.0)
    return ((high - ratio) / (high - low)).clamp(0.0, 1.0)


def squared_scores(calls: Calls, unit: Tensor, context: Tensor, *sums: Tensor) -> list[Tensor]:
    """For each x of `sums`, the squared norm of the sum of x times score over the calls of each
    pair of unit and context, at one call of the pair, 0 at its others. A score is the indicator of
    the call's action minus the policy's probabilities, which are known for sampled answers; the sum
    of their squares is estimated by their mean. A call with probability 1, or without tokens, has
    no score."""
    scored = (calls.weight > MIN_SCORE_NORM).double()
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
    """The evidence of batches about values. A batch has `SCALE_DECAY` or `NOISY_DECAY` times the
    weight of the next."""

    time: Tensor  # [4], see `time_terms`
    ends: Tensor  # [2, 6], `end_sums` of last calls and those before
    effects: Tensor  # [contexts, 2, stages], see `effect_sums`
    gains: Tensor  # [contexts, 3, 2], see `gain_sums`
    batches: float = 1.0
    trusted: float = 0.0  # mean `trust` in the last batch, which is not saved

    def then(self, now: Evidence) -> Evidence:
        """The combined evidence of this and the next batch."""
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
    """The part that values miss (`missed_by_values`), and a batch's evidence about values."""
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
    """`missed` minus its mean over other rollouts in the same state."""
    mean, count = mean_by(missed, calls.state, calls.rollout)
    return missed - torch.where(count > 0, mean, 0.0)


def gain_sums(calls: Calls, missed: Tensor, lam: float, past: Tensor | None) -> Tensor:
    """For the gradients of the part that values miss, of returns and of their product, [contexts,
    3, 2]: the square, and an estimate of it without noise, from the product of the gradients of two
    independent halves of the rollouts."""
    half, everywhere = calls.rollout % 2, torch.zeros_like(calls.rollout)
    apart = calls._replace(group=key(calls.group, half), state=key(calls.state, half))
    gradients = []
    for part, lost in ((calls, missed), (apart, missed_by_values(apart, lam, past))):
        returns = (part.returns - plain_baselines(part)) / calls.unit
        lost = centred(part, lost) / calls.unit
        gradients.append((lost, returns, lost + returns))
    whole, halves = gradients

    def gains(context: Tensor) -> Tensor:
        together = squared_scores(calls, everywhere, context, *whole, *halves)
        separate = squared_scores(calls, half, context, *halves)
        squares, joined, within_halves = (
            torch.stack([x.sum() for x in terms])
            for terms in (together[: len(whole)], together[len(whole) :], separate)
        )
        return torch.stack([squares, 2 * (joined - within_halves)], dim=1)

    return torch.stack([gains(context) for context in calls.contexts])


def earned(past: Evidence) -> float:
    """The share, from 0 to 1, of the part that values miss to subtract from returns, such that the
    gradient at its full length has the smallest error, by the evidence of earlier batches: see
    "Peers" in CREDIT.md."""
    if not past.batches:
        return 0.0
    smallest = 1.0
    for missed, returns, product_sums in past.gains.tolist():
        (square, product), (signal, lost) = (
            (returns[i], (product_sums[i] - returns[i] - missed[i]) / 2) for i in (0, 1)
        )
        noise, shared = square - signal, product - lost
        doubt = GRADIENT_ERROR * noise / past.batches**0.5
        share = min(max((lost + doubt) / (signal + doubt), 0.0), 1.0) if signal > -doubt else 1.0
        gain, cost = shared - share * noise, missed[0] - share * shared
        smallest = min(smallest, gain / cost if gain > 0 and cost > 0 else 0.0)
    return smallest


def trust(calls: Calls, judged: Evidence, past: Evidence | None = None) -> Tensor:
    """The weight with which values of states replace returns, from 0 to 1, [S]. judged: all
    evidence; past: that of earlier batches."""
    shown = max(shown_before_the_end(judged.ends), earned(past) if past else 0.0)
    return shown * missed_effects(judged.effects)[stages(calls)]


@dataclass(frozen=True, slots=True)
class PeerAdvantages(JudgedColumn):
    """The return of each call minus `baselines`, [S]. As far as values of states can be trusted,
    they replace the effect of later calls on the return (`lambda_returns`). 0 without other calls
    to compare with. Adding a constant to all outcomes changes nothing; scaling them scales the
    advantages."""

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
