"""What the credit of `peers` and `auto` promises, on batches of small worlds."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from statistics import fmean, pstdev

import msgspec
import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit import states
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.objective.core import compute_advantages
from agentrl.algorithms.presets.registry import make
from tests import factories
from tests.algorithms.worlds import NAN, Call, Play, random_plays, world

Plays = list[Play]
Dice = random.Random


def credit(name: str, batch: Batch | Plays, **options: object) -> Tensor:
    """One advantage per token."""
    data = batch if isinstance(batch, Batch) else world(*batch)
    return compute_advantages(make(name, options), data)


def talk(seen: Sequence[Hashable], said: Sequence[int], chance: float = 0.5) -> list[Call]:
    """Calls that saw and did this, of a policy that keeps the conversation in its prompt."""
    return [
        Call(
            state,
            node=action,
            prompt=(tuple(seen[: i + 1]), tuple(said[:i])),
            logprob=round(math.log(chance if action == 0 else 1 - chance) * 1024) / 1024,  # float32
            rewards={"p": (i + action) % 3 / 4},
        )
        for i, (state, action) in enumerate(zip(seen, said, strict=True))
    ]


def corridor(dice: Dice, n: int = 16, group: int = 0) -> Plays:
    """Steps forwards and back, of which some slip, until the end or the eighth call: places come
    back, and the place and the time show all that matters."""
    plays = []
    for _ in range(n):
        place, seen, said = 0, list[int](), list[int]()
        while place < 4 and len(said) < 8:
            seen.append(place)
            said.append(int(dice.random() >= 0.7))
            forwards = (said[-1] == 0) != (dice.random() < 0.1)
            place = max(0, place + (1 if forwards else -1))
        plays.append(Play(talk(seen, said, 0.7), float(place == 4), group))
    return plays


def saved(dice: Dice, n: int = 16, group: int = 0) -> Plays:
    """The first call decides, four tools answer "ok", and the last observation is the result."""
    plays = []
    for _ in range(n):
        said = [int(dice.random() >= 0.4)] + [dice.randrange(2) for _ in range(5)]
        end = "failed" if said[0] else "passed"
        plays.append(Play(talk(["task", *["ok"] * 4, end], said), 1.0 - said[0], group))
    return plays


def unique(dice: Dice, n: int = 16, group: int = 0) -> Plays:
    return [
        Play(
            [Call((group, u, i), rewards={"p": i / 4}) for i in range(dice.randint(1, 9))],
            dice.randint(0, 4) / 4,
            group,
        )
        for u in range(n)
    ]


def single(dice: Dice, n: int = 16, group: int = 0) -> Plays:
    def call() -> Call:
        return Call("task", node=dice.randrange(3), rewards={"p": dice.randint(0, 4) / 4})

    return [Play([call()], dice.randint(0, 2), group) for _ in range(n)]


def mixed(dice: Dice, n: int = 16, group: int = 0) -> Plays:
    return corridor(dice, n // 2, group) + single(dice, n - n // 2, group)


WORLDS = (corridor, saved, unique, single, mixed)
COMPARED = (corridor, saved, mixed)  # elsewhere it is plain credit, exactly


def several(make_group: Callable[[Dice, int, int], Plays], seed: int, groups: int = 2) -> Plays:
    dice = Dice(seed)
    return [play for group in range(groups) for play in make_group(dice, 10, group)]


def outcomes(plays: Plays, change: Callable[[float], float]) -> Plays:
    return [replace(play, outcome=change(play.outcome)) for play in plays]


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def equal(a: Tensor, b: Tensor, within: float = 1e-10) -> bool:
    return torch.allclose(a, b, rtol=within, atol=within, equal_nan=True)


def test_values_are_trusted_only_where_states_tell() -> None:
    from agentrl.advise import trust_in_states

    def mean_trust(make_group: Callable[..., Plays]) -> float:
        return fmean(trust_in_states(world(*make_group(Dice(seed), 16))) for seed in range(8))

    assert mean_trust(corridor) > 0.6
    assert mean_trust(saved) < 0.1
    assert mean_trust(unique) == mean_trust(single) == 0.0
    assert trust_in_states(world(*corridor(Dice(0), 1))) == 0.0  # nothing to compare


# -- exact properties ------------------------------------------------------------------------------


@pytest.mark.parametrize("world_of", WORLDS)
@pytest.mark.parametrize("preset", ["peers", "auto"])
def test_a_constant_in_the_outcome_changes_nothing(
    world_of: Callable[..., Plays], preset: str
) -> None:
    for seed in range(2):
        plays = several(world_of, seed)
        before = credit(preset, plays)
        for constant in (-10.0, -0.3, 1.0, 100.0):
            after = credit(preset, outcomes(plays, lambda x, c=constant: x + c))  # type: ignore[misc]
            assert equal(before, after, 1e-9)


@pytest.mark.parametrize("world_of", WORLDS)
def test_a_factor_of_the_outcome_scales_peers_and_not_auto(world_of: Callable[..., Plays]) -> None:
    for seed in range(2):
        plays = several(world_of, seed)
        by_peers, by_auto = credit("peers", plays), credit("auto", plays)
        for factor in (1e-6, 0.3, 1e9):
            scaled = outcomes(plays, lambda x, s=factor: x * s)  # type: ignore[misc]
            assert equal(by_peers, credit("peers", scaled) / factor)
            ours, grpo = credit("auto", scaled), credit("grpo", scaled)
            if factor != 1e-6:  # there GRPO adds as much to the deviation
                assert equal(by_auto, ours, 1e-5)
            assert (ours.abs().max() == 0) == (grpo.abs().max() == 0)


@pytest.mark.parametrize("world_of", WORLDS)
@pytest.mark.parametrize("preset", ["peers", "auto"])
@pytest.mark.parametrize("value", [0.0, 0.7, -3.0, 1e9, NAN])
def test_equal_outcomes_give_exactly_nothing(
    world_of: Callable[..., Plays], preset: str, value: float
) -> None:
    plays = outcomes(several(world_of, 0), lambda _: value)
    assert (credit(preset, plays).nan_to_num(nan=0.0) == 0).all()
    noisy = [replace(play, outcome=value * (1 + 1e-9 * i)) for i, play in enumerate(plays)]
    assert (credit(preset, noisy).nan_to_num(nan=0.0) == 0).all()  # as in grpo: rounding errors


@pytest.mark.parametrize("world_of", [unique, single])
@pytest.mark.parametrize(("ours", "plain"), [("peers", "rloo"), ("auto", "grpo")])
def test_without_states_to_compare_it_is_plain_credit(
    world_of: Callable[..., Plays], ours: str, plain: str
) -> None:
    for seed in range(2):
        plays = several(world_of, seed, groups=3)
        plays[2] = replace(plays[2], outcome=NAN)
        plays.append(Play([Call("alone"), Call("alone")], 1.0, group=3))
        assert equal(credit(ours, plays), credit(plain, plays), 1e-12)


@pytest.mark.parametrize("preset", ["peers", "auto"])
@pytest.mark.parametrize("reward", ["outcome", "transition:p"])
def test_a_rollout_without_others_has_no_credit_and_changes_none(preset: str, reward: str) -> None:
    for seed in range(2):
        plays = several(corridor, seed)
        options = {"reward": reward, "gamma": 0.9}
        alone = [replace(play, group=2) for play in corridor(Dice(9), 1)]
        unscored = [
            Play([Call("task", rewards={"p": NAN})] * 2, NAN, group=2) for _ in range(3)
        ]  # fmt: skip
        found = credit(preset, [*plays, *alone, *unscored], **options)
        n = sum(len(play.calls) for play in plays)
        assert equal(found[:n], credit(preset, plays, **options), 1e-12)
        assert (found[n : n + len(alone[0].calls)] == 0).all()
        assert found[-6:].isnan().all()


def test_missing_is_what_has_no_later_reward() -> None:
    for seed in range(8):
        plays = random_plays(seed)
        for name in ("outcome", "p"):
            reward = name if name == "outcome" else f"transition:{name}"
            found = credit("peers", plays, reward=reward)
            missing = []
            for play in plays:
                rewards = [call.rewards["p"] for call in play.calls]
                for i, call in enumerate(play.calls):
                    later = [play.outcome] if name == "outcome" else rewards[i:]
                    missing += [all(math.isnan(x) for x in later)] * call.tokens
            assert found.isnan().tolist() == missing


def test_replayed_calls_count_as_no_choice() -> None:
    """They have no tokens, so no gradient is lost through them."""
    plays = corridor(Dice(0))
    batch = world(*plays)
    calls, _ = states.calls_of(batch, "outcome", 1.0, credit("peers", batch))
    missed = calls.returns - 0.5
    (before,) = states.squared_scores(calls, calls.rollout, calls.contexts[0], missed)
    replayed = [
        replace(play, calls=[replace(play.calls[0], tokens=0), *play.calls[1:]]) for play in plays
    ]
    first = calls.turn == 0
    assert before[first].sum() > 0
    batch = world(*replayed)
    total = torch.ones(len(batch.transitions), dtype=torch.float64)
    calls, _ = states.calls_of(batch, "outcome", 1.0, total)
    (alone,) = states.squared_scores(calls, calls.rollout, calls.contexts[0], missed * first)
    assert (alone == 0).all()
    assert credit("auto", batch).isfinite().all()


def test_one_long_rollout_costs_the_others_no_memory() -> None:
    """A table of 2,000 rollouts and 20,000 turns would have 320 MB."""
    plays = [Play([Call((u, 0))], float(u % 2)) for u in range(2000)]
    plays.append(Play([Call(("long", i)) for i in range(20_000)], 1.0))
    assert equal(credit("peers", plays), credit("rloo", plays), 1e-9)


@pytest.mark.parametrize("preset", ["peers", "auto"])
def test_process_rewards_with_nearly_equal_sums_do_not_blow_up(preset: str) -> None:
    """The deviation of the sums is near 0, that of what calls get is not."""
    plays = [
        Play([Call((u, i), rewards={"p": x}) for i, x in enumerate(pair)])
        for u, pair in enumerate([(1.0, 0.0), (0.0, 1.00001), (1.0, 0.00001), (0.0, 1.0)])
    ]
    found = credit(preset, plays, reward="transition:p")
    assert 0.3 < found.abs().max() < 2


# -- memory ----------------------------------------------------------------------------------------


def remembered(name: str, batches: Sequence[Plays], **options: object) -> Tensor:
    """The credit of the last batch after the others."""
    algo, state = make(name, options), None
    for plays in batches:
        batch = world(*plays)
        state = state or AlgorithmState(algo.remembered)
        names = dict.fromkeys(batch.rollouts)
        groups = [factories.group(*[factories.rollout(x) for x in names])]
        recall = state.recall(batch, groups)
        found = compute_advantages(algo, dataclasses.replace(batch, remembered=recall.columns))
        state.adopt(recall)
        saved = msgspec.json.decode(msgspec.json.encode(state.dump()))
        state = AlgorithmState(algo.remembered)
        state.restore(saved)
    return found


@pytest.mark.parametrize(("world_of", "trusted"), [(corridor, True), (unique, False)])
def test_a_step_says_how_far_values_of_states_were_trusted(
    world_of: Callable[..., Plays], trusted: bool
) -> None:
    batch, state = world(*several(world_of, 1)), AlgorithmState((states.PeerAdvantages(),))
    assert state.metrics() == {"credit/by_state": 0.0}  # nothing was seen
    groups = [factories.group(*[factories.rollout(x) for x in dict.fromkeys(batch.rollouts)])]
    state.adopt(state.recall(batch, groups))
    share = state.metrics()["credit/by_state"]
    assert (0.5 < share <= 1.0) if trusted else share == 0.0


def earlier(world_of: Callable[..., Plays], count: int = 6) -> list[Plays]:
    return [several(world_of, 100 + seed) for seed in range(count)]


@pytest.mark.parametrize("preset", ["peers", "auto"])
@pytest.mark.parametrize("world_of", WORLDS)
def test_what_holds_exactly_holds_with_a_memory(
    world_of: Callable[..., Plays], preset: str
) -> None:
    plays = several(world_of, 0)
    for before in (earlier(world_of, 1), earlier(corridor, 1)):
        ours = remembered(preset, [*before, plays])
        moved = remembered(preset, [*before, outcomes(plays, lambda x: x - 10.0)])
        assert equal(ours, moved, 1e-9)
        alike = remembered(preset, [*before, outcomes(plays, lambda _: 0.7)])
        assert (alike.nan_to_num(nan=0.0) == 0).all()
        unit = [outcomes(some, lambda x: x * 1e4) for some in (*before, plays)]
        factor = 1e4 if preset == "peers" else 1.0
        assert equal(remembered(preset, unit), factor * ours, 1e-5 * factor)


@pytest.mark.parametrize("world_of", [unique, single])
def test_with_a_memory_unique_states_give_plain_credit(world_of: Callable[..., Plays]) -> None:
    """On the scale of several batches: the deviation of the group's returns, with more freedom."""
    plays = several(world_of, 0, groups=3)
    before = earlier(corridor)
    assert equal(remembered("peers", [*before, plays]), credit("rloo", plays), 1e-12)
    ours, grpo = remembered("auto", [*before, plays]), credit("grpo", plays)
    groups = torch.tensor([play.group for play in plays for _ in play.calls])
    deviations = []
    for group in range(3):
        some = (groups == group) & (grpo != 0)
        ratio = ours[some] / grpo[some]
        assert equal(ratio, ratio[:1].expand(len(ratio)), 1e-6)
        own = credit("rloo", plays)[some] * 9 / 10 / grpo[some]
        deviations.append((float(own[0]), float(own[0] / ratio[0])))
    lowest, highest = (f(found for _, found in deviations) for f in (min, max))
    own_lowest, own_highest = (f(own for own, _ in deviations) for f in (min, max))
    assert highest - lowest < 0.3 * (own_highest - own_lowest)


