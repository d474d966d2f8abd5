"""Several policies in one run: who plays which role, what each is trained with, and when it learns.

All of it is a function of the run file (and of the step), so nothing of it is saved. A run without
`[policies]` is one of a single policy, which plays every role and learns in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentrl.config.schema import (
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    MemberConfig,
    PolicyConfig,
    ReferenceConfig,
    RunConfig,
    TeacherConfig,
)
from agentrl.types import POLICY

INITIAL = "first"  # who stands in for a role: its own policy as training began with it
TABLES: dict[str, type[msgspec.Struct]] = {
    "algorithm": AlgorithmConfig,
    "critic": CriticConfig,
    "reference": ReferenceConfig,
    "teacher": TeacherConfig,
}
"""The tables of a run file of which a policy may have its own values."""
SHARED = frozenset({"groups", "group_size", "max_staleness", "dynamic_sampling", "max_rounds"})
SHARED |= {"branching", "counterfactual", "store_credit"}
"""Settings of `[algorithm]` that are the run's, because all policies learn from the same groups."""


def trained_policies(config: RunConfig) -> list[str]:
    """The policies that learn, in the order of the run file."""
    if not config.policies:
        return [POLICY]
    return [name for name, member in config.policies.items() if not member.frozen]


def frozen_policies(config: RunConfig) -> list[str]:
    """The policies that are served and never learn."""
    return [name for name, member in config.policies.items() if member.frozen]


def has_no_own_policy(config: RunConfig) -> bool:
    """Whether `[upstreams]` answer every call: the run has no model of its own."""
    own = config.policies or config.policy.model or config.policy.build
    return bool(config.upstreams) and not own and POLICY not in config.roles.values()


def policy_by_role(config: RunConfig) -> dict[str, str]:
    """Role -> the policy or upstream that plays it, from both sides: `[roles]` and `[policies]`."""
    made = {role: name for name, member in config.policies.items() for role in member.roles}
    return made | config.roles


def stand_ins(config: RunConfig) -> dict[str, str]:
    """Role -> who plays it where the team is measured without it, by the name it is served by."""
    return {
        role: initial_name(policy_of_role(config, role)) if player == INITIAL else player
        for role, player in config.algorithm.counterfactual.stand_ins.items()
    }


def policy_of_role(config: RunConfig, role: str) -> str:
    """Who plays a role, named in the run file or not."""
    return policy_by_role(config).get(role, POLICY)


def initial_name(policy: str) -> str:
    """The name of a policy as training began with it, where that is served too."""
    return f"{policy}@000000"


def view(config: RunConfig, name: str) -> RunConfig:
    """The run as one of its policies sees it: with its own model, algorithm, critic, reference and
    teacher, and with as many steps as it learns in.

    Raises msgspec.ValidationError, with the key as it is there, for a value that cannot be."""
    if not config.policies:
        return config
    member = config.policies[name]
    own = {key: _own(config, name, key) for key in TABLES}
    return msgspec.structs.replace(
        config,
        policy=_policy(config.policy, member),
        steps=steps_learned(config, name, config.steps),
        policies={},
        roles={},
        **own,
    )


def learns_in_step(config: RunConfig, name: str, step: int) -> bool:
    """Whether it is a policy's turn in a step."""
    return steps_learned(config, name, step + 1) > steps_learned(config, name, step)


def steps_learned(config: RunConfig, name: str, step: int) -> int:
    """In how many of the steps before `step` a policy learned; 0 for a frozen one."""
    names, every = trained_policies(config), config.team.every
    if name not in names:
        return 0
    place, last = names.index(name), len(names) - 1
    if config.team.schedule == "together":
        return step
    if config.team.schedule == "alternating":
        rounds, rest = divmod(step, every * len(names))
        return rounds * every + min(max(rest - place * every, 0), every)
    since = max(step - place * every, 0)
    return since if place == last else min(since, every)


def _policy(base: PolicyConfig, member: MemberConfig) -> PolicyConfig:
    # An adapter that is frozen says itself what it is.
    inherited = {} if member.frozen else msgspec.to_builtins(base.lora)
    lora = merge_tables(inherited, member.lora)
    replace = msgspec.structs.replace
    policy = replace(base, lora=_typed(lora, LoraConfig, "policy.lora"))
    return replace(policy, model=member.model, build="") if member.model else policy


def _own(config: RunConfig, name: str, key: str) -> Any:
    """A table with what differs for a policy. Options belong to a preset: those of another one are
    not inherited."""
    base = msgspec.to_builtins(getattr(config, key))
    differs: Mapping[str, Any] = getattr(config.policies[name], key)
    if differs.get("preset", base.get("preset")) != base.get("preset"):
        base["options"] = {}
    return _typed(merge_tables(base, differs), TABLES[key], key)


def merge_tables(base: Mapping[str, Any], differs: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `differs`, table by table."""
    made = dict(base)
    for key, value in differs.items():
        inner = made.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            made[key] = merge_tables(inner, value)
        else:
            made[key] = value
    return made


def _typed(data: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> Any:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(str(error).replace("`$", f"`$.{where}")) from None
