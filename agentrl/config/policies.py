"""Several policies in one run: their roles, their settings, and the steps in which each learns.

All of this is a function of the run file and the step, so nothing is saved. A run without
`[policies]` has a single policy, which plays every role and learns in every step. In an evaluation
plan, frozen policies play roles too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentrl.config.base import field_types
from agentrl.config.learning import (
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    MemberConfig,
    PolicyConfig,
    ReferenceConfig,
    TeacherConfig,
)
from agentrl.config.schema import RunConfig
from agentrl.types import POLICY

TABLES: dict[str, type[msgspec.Struct]] = {
    "algorithm": AlgorithmConfig,
    "critic": CriticConfig,
    "reference": ReferenceConfig,
    "teacher": TeacherConfig,
}
"""The tables that a policy may override."""
SHARED = frozenset({"groups", "group_size", "max_staleness", "dynamic_sampling", "max_rounds"})
SHARED |= {"store_credit", "async_sampling", "group_order", "stale_tokens", "group_quorum"}
SHARED |= {"group_deadline", "branching", "counterfactual"}
"""Settings of `[algorithm]` for the whole run, because all policies learn from the same groups."""
Seats = dict[str, str]  # role -> player of a plan, or policy of the run


class FrozenPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version of a policy that plays without learning."""

    policy: str
    directory: str  # of a model or an adapter, or a hub name; empty: the untrained adapter
    steps: int  # of training, which is its version


def trained_policies(config: RunConfig) -> list[str]:
    """The policies that learn, in the order of the run file."""
    if not config.policies:
        return [POLICY]
    return [name for name, member in config.policies.items() if not member.frozen]


def frozen_policies(config: RunConfig) -> list[str]:
    """The policies that are served and never learn."""
    return [name for name, member in config.policies.items() if member.frozen]


def has_no_own_policy(config: RunConfig) -> bool:
    """Whether the run has no model of its own, so `[upstreams]` answer every call."""
    own = config.policies or config.policy.model or config.policy.build
    return bool(config.upstreams) and not own and POLICY not in config.roles.values()


def seeing_policies(config: RunConfig) -> frozenset[str]:
    """The names of the policies that see images."""
    every = config.policy.vision
    if not config.policies:
        return frozenset([POLICY] if every else [])
    return frozenset(name for name, member in config.policies.items() if member.vision or every)


def self_playing_policy(config: RunConfig) -> str:
    """The policy that plays against itself and its snapshots."""
    return config.selfplay.policy or trained_policies(config)[0]


def policy_by_role(config: RunConfig) -> dict[str, str]:
    """Role -> the policy or upstream that plays it, from `[roles]` and `[policies]`."""
    own = {role: name for name, member in config.policies.items() for role in member.roles}
    return own | config.roles


def policy_of_role(config: RunConfig, role: str) -> str:
    """The policy or upstream that plays a role; the default policy for an unnamed role."""
    return policy_by_role(config).get(role, POLICY)


def initial_name(policy: str) -> str:
    """The name under which the untrained version of a policy is served."""
    return f"{policy}@000000"


def view(config: RunConfig, name: str) -> RunConfig:
    """The settings of one policy as those of a run: with its own model, algorithm, critic,
    reference and teacher, and with the number of steps in which it learns.

    Raises msgspec.ValidationError, with the key in this view, for an invalid value."""
    if not config.policies:
        return config
    member, replace = config.policies[name], msgspec.structs.replace
    own: dict[str, Any] = {}
    for key, kind in TABLES.items():
        base, differs = msgspec.to_builtins(getattr(config, key)), getattr(member, key)
        if differs.get("preset", base.get("preset")) != base.get("preset"):
            base["options"] = {}  # they belong to the run's preset
        own[key] = _typed(_merged(base, differs), kind, key)
    # A frozen adapter's files have its settings.
    inherited = {} if member.frozen else msgspec.to_builtins(config.policy.lora)
    lora = _typed(_merged(inherited, member.lora), LoraConfig, "policy.lora")
    differing = (set(field_types(MemberConfig)) & set(field_types(PolicyConfig))) - {"lora"}
    given = {key: value for key in differing if (value := getattr(member, key))}
    policy = replace(config.policy, lora=lora, **given, **({"build": ""} if member.model else {}))
    steps = steps_learned(config, name, config.steps)
    return replace(config, policy=policy, steps=steps, policies={}, roles={}, **own)


def initial_version(config: RunConfig, policy: str) -> tuple[str, FrozenPolicy]:
    """The served name and the frozen record of a policy before training."""
    own = view(config, policy)
    directory, lora = own.model_path(), own.initial_policy.lora
    if lora.rank or lora.adapter:
        directory = str(config.path(lora.adapter)) if lora.adapter else ""
    return initial_name(policy), FrozenPolicy(policy=policy, directory=directory, steps=0)


def learns_in_step(config: RunConfig, name: str, step: int) -> bool:
    """Whether a policy learns in a step."""
    return steps_learned(config, name, step + 1) > steps_learned(config, name, step)


def steps_learned(config: RunConfig, name: str, step: int) -> int:
    """The number of steps before `step` in which a policy learned; 0 for a frozen one."""
    names, every = trained_policies(config), config.team.every
    if name not in names:
        return 0
    index, last = names.index(name), len(names) - 1
    if config.team.schedule == "together":
        return step
    if config.team.schedule == "alternating":
        rounds, rest = divmod(step, every * len(names))
        return rounds * every + min(max(rest - index * every, 0), every)
    since = max(step - index * every, 0)
    return since if index == last else min(since, every)


def _merged(base: Mapping[str, Any], differs: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated with the values of `differs`, recursively."""
    merged = dict(base)
    for key, value in differs.items():
        inner = merged.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            value = _merged(inner, value)
        merged[key] = value
    return merged


def _typed(data: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> Any:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(str(error).replace("`$", f"`$.{where}")) from None