def test_a_group_without_the_rare_outcome_weighs_less() -> None:
    """Alone, both have a deviation of 1, and what the first learned is noise."""

    def batch(seed: int) -> Plays:
        dice = Dice(seed)
        return [
            Play([Call("task", node=dice.randrange(2))], rare + dice.choice((-0.2, 0.2)), group)
            for group, found in enumerate((0.0, 10.0))
            for rare in (found, *[0.0] * 7)
        ]

    def ratio(found: Tensor) -> float:
        return rms(found[:8]) / rms(found[8:])

    assert ratio(credit("auto", batch(0))) == pytest.approx(1.0, abs=1e-3)
    assert ratio(remembered("auto", [batch(seed) for seed in (1, 2, 3, 4, 0)])) < 0.1
    assert 0.3 < rms(remembered("auto", [batch(seed) for seed in (1, 2, 3, 4, 0)])) < 2


def spread_of_trust(world_of: Callable[..., Plays], batches: int) -> list[tuple[float, float]]:
    """Mean and standard deviation of the trust in a batch of 16: in one alone, and in one after
    eight others."""
    found: list[list[float]] = [[], []]
    for seed in range(batches):
        part = states.PeerAdvantages().part(0)
        for number in range(9):
            batch = world(*world_of(Dice(1000 * number + seed), 16))
            _, part = states.PeerAdvantages().recall(part, batch, ())
            if number in (0, 8):
                assert isinstance(part, states.Evidence)
                found[number > 0].append(states.shown_before_the_end(part.ends))
    return [(fmean(trust), pstdev(trust)) for trust in found]


