"""Which rollouts are played again without some roles, and what their outcomes make of each role."""

from __future__ import annotations

from itertools import product
from math import isnan, nan
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.algorithms.data import merge as columns
from agentrl.algorithms.data.merge import build_batch, valid
from agentrl.algorithms.objective.core import compute_advantages
from agentrl.algorithms.objective.prepare import TrainedPolicy
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.sampling import collect, replays
from agentrl.algorithms.sampling.replays import (
    RoleRewards,
    check_counterfactuals,
    coalition_formula,
    counterfactual_rollouts,
    replay_metrics,
    substitutes,
    uses_counterfactuals,
    with_optional_reward,
)
from agentrl.algorithms.train import metrics
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.algorithms.train.stages import group_requirements
from agentrl.core.config import RunConfig, resolve
from agentrl.core.config.derived import view
from agentrl.core.errors import ConfigError, TrainingError
from agentrl.core.types import (
    Branch,
    Group,
    NewRollout,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Scope,
)
from tests import factories
from tests.agentrl.core.config.test_policies import team as members

GAME = {"1": 0.2, "12": 0.6, "13": 0.4, "23": 0.0, "123": 1.0}  # the catalogue's, E13
ROLES = ["1", "2", "3"]


def run_file(names: list[str] = ROLES, **counterfactual: Any) -> RunConfig:
    """A run of one policy, which plays all roles, and of which `mute` takes the place."""
    data: dict[str, Any] = {
        "upstreams": {"mute": {"text": "nothing"}},
        "algorithm": {
            "group_size": 2,
            "counterfactual": {"substitutes": dict.fromkeys(names, "mute")} | counterfactual,
        },
    }
    return resolve(data, source="test")


def rollout(name: str, roles: str = "123", outcome: float = 1.0, **changed: Any) -> Rollout:
    """Every role calls once, in order."""
    calls = [
        factories.call(f"{name}{i}", (1, i), attempt=name, index=i, role=role)
        for i, role in enumerate(roles)
    ]
    rewards = [] if isnan(outcome) else [Reward(value=outcome)]
    known = {"task": {"input": "x"}, "step": 3, "rewards": rewards}
    return factories.rollout(name, calls, **known | changed)


def played(asked: NewRollout, outcome: float) -> Rollout:
    """A replay that has ended, and in which the policy made calls too."""
    changed = {"id": asked.id, "branch": asked.branch, "seats": asked.seats, "index": asked.index}
    return replace(rollout(asked.id, outcome=outcome), **changed)


def worth(asked: NewRollout) -> float:
    assert asked.branch is not None
    return GAME.get("".join(role for role in ROLES if role not in asked.branch.without), 0.0)


def complete(config: RunConfig, *rollouts: Rollout, policy: str = "policy") -> Group:
    group = factories.group(*rollouts, step=3)
    return RoleRewards(coalition_formula(config), policy).complete([group])[0]


def given(row: Rollout) -> dict[str | None, float]:
    made = [reward for reward in row.rewards if reward.scope is Scope.ROLE]
    assert {reward.source for reward in made} <= {"counterfactual"}
    return {reward.target: reward.value for reward in made}


def without(asked: list[NewRollout]) -> list[tuple[str, str]]:
    return [(row.branch.rollout, "".join(row.branch.without)) for row in asked if row.branch]


def test_a_difference_needs_the_team_without_each_role() -> None:
    asked = counterfactual_rollouts(run_file(), [rollout("a"), rollout("b", "13")])
    assert without(asked) == [("a", "1"), ("a", "2"), ("a", "3"), ("b", "1"), ("b", "3")]
    assert [row.id for row in asked] == [f"g/000{n}" for n in range(2, 7)]
    first = asked[0]
    assert first.branch == Branch(rollout="a", calls=3, without=["1"])
    assert (first.seats, first.step, first.task) == ({"1": "mute"}, 3, {"input": "x"})
    assert (first.priority, first.purpose) == (1, Purpose.TRAIN)


