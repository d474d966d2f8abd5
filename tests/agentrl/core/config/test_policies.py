"""The tables of several policies in a run file."""

from __future__ import annotations

import tomllib
from contextlib import nullcontext
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.core.config import LoraConfig, RunConfig, differences, resolve, to_toml, validate
from agentrl.core.config.derived import policy_by_role, seeing_policies, view
from agentrl.core.config.learning import MemberConfig, PolicyConfig
from agentrl.core.errors import ConfigError


def team(**changes: Any) -> dict[str, Any]:
    """A run file's tables with two policies; `changes` replace or add to those of the solver."""
    solver = {"roles": ["solver"], "lora": {"rank": 4}} | changes
    planner = {"roles": ["planner"], "lora": {"rank": 8}, "algorithm": {"lr": 1e-3}}
    return {"policy": {"model": "m"}, "policies": {"planner": planner, "solver": solver}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (team(roles=[]), r"policies.solver.roles is empty, so it would get no calls"),
        (team(roles=["planner"]), r"policies.solver.roles names 'planner', which policies.planner"),
        (team() | {"roles": {"solver": "planner"}}, r"names 'solver', which \[roles\] has already"),
        (team() | {"roles": {"critic": "solvr"}}, r"roles.critic = 'solvr'; did you mean 'solver'"),
        (team() | {"upstreams": {"solver": {"base_url": "http://x/v1"}}}, "the name of a policy"),
        (team(lora={}), r"policies.solver: set lora.rank, .* or a model of its own"),
        (team(lora={"rnk": 1}), r"unknown key 'policies.solver.lora.rnk'.*did you mean 'rank'"),
        (team(algorithm={"lrr": 1}), r"unknown key 'policies.solver.algorithm.lrr'"),
        (team(algorithm={"lr": inf}), r"policies.solver: algorithm.lr = inf; it must be finite"),
        (
            team(lora={"alpha": 8.0}, model="own"),
            r"policies.solver: policy.lora.alpha has no effect while policy.lora.rank is 0",
        ),
        (team(algorithm={"lr": 0}), r"policies.solver: Expected `float` > 0.0 - at `algorithm.lr`"),
        (
            team(algorithm={"schedule": "cos"}),
            r"solver: algorithm.schedule = 'cos'; did you mean 'cosine'",
        ),
        (team(algorithm={"min_lr": 1.0}), r"policies.solver: algorithm.min_lr: a constant"),
        (team(algorithm={"groups": 2}), r"algorithm.groups: all policies learn from the same gro"),
        (team(frozen=True), r"policies.solver: a frozen policy needs weights; set model or"),
        (team(frozen=True, model="m"), r"policies.solver.lora.rank: a frozen adapter.s files"),
        (
            team(frozen=True, model="m", lora={}, critic={"model": "copy"}),
            r"policies.solver.critic: a frozen policy does not learn",
        ),
        (team() | {"reward_models": {"r": {"model": "m"}}}, r"\[reward_models\] score the calls"),
        (team() | {"team": {"every": 2}}, r"team.every has no effect for team.schedule = 'togeth"),
        (
            team() | {"steps": 3, "team": {"schedule": "sequence", "every": 3}},
            r"policies.solver never learns: its turn would come after the last of steps = 3",
        ),
        ({"team": {"every": 2}}, r"\[team\] has no effect without \[policies\]"),
        ({"policies": {"a.b": {}}}, r"\[policies.a.b\]: a policy's name may have letters"),
        (
            {"policies": {"a": {"roles": ["a"], "frozen": True, "model": "m"}}},
            r"\[policies\]: all of them are frozen; at least one must learn",
        ),
    ],
)
def test_policies_that_cannot_be_together_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(data, source="run.toml")


def test_a_policy_has_what_differs_and_the_rest_of_the_run() -> None:
    data = team(algorithm={"preset": "gspo", "options": {}}, model="own") | {
        "algorithm": {"lr": 0.5, "warmup": 3, "options": {"norm": "none"}},
        "critic": {"lr": 0.1},
        "roles": {"critic": "solver"},
    }
    config = resolve(data, source="run.toml")
    planner, solver = (view(config, name) for name in ("planner", "solver"))
    assert (planner.algorithm.lr, solver.algorithm.lr) == (1e-3, 0.5)
    assert planner.algorithm.warmup == solver.algorithm.warmup == 3
    assert planner.algorithm.options == {"norm": "none"}
    assert solver.algorithm.options == {}  # those are of another preset
    assert (planner.policy.model, solver.policy.model) == ("m", "own")
    assert (planner.policy.lora.rank, solver.policy.lora.rank) == (8, 4)
    assert planner.critic.lr == 0.1
    assert policy_by_role(config) == {"planner": "planner", "solver": "solver", "critic": "solver"}
    assert tomllib.loads(to_toml(config))["policies"]["solver"]["algorithm"]["preset"] == "gspo"


def test_a_frozen_adapter_inherits_nothing_of_the_run() -> None:
    judge = {"roles": ["judge"], "frozen": True, "lora": {"adapter": "judge"}}
    data = team() | {"policy": {"model": "m", "lora": {"rank": 8, "alpha": 2.0}}}
    data["policies"]["judge"] = judge
    found = view(resolve(data, source="run.toml"), "judge").policy.lora
    assert found == LoraConfig(adapter="judge")


def test_roles_may_be_given_in_their_own_table_and_nothing_need_be_trained() -> None:
    data = team(roles=[]) | {"roles": {"solver": "solver"}, "steps": 0}
    assert policy_by_role(resolve(data, source="run.toml")) == {
        "planner": "planner",
        "solver": "solver",
    }


def test_another_order_of_policies_is_another_run() -> None:
    config = resolve(team(), source="run.toml")
    turned = replace(config, policies=dict(reversed(config.policies.items())))
    assert differences(config, turned) == [
        "policies: ['planner', 'solver'] -> ['solver', 'planner']"
    ]
    assert differences(config, config) == []


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["peft"], r"policies.planner.lora: 'peft' is not installed: pip install .*\[lora\]'"),
        (["peft", "torch"], ""),  # a machine that only runs agents
    ],
)
def test_adapters_need_their_package_where_models_are_loaded(
    monkeypatch: pytest.MonkeyPatch, missing: list[str], said: str
) -> None:
    monkeypatch.setattr(validate, "is_installed", lambda name: name not in missing)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        resolve(team(), source="test")


# -- settings of images: which policies see them ---------------------------------------------------


def test_which_policies_see() -> None:
    frozen = PolicyConfig(vision="frozen")
    assert seeing_policies(RunConfig()) == set()
    assert seeing_policies(RunConfig(policy=frozen)) == {"policy"}
    members = {"a": MemberConfig(vision="trained"), "b": MemberConfig()}
    assert seeing_policies(RunConfig(policies=members)) == {"a"}
    assert seeing_policies(RunConfig(policies=members, policy=frozen)) == {"a", "b"}
