"""Several policies in one run: who plays which role, with which settings each learns, and when.

All of it is a function of the run file and the step, so none of it is saved. A run without
`[policies]` has a single policy, which plays every role and learns in every step. An evaluation
plan has frozen policies play roles too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentrl.config.schema import (
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    ReferenceConfig,
    RunConfig,
    TeacherConfig,
)
from agentrl.types import POLICY, Json

INITIAL = "first"  # in `stand_ins`: the role's own policy as training began with it
TABLES: dict[str, type[msgspec.Struct]] = {
    "algorithm": AlgorithmConfig,
    "critic": CriticConfig,
    "reference": ReferenceConfig,
    "teacher": TeacherConfig,
}
"""The tables of which a policy may have its own values."""
SHARED = frozenset({"groups", "group_size", "max_staleness", "dynamic_sampling", "max_rounds"})
SHARED |= {"branching", "counterfactual", "store_credit"}
SHARED |= {"overlap", "order", "stale", "close_at", "group_deadline"}
"""Settings of `[algorithm]` that are the run's, because all policies learn from the same groups."""
Seats = dict[str, str]  # role -> player of a plan, or policy of the run


class FrozenPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version of a policy that plays and does not learn."""

    policy: str
    directory: str  # of a model or an adapter, or a hub name; empty: the untrained adapter
    steps: int  # of training: its version


class EvaluationPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lineups of roles that all play the same tasks, each once, so that two of them differ only in
    who plays."""

    players: dict[str, FrozenPolicy]
    lineups: dict[str, Seats]  # by name, without a slash
    tasks: list[dict[str, Json]]
    temperature: float
    steps: int  # of training of the run's own policies


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
    own = {role: name for name, member in config.policies.items() for role in member.roles}
    return own | config.roles


def stand_ins(config: RunConfig) -> dict[str, str]:
    """Role -> the policy or upstream that plays it in counterfactual rollouts, by the name under
    which that is served."""
    return {
        role: initial_name(policy_of_role(config, role)) if player == INITIAL else player
        for role, player in config.algorithm.counterfactual.stand_ins.items()
    }


def policy_of_role(config: RunConfig, role: str) -> str:
    """The policy or upstream that plays a role, which the run file need not name."""
    return policy_by_role(config).get(role, POLICY)


def initial_name(policy: str) -> str:
    """The name of a policy as training began with it, where that is served too."""
    return f"{policy}@000000"


def view(config: RunConfig, name: str) -> RunConfig:
    """The run as one of its policies sees it: with its own model, algorithm, critic, reference and
    teacher, and with as many steps as it learns in.

    Raises msgspec.ValidationError, with the key in this view, for a value that cannot be."""
    if not config.policies:
        return config
    member, replace = config.policies[name], msgspec.structs.replace
    own: dict[str, Any] = {}
    for key, kind in TABLES.items():
        base, differs = msgspec.to_builtins(getattr(config, key)), getattr(member, key)
        if differs.get("preset", base.get("preset")) != base.get("preset"):
            base["options"] = {}  # of another preset
        own[key] = _typed(_merged(base, differs), kind, key)
    # The files of a frozen adapter say what it is.
    inherited = {} if member.frozen else msgspec.to_builtins(config.policy.lora)
    lora = _typed(_merged(inherited, member.lora), LoraConfig, "policy.lora")
    policy = replace(config.policy, lora=lora)
    if member.model:
        policy = replace(policy, model=member.model, build="")
    steps = steps_learned(config, name, config.steps)
    return replace(config, policy=policy, steps=steps, policies={}, roles={}, **own)


def initial_version(config: RunConfig, policy: str) -> tuple[str, FrozenPolicy]:
    """A policy as training began with it, and its name."""
    own = view(config, policy)
    directory, lora = own.model_path(), own.policy.lora
    if lora.rank or lora.adapter:
        directory = str(config.path(lora.adapter)) if lora.adapter else ""
    return initial_name(policy), FrozenPolicy(policy=policy, directory=directory, steps=0)


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


def _merged(base: Mapping[str, Any], differs: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `differs`, table by table."""
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