def test_shapley_values_need_every_coalition_but_the_team() -> None:
    config = run_file(value="shapley")
    asked = counterfactual_rollouts(config, [rollout("a")])
    assert sorted(set(without(asked))) == sorted(
        ("a", "".join(role for role, out in zip(ROLES, bits, strict=True) if out))
        for bits in product([0, 1], repeat=3)
        if any(bits)
    )
    assert len(asked) == 7
    together = next(row for row in asked if row.branch and len(row.branch.without) == 3)
    assert together.seats == dict.fromkeys(ROLES, "mute")


def test_the_catalogues_game() -> None:
    """E13: the values that replays come to make the rewards of roles."""
    source = rollout("a", outcome=GAME["123"])
    for value, expected in (
        ("difference", {"1": 1.0, "2": 0.6, "3": 0.4}),
        ("shapley", {"1": 17 / 30, "2": 8 / 30, "3": 5 / 30}),
    ):
        config = run_file(value=value)
        ended = [played(asked, worth(asked)) for asked in counterfactual_rollouts(config, [source])]
        first, *rest = complete(config, source, *ended).rollouts
        assert given(first) == pytest.approx(expected)
        assert {row.name for row in first.rewards} == {"outcome", value}
        assert all(given(row) == {} for row in rest)


def test_without_an_outcome_of_its_replay_a_role_has_no_reward() -> None:
    config = run_file(["1"])
    (asked,) = counterfactual_rollouts(config, [rollout("a")])
    assert given(complete(config, rollout("a"), played(asked, 0.5)).rollouts[0]) == {"1": 0.5}
    assert given(complete(config, rollout("a"), played(asked, nan)).rollouts[0]) == {}


def test_a_replay_is_about_its_own_rollout() -> None:
    config, rows = run_file(["1"]), [rollout("a"), rollout("b", outcome=0.5)]
    ended = [
        played(row, x)
        for row, x in zip(counterfactual_rollouts(config, rows), (0.25, 0.0), strict=True)
    ]
    found = complete(config, *rows, *ended).rollouts
    assert [given(row) for row in found[:2]] == [{"1": 0.75}, {"1": 0.5}]


def test_rollouts_without_a_lesson_are_not_played_again() -> None:
    eval_ = rollout("e", purpose=Purpose.EVAL)
    failed = rollout("f", outcome=nan, state=RolloutState.FAILED)
    priced = rollout("p", outcome=0.0, state=RolloutState.FAILED)
    silent = rollout("s", transitions=[])
    unknown = rollout("u", outcome=nan)
    others = rollout("o", roles="45")
    asked = counterfactual_rollouts(
        run_file(["1"]), [eval_, failed, priced, silent, unknown, others]
    )
    assert without(asked) == [("p", "1")]


def test_drawn_orders_differ_by_rollout_and_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "SHAPLEY_ORDERS", 2)
    config = run_file(list("12345"), value="shapley")
    rows = [rollout(name, roles="12345") for name in "abcd"]
    asked = counterfactual_rollouts(config, rows)
    assert asked == counterfactual_rollouts(config, rows)
    sets = [{out for of, out in without(asked) if of == name} for name in "abcd"]
    assert all(len(found) <= 2 * 4 + 1 for found in sets)
    assert len(set(map(frozenset, sets))) > 1
    # The same orders value the team: what the members got adds up to team minus nobody.
    ended = [played(row, len(row.branch.without) / 10 if row.branch else 0.0) for row in asked]
    for row in complete(config, *rows, *ended).rollouts[:4]:
        assert sum(given(row).values()) == pytest.approx(1.0 - 0.5)


def test_a_policy_gives_the_roles_that_it_played() -> None:
    source = rollout("a")
    calls = [
        replace(call, policy="writer" if call.role == "3" else "reader")
        for call in source.transitions
    ]
    source = replace(source, transitions=calls)
    ended = [
        played(NewRollout(
            id=f"r{role}", run="run", group="g", index=2, task={}, seats={role: "mute"},
            branch=Branch(rollout="a", calls=3, without=[role]),
        ), 0.25)
        for role in ROLES
    ]  # fmt: skip
    for policy, roles in (("reader", ["1", "2"]), ("writer", ["3"])):
        found = complete(run_file(), source, *ended, policy=policy).rollouts[0]
        assert given(found) == dict.fromkeys(roles, 0.75)