def test_a_batch_is_judged_by_those_before_it_too() -> None:
    """What one batch shows of states jumps from none to all."""
    (alone, jumps), (mean, steady) = spread_of_trust(corridor, 8)
    assert mean > alone - 0.05
    assert steady < 0.5 * jumps
    assert spread_of_trust(saved, 3)[1][0] < 0.01


def test_a_memory_that_was_not_stored_is_none() -> None:
    """Credit that is shown again of a step before there was a memory."""
    for name in ("peers", "auto"):
        algo, batch = make(name, {}), world(*corridor(Dice(0)))
        lost = {
            memory.name: torch.full_like(memory(batch), torch.nan)
            for memory in algo.remembered
        }  # fmt: skip
        again = dataclasses.replace(batch, remembered=lost)
        assert equal(compute_advantages(algo, again), compute_advantages(algo, batch))


# -- continuity ------------------------------------------------------------------------------------


def of_rollouts(a: Tensor, plays: Plays) -> list[Tensor]:
    return list(a.split([len(play.calls) for play in plays]))


def changes(preset: str, batches: Sequence[tuple[Plays, Plays, int]]) -> tuple[list[float], float]:
    """How far the credit of the rollouts but one (all if -1) moves from one batch to the next, as a
    fraction of its root mean square, in ascending order; and the largest ratio of the latter."""
    found, ratios, known = [], [1.0], dict[int, list[Tensor]]()
    for old, new, without in batches:
        for plays in (old, new):
            if id(plays) not in known:
                known[id(plays)] = of_rollouts(credit(preset, plays), plays)
        a, b = known[id(old)], known[id(new)]
        a, b = (torch.cat([x[u] for u in range(16) if u != without]) for x in (a, b))
        if (size := rms(a)) > 0.1:
            found.append(rms(b - a) / size)
            ratios += [rms(b) / size, size / rms(b)]
    return sorted(found), max(ratios)


