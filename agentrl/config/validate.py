"""What the settings of a run file mean together: combinations that no run can be made with."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import msgspec

from agentrl.config import policies as team
from agentrl.config import selfplay
from agentrl.config.infrastructure import (
    ENGINES,
    LEARNERS,
    EngineConfig,
    LearnerConfig,
    VerlConfig,
    VllmConfig,
)
from agentrl.config.keys import check_keys, flatten, said
from agentrl.config.schema import AlgorithmConfig, LoraConfig, MemberConfig, RunConfig, TeamConfig
from agentrl.config.sinks import SINKS, known_sinks, missing
from agentrl.errors import ConfigError, nearest
from agentrl.types import POLICY


def check(config: RunConfig, source: str) -> None:
    """Raises ConfigError, naming `source` and the key, for what could have no effect or cannot
    be."""
    _check_numbers(msgspec.structs.replace(config, policies={}), source)
    for name, member in config.policies.items():
        _check_member(name, member, source)
    _check_roles(config, source)
    _check_lora(config.policy.lora, source)
    _check_schedule(config.algorithm, source)
    _check_policies(config, source)
    _check_stand_ins(config, source)
    selfplay.check(config, source)
    _check_sinks(config.metrics.sinks, source)
    _check_engine(config.engine, source)
    _check_learner(config.learner, source)


def _check_numbers(config: RunConfig, source: str) -> None:
    """Numbers that their types let pass and that no run can be made with."""
    for key, value in flatten(msgspec.to_builtins(config)).items():
        free = key == "critic.clip" or key.startswith("algorithm.options.")
        if isinstance(value, float) and not math.isfinite(value) and not free:
            raise ConfigError(f"{source}: {key} = {value}; it must be finite")
    sampling, algorithm = config.sampling, config.algorithm
    for name, wrong, allowed in (
        ("temperature", sampling.temperature < 0, "0 (greedy) or above"),
        ("top_p", not 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k < 0, "0 (no limit) or above"),
        ("max_tokens", sampling.max_tokens is not None and sampling.max_tokens < 1, "1 or above"),
    ):
        if wrong:
            found = getattr(sampling, name)
            raise ConfigError(f"{source}: sampling.{name} = {found}; it must be {allowed}")
    if algorithm.branching.kind == "none" and algorithm.min_group > algorithm.group_size:
        raise ConfigError(
            f"{source}: algorithm.min_group = {algorithm.min_group} drops every group of "
            f"algorithm.group_size = {algorithm.group_size}; lower the one or raise the other"
        )


def _check_roles(config: RunConfig, source: str) -> None:
    """That every role has one player, and every player a name of its own."""
    policies = set(config.policies) or {POLICY}
    known = policies.union(config.upstreams)
    for role, target in config.roles.items():
        if target not in known:
            raise ConfigError(f"{source}: roles.{role} = {target!r}; {nearest(target, known)}")
    for name in sorted(policies.intersection(config.upstreams)):
        raise ConfigError(f"{source}: [upstreams.{name}]: that is the name of a policy")
    claimed = dict.fromkeys(config.roles, "[roles]")
    for name, member in config.policies.items():
        for role in member.roles:
            if role in claimed:
                raise ConfigError(
                    f"{source}: policies.{name}.roles names {role!r}, which {claimed[role]} has "
                    "already; a role is played by one policy"
                )
            claimed[role] = f"policies.{name}.roles"
    for name in config.policies:
        if name not in {POLICY, *team.claims(config).values()}:
            raise ConfigError(
                f"{source}: policies.{name}.roles is empty: no call would be its; name the roles "
                "that it plays"
            )


def _check_policies(config: RunConfig, source: str) -> None:
    """What the tables of several policies mean together, and each as if it were alone."""
    if not config.policies and config.team != TeamConfig():
        raise ConfigError(f"{source}: [team] is about several policies, and there is one")
    if not config.policies:
        return
    names = team.trained(config)
    if not names:
        raise ConfigError(f"{source}: [policies]: all of them are frozen; one must learn")
    if config.learner.kind == "verl":
        raise ConfigError(
            f"{source}: learner.kind = 'verl' trains one policy, and [policies] has "
            f"{', '.join(config.policies)}; use learner.kind = 'torch'"
        )
    if config.reward_models:
        raise ConfigError(
            f"{source}: [reward_models] score the calls of one policy, and [policies] has several; "
            "let the verifier return the reward"
        )
    if config.team.schedule == "together" and config.team.every != 1:
        raise ConfigError(f"{source}: team.every means nothing for team.schedule = 'together'")
    for name in names:
        _check_view(config, name, source)


def _check_stand_ins(config: RunConfig, source: str) -> None:
    """That replays replace roles of policies that learn, by somebody there is."""
    given = config.algorithm.counterfactual.stand_ins
    ahead = config.algorithm.max_staleness
    if given and (config.algorithm.branching.kind != "none" or config.selfplay.seats):
        other = "selfplay" if config.selfplay.seats else "algorithm.branching"
        raise ConfigError(
            f"{source}: algorithm.counterfactual plays rollouts again that [{other}] asks for "
            "otherwise; leave one of them out"
        )
    if given and ahead:
        raise ConfigError(
            f"{source}: algorithm.max_staleness = {ahead} lets a step take rollouts that are not "
            "played again yet, which algorithm.counterfactual learns nothing from; leave one of "
            "them out"
        )
    trained = team.trained(config)
    players = {*(config.policies or (POLICY,)), *config.upstreams, team.FIRST}
    for role, player in given.items():
        where = f"{source}: algorithm.counterfactual.stand_ins.{role}"
        if team.player_of(config, role) not in trained:
            known = {role for role, name in team.claims(config).items() if name in trained}
            raise ConfigError(f"{where}: no policy that learns plays it; {nearest(role, known)}")
        if player not in players:
            raise ConfigError(f"{where} = {player!r}; {nearest(player, players)}")
        if player == team.FIRST and player in {*config.policies, *config.upstreams}:
            raise ConfigError(
                f"{where} = {player!r} is the role's own policy as training began with it, and "
                "there is another player of this name; rename that one"
            )


def _check_member(name: str, member: MemberConfig, source: str) -> None:
    where = f"policies.{name}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise ConfigError(
            f"{source}: [{where}]: a policy's name is letters, digits, - and _, because adapters, "
            "folders and metrics are named by it"
        )
    tables: dict[str, type[msgspec.Struct]] = {"lora": LoraConfig, **team.TABLES}
    for key, kind in tables.items():
        differs: dict[str, Any] = getattr(member, key)
        check_keys(kind, differs, prefix=f"{where}.{key}.", source=source)
        if differs and member.frozen and key != "lora":
            raise ConfigError(f"{source}: {where}.{key}: it is frozen, so it learns nothing")
    for key in sorted(team.SHARED.intersection(member.algorithm)):
        raise ConfigError(
            f"{source}: {where}.algorithm.{key}: all policies learn from the same groups; set "
            f"algorithm.{key}"
        )
    if not member.frozen:
        return
    if not (member.model or member.lora.get("adapter")):
        raise ConfigError(
            f"{source}: {where}: it is frozen and has no weights; give model or lora.adapter"
        )
    for key in sorted(set(member.lora) - {"adapter"}):
        raise ConfigError(f"{source}: {where}.lora.{key}: a frozen adapter says itself what it is")


def _check_view(config: RunConfig, name: str, source: str) -> None:
    own = f"{source}: policies.{name}"
    try:
        view = team.view(config, name)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{own}: {said(str(error))}") from None
    _check_numbers(view, own)
    _check_lora(view.policy.lora, own)
    _check_schedule(view.algorithm, own)
    if not view.policy.lora.rank and not config.policies[name].model:
        raise ConfigError(
            f"{own}: give it lora.rank, for an adapter on policy.model, or a model of its own"
        )
    if config.steps and not view.steps:
        raise ConfigError(
            f"{own} never learns: its turn would come after the last of steps = {config.steps}; "
            "lower team.every or raise steps"
        )


def _check_lora(settings: LoraConfig, source: str) -> None:
    for key, default in msgspec.structs.asdict(LoraConfig()).items():
        if not settings.rank and getattr(settings, key) != default:
            raise ConfigError(
                f"{source}: policy.lora.{key} has no effect while policy.lora.rank is 0; set both"
            )


def _check_schedule(algorithm: AlgorithmConfig, source: str) -> None:
    if algorithm.min_lr and algorithm.schedule == "constant":
        raise ConfigError(
            f"{source}: algorithm.min_lr: a constant algorithm.schedule does not fall to it; "
            "choose linear or cosine"
        )
    if algorithm.min_lr > algorithm.lr:
        raise ConfigError(f"{source}: algorithm.min_lr: it is above algorithm.lr = {algorithm.lr}")
    if algorithm.target_kl is not None and algorithm.minibatches * algorithm.epochs == 1:
        raise ConfigError(
            f"{source}: algorithm.target_kl: a batch is one optimizer step, so there is none to "
            "leave out; raise algorithm.minibatches or algorithm.epochs, or remove it"
        )


def _check_sinks(names: list[str], source: str) -> None:
    known = known_sinks()
    for name in names:
        if ":" not in name and name not in known:
            raise ConfigError(
                f"{source}: metrics.sinks: {name!r}; {nearest(name, known)}, or your own as"
                " file.py:name"
            )
        if names.count(name) > 1:
            raise ConfigError(f"{source}: metrics.sinks names {name!r} twice")
    for name in missing(name for name in names if name in SINKS):
        raise ConfigError(
            f"{source}: metrics.sinks: {name!r} is not installed: pip install 'agentrl[{name}]'"
        )


def _check_kind(key: str, kind: str, own: Sequence[str], group: str, source: str) -> None:
    known = [*own, *(point.name for point in entry_points(group=group))]
    if ":" not in kind and kind not in known:
        raise ConfigError(
            f"{source}: {key} = {kind!r}; {nearest(kind, known)}, or your own as file.py:name"
        )


def _check_engine(engine: EngineConfig, source: str) -> None:
    _check_kind("engine.kind", engine.kind, ENGINES, "agentrl.engines", source)
    if engine.host in ("0.0.0.0", "::") and not engine.advertise:
        raise ConfigError(
            f"{source}: engine.host = {engine.host!r} listens everywhere and is no address that a "
            "runner could call; set engine.advertise to this machine's"
        )
    for name, default in msgspec.to_builtins(VllmConfig()).items():
        if engine.kind != "vllm" and getattr(engine.vllm, name) != default:
            raise ConfigError(
                f"{source}: engine.vllm.{name} is for engine.kind = 'vllm', and it is "
                f"{engine.kind!r}"
            )
    for url in engine.vllm.urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{source}: engine.vllm.urls = {url!r}: give it as http://HOST:PORT")
    if engine.vllm.urls:
        for name in ("arguments", "tool_parser"):
            if getattr(engine.vllm, name) != getattr(VllmConfig(), name):
                raise ConfigError(
                    f"{source}: engine.vllm.{name} is for a vLLM child, and engine.vllm.urls are "
                    "servers that run already; start those with it"
                )


def _check_learner(learner: LearnerConfig, source: str) -> None:
    _check_kind("learner.kind", learner.kind, LEARNERS, "agentrl.learners", source)
    for name, default in msgspec.to_builtins(VerlConfig()).items():
        if learner.kind != "verl" and getattr(learner.verl, name) != default:
            raise ConfigError(
                f"{source}: learner.verl.{name} is for learner.kind = 'verl', and it is "
                f"{learner.kind!r}"
            )