def test_nobody_learns_from_a_replay() -> None:
    config = run_file()
    rows = [rollout("a"), rollout("b", outcome=0.5)]
    ended = [played(asked, worth(asked)) for asked in counterfactual_rollouts(config, rows)]
    assert not any(map(valid, ended))
    group = factories.group(*rows, *ended, step=3)
    preprocessor = Preprocessor((RoleRewards(coalition_formula(config), "policy"),))
    algo = make("difference", {})
    (whole,) = preprocessor.prepare(
        [group], algo, TrainedPolicy(lambda batch: batch.sampler_logprobs), 1
    ).groups
    assert {made.rollout for made in preprocessor.step_rewards} == {"a", "b"}
    assert len(preprocessor.step_rewards) == 6
    batch = build_batch([whole], reward_names=algo.rewards)
    assert batch.rollouts == ["a", "b"]
    # Each role against its own in the other rollout, where all of a's were worth 0.5 more.
    assert compute_advantages(algo, batch).tolist() == pytest.approx([0.25] * 3 + [-0.25] * 3)
    alone = compute_advantages(make("difference", {"baseline": "none"}), batch).tolist()
    assert alone == pytest.approx([1.0, 0.6, 0.4, 0.5, 0.1, -0.1])
    assert collect.resampling_metrics([whole], [], 0)["reward/sampled_mean"] == 0.75
    measured = metrics.batch_metrics([whole], batch) | replay_metrics([whole])
    assert measured["rollouts"] == 8
    assert measured["reward/mean"] == 0.75
    assert measured["calls"] == 6
    assert measured["replays"] == 6
    assert "branches" not in measured


def test_a_reward_is_either_the_verifiers_or_made_of_replays() -> None:
    given = Reward(value=0.5, name="difference", scope=Scope.ROLE, target="1")
    theirs = rollout("a", rewards=[Reward(value=1.0), given])
    with pytest.raises(TrainingError, match="the verifier gives roles a reward 'difference'"):
        complete(run_file(), theirs)
    complete(run_file(value="shapley"), theirs)


def test_substitutes_of_a_role_with_another_name_are_named() -> None:
    config = run_file(["solver", "planer"])
    rows = [rollout(name, transitions=[]) for name in "ab"]
    calls = rollout("c").transitions
    spoken = [replace(calls[0], role="planner"), replace(calls[1], role="solver")]
    rows.append(rollout("c", transitions=spoken))
    with pytest.raises(TrainingError, match=r"substitutes.planer: no call of 3 .* 'planner'\?"):
        complete(config, *rows)
    # Nobody is left who could be meant: the role did not speak in these rollouts.
    complete(config, *rows[:2], rollout("c", transitions=spoken[1:]))
    complete(config, *rows, policy="another")


def test_a_step_whose_replays_have_no_outcome_teaches_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = run_file()
    ended = [played(asked, nan) for asked in counterfactual_rollouts(config, [rollout("a")])]
    group = complete(config, rollout("a"), *ended)
    assert "None of the 3 replays of step 4 has an outcome" in caplog.text
    algo = with_optional_reward(config.algorithm.counterfactual, make("difference", {}))
    assert uses_counterfactuals(config.algorithm.counterfactual, algo)
    columns.check_rewards([group], [name for name in algo.rewards if name not in algo.optional])
    assert build_batch([group], reward_names=algo.rewards, min_group=1).n_tokens == 0
    other = make("grpo", {})
    assert with_optional_reward(config.algorithm.counterfactual, other) is other
    with pytest.raises(TrainingError, match=r"none of 1 rollouts of step 4 has one"):
        complete(config, rollout("a", outcome=nan))


def test_replays_are_counted() -> None:
    config = run_file(["1", "2"])
    first, second = counterfactual_rollouts(config, [rollout("a")])
    repeated = played(first, 0.5)
    calls = [replace(c, repeats=f"a{c.index}") for c in repeated.transitions[1:]]
    repeated = replace(repeated, transitions=[repeated.transitions[0], *calls])
    rows = [rollout("a"), repeated, played(second, nan)]
    found = replay_metrics([factories.group(*rows)])
    assert found == {"replays": 2, "replays/missing": 1, "calls/repeated": 2}
    assert replay_metrics([factories.group(*rows[:1])]) == {}