@pytest.mark.parametrize("preset", ["peers", "auto"])
def test_credit_is_continuous_in_the_number_of_long_rollouts(preset: str) -> None:
    """One rollout after another makes several calls instead of one, with the same outcome. (A
    switch between `grpo` and `peers` multiplied the scale by 3 between 7 and 8 of 16.)"""
    batches = []
    for seed in range(3):
        longs = corridor(Dice(seed))
        shorts = [replace(play, calls=[Call("task", node=0)]) for play in longs]
        rows = [[*longs[:number], *shorts[number:]] for number in range(17)]
        batches += [(rows[number], rows[number + 1], number) for number in range(16)]
    found, ratio = changes(preset, batches)
    assert found[len(found) // 2] < 0.2
    assert found[len(found) * 9 // 10] < 0.5
    assert ratio < 1.8


@pytest.mark.parametrize("world_of", COMPARED)
@pytest.mark.parametrize("preset", ["peers", "auto"])
def test_one_rollout_more_changes_the_others_little(
    world_of: Callable[..., Plays], preset: str
) -> None:
    """In 150 corridors by .15 at the median and .41 in one of ten; `rloo`: .06 and .09."""
    seeds = 50 if world_of is corridor else 20
    rows = [world_of(Dice(seed), 17) for seed in range(seeds)]
    found, ratio = changes(preset, [(plays[:16], plays, -1) for plays in rows])
    assert found[len(found) // 2] < 0.25
    assert found[len(found) * 9 // 10] < 0.5
    assert ratio < 2


@pytest.mark.parametrize("world_of", COMPARED)
@pytest.mark.parametrize("preset", ["peers", "auto"])
def test_small_changes_of_outcomes_change_credit_as_little(
    world_of: Callable[..., Plays], preset: str
) -> None:
    worst = 0.0
    for seed in range(8):
        dice = Dice(seed)
        plays = outcomes(several(world_of, seed), lambda x: x + dice.random() / 4)  # noqa: B023
        moved = outcomes(plays, lambda x: x + dice.choice((-1e-6, 1e-6)))  # noqa: B023
        change = (credit(preset, moved) - credit(preset, plays)).abs().max()
        worst = max(worst, float(change) / 1e-6)
    assert worst < 20


# -- safety ----------------------------------------------------------------------------------------


def first_calls(preset: str, batches: Sequence[Plays]) -> float:
    """How much more credit the first call has on average if its action was 0 than if it was 1."""
    credited: dict[object, list[float]] = {0: [], 1: []}
    for plays in batches:
        for play, a in zip(plays, of_rollouts(credit(preset, plays), plays), strict=True):
            credited[play.calls[0].node].append(float(a[0]))
    return fmean(credited[0]) - fmean(credited[1])


@pytest.mark.parametrize("later", [1, 2, 4, 6, 8])
def test_uninformative_answers_keep_the_credit_of_the_decision(later: int) -> None:
    def batch(dice: Dice) -> Plays:
        plays = saved(dice)
        for play in plays:
            said = [int(str(call.node)) for call in play.calls[:-1]][:1]
            said += [dice.randrange(2) for _ in range(later + 1)]
            end = "failed" if said[0] else "passed"
            play.calls = talk(["task", *["ok"] * later, end], said)
        return plays

    batches = [batch(Dice(seed)) for seed in range(15)]
    assert first_calls("peers", batches) > 0.9 * first_calls("rloo", batches)
    assert first_calls("auto", batches) > 0.9 * first_calls("grpo", batches)


def test_conversations_that_end_alike_keep_the_first_credit() -> None:
    """Sixteen of 30 calls that no other saw, of which the first decides."""

    def batch(dice: Dice) -> Plays:
        said = [[dice.randrange(2) for _ in range(30)] for _ in range(16)]
        seen = [["task", *((u, i) for i in range(1, 30))] for u in range(16)]
        failed = [u for u in range(16) if said[u][0] == 1][:2]
        for u in failed:
            seen[u][-1], said[u][-1] = "error", 0
        return [Play(talk(s, a), float(a[0] == 0)) for s, a in zip(seen, said, strict=True)]  # type: ignore[arg-type]

    batches = [batch(Dice(seed)) for seed in range(15)]
    assert first_calls("peers", batches) > 0.9 * first_calls("rloo", batches)


def test_where_states_tell_the_noise_is_much_less() -> None:
    """Of the credit of calls, about its mean by place, time and step."""

    def noise(preset: str) -> float:
        cells: dict[object, list[float]] = {}
        for seed in range(40):
            plays = corridor(Dice(seed))
            for play, a in zip(plays, of_rollouts(credit(preset, plays), plays), strict=True):
                for i, (call, x) in enumerate(zip(play.calls, a.tolist(), strict=True)):
                    cells.setdefault((call.state, i, call.node), []).append(x)
        means = {cell: fmean(x) for cell, x in cells.items()}
        return fmean((x - means[cell]) ** 2 for cell, found in cells.items() for x in found)

    assert noise("peers") < 0.5 * noise("rloo")
