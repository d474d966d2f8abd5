"""Presets for agents against naive credit per call and published losses under autograd."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

from agentrl.algorithms.objective.core import compute_advantages
from agentrl.algorithms.presets.registry import make
from agentrl.config import AlgorithmConfig
from agentrl.errors import ConfigError
from tests.algorithms.naive import (
    compare,
    naive_auto,
    naive_hiper,
    naive_histories,
    naive_peers,
    returns,
    rewards_of,
)
from tests.algorithms.presets.plays import (
    GAE,
    Case,
    Plays,
    calls,
    checked,
    copied,
    gae,
    missing,
    outcome,
    per_outcome,
    process,
    role,
    tokens,
    total,
    white,
)
from tests.algorithms.worlds import NAN, Call, Play, world


def ppo(plays: Plays, values: list[float]) -> list[float]:
    """Token by token, the reward at the last one of a rollout."""
    out: list[float] = []
    for play in plays:
        n = sum(call.tokens for call in play.calls)
        v, values = values[:n], values[n:]
        unknown = play.outcome != play.outcome and play.calls[-1].truncated
        a, last = [0.0] * n, 0.0
        for t in reversed(range(n)):
            r = (v[t] if unknown else play.outcome) if t == n - 1 else 0.0
            after = v[t + 1] if t < n - 1 else 0.0
            last = r + after - v[t] + 0.95 * last
            a[t] = last
        out += a
    return white(out, 1e-8)


def hiper(plays: Plays) -> list[float]:
    return total((white(naive_hiper(plays, "low")), 1), (white(naive_hiper(plays, "high")), 1))


def roles(plays: Plays) -> list[float]:
    """A rollout counts once in each role that it has."""
    entries = [(play, role) for play in plays for role in sorted({c.role for c in play.calls})]
    x = [play.outcome for play, _ in entries]
    credit = compare([(play.group, role) for play, role in entries], x, True)
    by_role = {(id(p), role): a for (p, role), a in zip(entries, missing(credit, x), strict=True)}
    return [by_role[id(play), call.role] for play in plays for call in play.calls]


def agreeing(plays: Plays) -> list[float]:
    host = outcome(plays, True)
    g = [x for play in plays for x in returns(rewards_of(play, "p"), 0.9)]
    step = calls(plays, g, lambda play, i: play.group, False)
    gated = [
        NAN if a != a or h != h else a if a * h > 0 else 0.0
        for a, h in zip(step, host, strict=True)
    ]
    return total((host, 1), (gated, 0.5))


def turn(play: Play, i: int) -> object:
    return play.group, i


def mt_grpo(plays: Plays) -> list[float]:
    """A rollout without a turn reward is compared by the sum of both."""
    both = total((outcome(plays, True), 1), (calls(plays, process(plays), turn), 0.5))
    x = [
        play.outcome + 0.5 * sum(r for c in play.calls if (r := c.rewards["p"]) == r)
        for play in plays
    ]
    summed = copied(missing(compare([play.group for play in plays], x, True), x), plays)
    without = [all(c.rewards["p"] != c.rewards["p"] for c in play.calls) for play in plays]
    mask = [none for play, none in zip(plays, without, strict=True) for _ in play.calls]
    return [s if none else b for s, b, none in zip(summed, both, mask, strict=True)]


def gigpo(plays: Plays) -> list[float]:
    return total((outcome(plays), 1), (naive_histories(plays, "outcome", 0.95, 0, False), 0.5))


def m_grpo(plays: Plays) -> list[float]:
    """The others' calls as M-GRPO has them: copied until every rollout has equally many."""
    entries = [play for play in plays if any(c.role == "actor" for c in play.calls)]
    x = [play.outcome for play in entries]
    lead = missing(compare([play.group for play in entries], x, True), x)
    by_play = {id(play): a for play, a in zip(entries, lead, strict=True)}
    copies: dict[int, list[float]] = {}
    for play in plays:
        known = [c.rewards["p"] for c in play.calls if c.role == "critic"]
        known = [r for r in known if r == r]
        for r in known:
            copies.setdefault(play.group, []).extend([r] * (60 // len(known)))
    out = []
    for play in plays:
        for call in play.calls:
            r, all = call.rewards["p"], copies.get(play.group, [])
            if call.role == "actor":
                out.append(by_play[id(play)])
            elif r != r:
                out.append(NAN)
            else:
                centred = r - fmean(all)
                flat = len(set(all)) < 2 or abs(centred) < 1e-9
                out.append(0.0 if flat else centred / (pstdev(all) + 1e-6))
    return out


STREAM = {"scope": "transition", "gamma": 0.9, "weight": 0.5, "gate": "agree"}


HIGH = {"high": "transition:high", "low": "transition:v", "gamma": 0.9, "lam": 0.8}


CASES: dict[str, Case] = {
    "ppo": (ppo, "token", "tokens", {}),
    "gigpo": (tokens(gigpo), "token", "rows", {"weight": 0.5}),
    "gspo+gigpo": (
        tokens(lambda plays: total(
            (outcome(plays, True), 1), (naive_histories(plays, "outcome", 0.95, 0, True), 1)
        )),
        "row", "rows", {"gigpo_norm": "std"},
    ),
    "mt-grpo": (
        tokens(mt_grpo), "token", "rows", {"turn_reward": "transition:p", "weight": 0.5},
    ),
    "dr-mas": (tokens(lambda plays: calls(plays, per_outcome(plays), role)), "token", "rows", {}),
    "m-grpo": (tokens(m_grpo), "token", "pairs", {"main": "actor", "sub_reward": "transition:p"}),
    "auto": (tokens(lambda plays: naive_auto(plays, "outcome", 1.0, 0.5)), "token", "rows", {}),
    "auto process": (
        tokens(lambda plays: naive_auto(plays, "p", 0.9, 0.8)), "token", "rows",
        {"reward": "transition:p", "gamma": 0.9, "lam": 0.8},
    ),
    "auto none": (
        tokens(lambda plays: naive_peers(plays, "outcome", 1.0, 0.0)), "token", "rows",
        {"std": False, "lam": 0.0},
    ),
    "peers": (
        tokens(lambda plays: naive_peers(plays, "p", 0.9, 0.8)), "token", "rows",
        {"reward": "transition:p", "gamma": 0.9, "lam": 0.8},
    ),
    "gspo+peers": (
        tokens(lambda plays: naive_peers(plays, "outcome", 1.0, 0.5)), "row", "rows", {}
    ),
    "turn-ppo": (tokens(gae), "token", "tokens", GAE),
    "hiper": (tokens(hiper), "token", "rows", HIGH | {"reward": "transition:p"}),
    "gspo+hiper": (
        tokens(hiper), "row", "rows",
        {f"hiper_{key}": value for key, value in HIGH.items()} | {"reward": "transition:p"},
    ),
    "archer": (tokens(process), "none", "sums", {"advantage": "transition:p"}),
    "streams": (
        tokens(agreeing), "token", "rows",
        {"streams": {"outcome": {"norm": "std"}, "p": STREAM}},
    ),
    "gspo+process": (tokens(agreeing), "row", "rows", {"process_streams": {"p": STREAM}}),
    "grpo+per-role": (tokens(roles), "token", "rows", {}),
    "dr-grpo+only": (
        tokens(lambda plays: [
            a if call.role == "critic" else NAN
            for a, call in zip(outcome(plays), (c for p in plays for c in p.calls), strict=True)
        ]),
        "token", "rows", {"only_roles": ["critic"], "length": 1},
    ),
}  # fmt: skip


test_its_loss_is_the_published_one = checked(CASES)


def test_peers_credits_every_call_where_no_state_is_seen_twice() -> None:
    """Also calls at turns that no other rollout reached. With a discount a call's return depends on
    how many follow, so that a short failure may be better than a long success."""
    plays = [
        Play([Call((u, i)) for i in range(n)], float(u % 2)) for u, n in enumerate((2, 9, 3, 4))
    ]
    a, discounted = (
        compute_advantages(make("peers", {"gamma": gamma}, streams=("old",)), world(*plays))
        for gamma in (1.0, 0.5)
    )
    for u, rollout in enumerate(a.split([2, 9, 3, 4])):
        assert rollout.tolist() == pytest.approx([2 / 3 if u % 2 else -2 / 3] * len(rollout))
    _, long, *_ = discounted.split([2, 9, 3, 4])
    assert long[0].item() == pytest.approx(0.5**8 - (0 + 0 + 0.5**3) / 3)
    assert long[-1].item() == pytest.approx(1 - (0 + 0 + 1) / 3)


@pytest.mark.parametrize("several", range(5))
def test_the_default_is_grpo_where_no_state_comes_again(several: int) -> None:
    """However many of the rollouts made several calls."""
    outcomes = enumerate((1.0, 0.0, 1.0, 0.5))
    plays = [
        Play([Call((n, i)) for i in range(2 if n < several else 1)], outcome)
        for n, outcome in outcomes
    ]
    default, grpo = (
        compute_advantages(make(name, {}, streams=("old",)), world(*plays))
        for name in (AlgorithmConfig().preset, "grpo")
    )
    assert torch.allclose(default, grpo, rtol=1e-12, atol=0)
    assert default.abs().min() > 0.1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {}, r"'ppo' needs the values of a critic, which this run does not"),
        ("streams", {}, r"algorithm\.options\.streams: required by 'streams'; set it"),
        ("grpo+only", {}, r"algorithm\.options\.only_roles: required by 'grpo\+only'"),
        ("grpo+only", {"only_roles": []}, r"only_roles = \[\]: .*length >= 1"),
        ("grpo+gigpo", {"weight": 2.0}, r"options\.weight: no option of 'grpo\+gigpo'"),
        (
            "streams",
            {"streams": {"p": {"wieght": 1.0}}},
            r"options\.streams\.p\.wieght: unknown; did you mean 'weight'\?",
        ),
        ("streams", {"streams": {"p": {"scope": "call"}}}, r"Invalid enum value 'call'"),
        (
            "streams",
            {"mix": "rewards", "streams": {"p": {"clip": 1.0}}},
            r"streams\.p\.clip: has no effect on streams mixed as rewards",
        ),
        (
            "streams",
            {"mix": "returns", "streams": {"p": {"gate": "agree"}}},
            r"streams\.p\.gate: has no effect on streams mixed as returns",
        ),
        ("streams", {"streams": {"p": {"potential": True}}}, r"set scope = 'transition'"),
        (
            "streams",
            {"streams": {"p": {"gate": "agree"}}},
            r"streams\.p\.outcome = 'outcome': there is no stream of that name",
        ),
        (
            "streams",
            {"gamma": 0.9, "streams": {"p": {}}},
            r"gamma and norm are those of a sum of returns or rewards",
        ),
    ],
)
def test_what_cannot_matter_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, options)


def test_a_stream_may_be_one_that_a_step_lacks() -> None:
    streams = {"outcome": {}, "p": {"scope": "transition", "required": False}}
    algo = make("streams", {"streams": streams})
    assert (algo.rewards, algo.optional) == (("outcome", "transition:p"), ("transition:p",))
    algo = make("grpo+process", {"process_streams": {"p": streams["p"]}})
    assert (algo.rewards, algo.optional) == (("outcome", "transition:p"), ("transition:p",))


def test_what_an_algorithm_needs_of_a_run_is_read_off_its_record() -> None:
    assert not make("grpo", {}).needs_greedy
    assert make("ppo", {}, streams=("old", "sampler", "values")).reads_critic
    assert not make("turn-ppo", {"value": "transition:v"}).reads_critic