def test_replays_that_nobody_reads_are_refused() -> None:
    config, algo = run_file(), make("grpo", {})
    with pytest.raises(ConfigError, match=r"no preset reads its reward 'role:difference'"):
        group_requirements(config, {"policy": algo})
    other = make("grpo", {"reward": "role:difference"})
    check_counterfactuals(config, {"reader": algo, "writer": other}, None)
    check_counterfactuals(resolve({}, source="test"), {"policy": algo}, None)
    part = {"algorithm": {"counterfactual": {"substitutes": {"planner": "first"}}}}
    part |= {"roles": {"planner": "policy", "solver": "policy"}}
    with pytest.raises(
        ConfigError, match=r"substitutes has no 'solver', and 'policy', which plays"
    ):
        check_counterfactuals(resolve(part, source="test"), {"policy": other}, None)
    with pytest.raises(ConfigError, match=r"dynamic_sampling compares 'role:difference'"):
        check_counterfactuals(config, {"policy": other}, "role:difference")


PAIR = {
    "policy": {"model": "m"},
    "policies": {
        "reader": {"roles": ["planner"], "lora": {"rank": 4}},
        "judge": {"roles": ["critic"], "model": "m", "frozen": True},
    },
}


@pytest.mark.parametrize(
    ("algorithm", "more", "why"),
    [
        ({"value": "shapley"}, {}, "has no effect without substitutes"),
        ({"substitutes": {"planner": "mute"}}, {}, r"planner = 'mute'; valid: first, policy"),
        ({"substitutes": {"planner": "frist"}}, {}, "did you mean 'first'"),
        (
            {"substitutes": {"planner": "first"}},
            {"upstreams": {"first": {"text": "none"}}},
            "planner = 'first' means the role's own policy .* rename that one",
        ),
        (
            {"substitutes": {"critic": "first"}},
            PAIR,
            "no trained policy plays this role; .*planner",
        ),
        ({"substitutes": {"planer": "judge"}}, PAIR, "did you mean 'planner'"),
        ({"substitutes": {"a": "first"}, "without": 3}, {}, "counterfactual.without"),
        (
            {"substitutes": {"a": "first"}},
            {"algorithm": {"branching": {"kind": "mc"}}},
            r"cannot replay rollouts of \[algorithm.branching\]",
        ),
        ({"substitutes": {"a": "first"}}, {"algorithm": {"max_staleness": 1}}, "max_staleness = 1"),
        ({"substitutes": {"a": "first"}}, {"selfplay": {"seats": ["a", "b"]}}, r"\[selfplay\]"),
    ],
)
def test_settings_that_cannot_matter_are_refused(
    algorithm: Any, more: dict[str, Any], why: str
) -> None:
    settings = more.get("algorithm", {}) | {"counterfactual": algorithm}
    with pytest.raises(ConfigError, match=why):
        resolve({**more, "algorithm": settings}, source="test")


def test_a_policy_cannot_have_replays_of_its_own() -> None:
    policies = {"reader": {**PAIR["policies"]["reader"], "algorithm": {"counterfactual": {}}}}
    with pytest.raises(ConfigError, match=r"algorithm.counterfactual: all policies learn from"):
        resolve({"policy": {"model": "m"}, "policies": policies}, source="test")


def test_who_stands_in_for_a_role() -> None:
    replaced = {"planner": "first", "critic": "mute", "solver": "planner"}
    data = members(roles=["solver", "critic"]) | {
        "upstreams": {"mute": {"text": ""}},
        "algorithm": {"counterfactual": {"substitutes": replaced}},
    }
    config = resolve(data, source="run.toml")
    assert substitutes(config) == {
        "planner": "planner@000000",
        "critic": "mute",
        "solver": "planner",
    }
    assert view(config, "solver").algorithm.counterfactual == config.algorithm.counterfactual
    alone = resolve(
        {"algorithm": {"counterfactual": {"substitutes": {"any": "first"}}}}, source="run.toml"
    )
    assert substitutes(alone) == {"any": "policy@000000"}
