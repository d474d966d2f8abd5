"""Checks of run files: of keys against the tables, and of combinations of settings.

Every error names the key and says what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec

from agentrl.core.access import is_loopback
from agentrl.core.config import derived
from agentrl.core.config.base import EXTERNAL, field_types, structs_of, tables
from agentrl.core.config.derived import TABLES, setting_hint
from agentrl.core.config.infrastructure import EngineConfig
from agentrl.core.config.learning import (
    INITIAL,
    AlgorithmConfig,
    LoraConfig,
    MemberConfig,
    SnapshotOpponents,
    TeamConfig,
)
from agentrl.core.config.schema import RunConfig
from agentrl.core.errors import ConfigError, install_command, nearest
from agentrl.core.loading import is_installed
from agentrl.core.plugins import Group, plugin_points
from agentrl.core.types import ANY_ROLE, POLICY

Struct = type[msgspec.Struct]
Structs = tuple[Struct, ...]
OVERRIDDEN: dict[str, Any] = {"lora": LoraConfig, **TABLES}  # by one of several policies
# Tables whose kinds may be plug-ins
PLUGINS: dict[str, Group] = {"engine": "engines", "learner": "learners", "runner": "executors"}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as a single one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def check_keys(
    section: Struct, data: Mapping[str, Any], *, source: str, prefix: str = ""
) -> dict[str, Any]:
    """The table in the form that msgspec can convert to `section`: adds the tags of kinds, and
    removes settings of other kinds that have their default values.

    Raises ConfigError for an unknown key in the table or a nested one."""
    return _Reader(source).table((section,), data, prefix)


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source

    def table(self, kinds: Structs, data: Mapping[str, Any], path: str) -> dict[str, Any]:
        """kinds: the types of the table, one per kind, the default first."""
        section, table = self._choose(kinds, dict(data), path)
        types = field_types(section) | (OVERRIDDEN if section is MemberConfig else {})
        for key, value in list(table.items()):
            if key in types:
                table[key] = self._value(types[key], value, f"{path}{key}.")
            elif key != section.__struct_config__.tag_field:
                self._check_other(kinds, section, table, key, path)
                del table[key]
        return table

    def _value(self, kind: Any, value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            return value
        if structs := structs_of(kind):
            return self.table(structs, value, path)
        if get_args(kind) and (structs := structs_of(get_args(kind)[-1])):  # tables by name
            return {
                name: self._value(get_args(kind)[-1], inner, f"{path}{name}.")
                for name, inner in value.items()
            }
        return value

    def _choose(
        self, kinds: Structs, data: dict[str, Any], path: str
    ) -> tuple[Struct, dict[str, Any]]:
        """The type of a table, by its tag, and the table with that tag and with the optional table
        of the kind's own settings."""
        field = kinds[0].__struct_config__.tag_field
        if field is None:
            return kinds[0], data
        by_tag = {str(kind.__struct_config__.tag): kind for kind in kinds}
        tag = str(data.setdefault(field, next(iter(by_tag))))
        if tag not in by_tag:
            names = by_tag.keys() - {EXTERNAL}
            if EXTERNAL in by_tag:
                names |= plugin_points(PLUGINS[path[:-1]]).names
            if tag not in names and (EXTERNAL not in by_tag or ":" not in tag):
                raise ConfigError(f"{self.source}: {path}{field} = {tag!r}; {nearest(tag, names)}")
            data |= {field: EXTERNAL, "factory": tag}
        section = by_tag[data[field]]
        if structs_of(field_types(section).get(tag)):
            data.setdefault(tag, {})
        return section, data

    def _check_other(
        self, kinds: Structs, section: Struct, data: dict[str, Any], key: str, path: str
    ) -> None:
        """Raises ConfigError for a key that this kind of table does not have, unless the key
        belongs to another kind and has its default value."""
        others = [kind for kind in kinds if key in field_types(kind)]
        if not others:
            where = f" in [{path.rstrip('.')}]" if path else ""
            keys = field_types(section)
            hint = setting_hint(key, data[key], keys) or nearest(key, keys)
            raise ConfigError(f"{self.source}: unknown key {path + key!r}{where}; {hint}")
        default = flatten({key: _default_of(others[0], key)})
        values = flatten({key: data[key]})
        changed = [name for name, value in values.items() if value != default.get(name)]
        if changed:
            field = str(section.__struct_config__.tag_field)
            names = (str(other.__struct_config__.tag) for other in others)
            tags = " or ".join(repr(n if n != EXTERNAL else "file.py:name") for n in names)
            raise ConfigError(
                f"{self.source}: {path}{changed[0]} is for {path}{field} = {tags}, and it is "
                f"{data[field]!r}"
            )


def _default_of(section: Struct, name: str) -> Any:
    """The default of a field as JSON; NODEFAULT for a required field."""
    field = next(field for field in msgspec.structs.fields(section) if field.name == name)
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return msgspec.NODEFAULT if field.required else msgspec.to_builtins(field.default)


def format_validation_error(message: str) -> str:
    """A message of msgspec with the run file's name of the key, and with the allowed values."""
    message = message.replace("$.role_rules", "$.roles.match")
    missing = re.fullmatch(r"Object missing required field `(\w+)`(?: - at `\$\.(.*)`)?", message)
    if missing is not None:
        return f"{missing[2]}.{missing[1]} is missing"
    wrong = re.fullmatch(r"Invalid enum value '(.*)' - at `\$\.(.*)`", message, re.DOTALL)
    if wrong is None:
        return message.replace("`$.", "`").replace("`$`", "the top level")
    kinds: list[Any] = [RunConfig]  # possible types of the key, followed along its path
    for name, inner in re.findall(r"(\w+)(\[\.\.\.\])?", wrong[2]):
        tables = [field_types(struct) for kind in kinds for struct in structs_of(kind)]
        kinds = [table[name] for table in tables if name in table]
        kinds = [get_args(kind)[-1] for kind in kinds] if inner else kinds
    words = (str(word) for kind in kinds for word in get_args(kind))
    return f"{wrong[2]} = {wrong[1]!r}; {nearest(wrong[1], words)}"


def check(config: RunConfig, source: str) -> None:
    """Raises ConfigError with `source` and the key of a setting without effect or impossible."""
    for problem in _problems(config):
        raise ConfigError(f"{source}: {problem}")


def _problems(config: RunConfig) -> Iterator[str]:
    yield from _numbers(msgspec.structs.replace(config, policies={}))
    for name, member in config.policies.items():
        yield from _member(name, member)
    yield from _roles(config)
    yield from _models(config)
    yield from _lora(config.policy.lora)
    yield from _schedule(config.algorithm)
    yield from _staleness(config)
    if config.eval.functions and derived.has_no_own_policy(config) and config.plays_rollouts:
        yield "eval.functions are given a checkpoint, and [upstreams] have none: leave them out"
    yield from _policies(config)
    yield from _rewards(config)
    yield from _callers(config.engine)
    yield from _quantized(config)
    yield from _peft(config)
    for table in tables(config):
        yield from table.problems(config)
    yield from _counterfactual(config)
    yield from _selfplay(config)


def _models(config: RunConfig) -> Iterator[str]:
    """Models that are GGUF files, which must be converted first."""
    members = {f"policies.{name}.model": member.model for name, member in config.policies.items()}
    for key, model in ({"policy.model": config.policy.model} | members).items():
        path = config.path(model)
        files = [path] if path.suffix == ".gguf" and path.is_file() else path.glob("*.gguf")
        if model and any(files) and not (path / "config.json").is_file():
            yield (
                f"{key} = {model!r}: a GGUF file cannot be trained as it is; convert it to a "
                f"folder, and name that: agentrl model import {path} FOLDER"
            )


def _rewards(config: RunConfig) -> Iterator[str]:
    """Tables that give rewards of the same name."""
    for name in config.reward_models:
        if name in config.judges:
            yield f"reward_models.{name}: [judges] has a reward of that name; rename one"


def _quantized(config: RunConfig) -> Iterator[str]:
    """Quantized weights need an adapter, the torch learner and bitsandbytes."""
    policy = config.policy
    if policy.quantize and not (policy.lora.rank and config.learner.kind == "torch"):
        yield "policy.quantize: set policy.lora.rank too, and learner.kind = 'torch'"
    if policy.quantize and not is_installed("bitsandbytes"):
        yield f"policy.quantize: 'bitsandbytes' is not installed: {install_command('quant')}"


def _callers(engine: EngineConfig) -> Iterator[str]:
    """A policy server that other machines can reach needs a key."""
    if not (is_loopback(engine.host) or engine.key_env or engine.kind == EXTERNAL):
        yield (
            f"engine.host = {engine.host!r}: anyone who reaches it could sample from the policy; "
            "set engine.key_env to the name of an environment variable with a key, here and on "
            "runners"
        )


def _numbers(config: RunConfig) -> Iterator[str]:
    """Impossible numbers that their types allow."""
    for key, value in flatten(msgspec.to_builtins(config)).items():
        unbounded = key == "critic.clip" or ".options." in key
        if isinstance(value, float) and not math.isfinite(value) and not unbounded:
            yield f"{key} = {value}; it must be finite"
    sampling = config.sampling
    for name, wrong, allowed in (
        ("temperature", sampling.temperature < 0, "0 (greedy) or above"),
        ("top_p", not 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k < 0, "0 (no limit) or above"),
        ("max_tokens", sampling.max_tokens is not None and sampling.max_tokens < 1, "1 or above"),
    ):
        if wrong:
            yield f"sampling.{name} = {getattr(sampling, name)}; it must be {allowed}"


def _roles(config: RunConfig) -> Iterator[str]:
    """Every role has one policy or upstream, and all of these have different names."""
    policies = set(config.policies) or {POLICY}
    players = policies.union(config.upstreams)
    for role, target in config.roles.items():
        if target not in players:
            yield f"roles.{role} = {target!r}; {nearest(target, players)}"
    for name in sorted(policies.intersection(config.upstreams)):
        yield f"[upstreams.{name}] has the name of a policy; rename one"
    if ANY_ROLE in config.roles and not derived.has_no_own_policy(config):
        yield 'roles."*" is for a run without a policy, which plays all other roles: remove it'
    claimed = dict.fromkeys(config.roles, "[roles]")
    for name, member in config.policies.items():
        for role in member.roles:
            if role in claimed:
                yield (
                    f"policies.{name}.roles names {role!r}, which {claimed[role]} has already; "
                    "a role belongs to one policy"
                )
            claimed[role] = f"policies.{name}.roles"
    for name in sorted(set(config.policies) - {POLICY, *derived.policy_by_role(config).values()}):
        yield f"policies.{name}.roles is empty, so it would get no calls; name the roles it plays"


def _member(name: str, member: MemberConfig) -> Iterator[str]:
    where = f"policies.{name}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        yield (
            f"[{where}]: a policy's name may have letters, digits, - and _, because adapters, "
            "folders and metrics have this name"
        )
    for key in sorted(derived.SHARED.intersection(member.algorithm)):
        yield (
            f"{where}.algorithm.{key}: all policies learn from the same groups; set algorithm.{key}"
        )
    if not member.frozen:
        return
    for key in derived.TABLES:
        if getattr(member, key):
            yield f"{where}.{key}: a frozen policy does not learn; remove it"
    if not (member.model or member.lora.get("adapter")):
        yield f"{where}: a frozen policy needs weights; set model or lora.adapter"
    for key in sorted(set(member.lora) - {"adapter"}):
        yield f"{where}.lora.{key}: a frozen adapter's files determine this; remove it"


def _policies(config: RunConfig) -> Iterator[str]:
    """Settings of several policies, and the view of each."""
    if not config.policies and config.team != TeamConfig():
        yield "[team] has no effect without [policies]"
    if not config.policies:
        return
    names = derived.trained_policies(config)
    if not names:
        yield "[policies]: all of them are frozen; at least one must learn"
    if config.team.schedule == "together" and config.team.every != 1:
        yield "team.every has no effect for team.schedule = 'together'"
    for name in names:
        for problem in _view(config, name):
            yield f"policies.{name}{problem}"


def _view(config: RunConfig, name: str) -> Iterator[str]:
    """Error messages about the view of one policy."""
    try:
        view = derived.view(config, name)
    except msgspec.ValidationError as error:
        yield f": {format_validation_error(str(error))}"
        return
    for check in (_numbers(view), _lora(view.policy.lora), _schedule(view.algorithm)):
        yield from (f": {problem}" for problem in check)
    for table in (view.reference, view.teacher):
        yield from (f": {problem}" for problem in table.problems(view))
    if not view.policy.lora.rank and not config.policies[name].model:
        yield ": set lora.rank, for an adapter on policy.model, or a model of its own"
    if config.steps and not view.steps:
        yield (
            f" never learns: its turn would come after the last of steps = {config.steps}; lower "
            "team.every or raise steps"
        )


def _counterfactual(config: RunConfig) -> Iterator[str]:
    """Substitutes replace trained policies with known policies or upstreams."""
    algorithm, substitutes = config.algorithm, config.algorithm.counterfactual.substitutes
    if not substitutes:
        return
    if algorithm.branching.joins:
        yield (
            "algorithm.counterfactual cannot replay rollouts of [algorithm.branching]; remove one "
            "of them"
        )
    if config.selfplay.seats:
        yield "algorithm.counterfactual cannot replay rollouts of [selfplay]; remove one of them"
    if algorithm.max_staleness:
        yield (
            f"algorithm.max_staleness = {algorithm.max_staleness:g} lets a step train rollouts "
            "that have no replays yet, from which algorithm.counterfactual learns nothing; remove "
            "one of them"
        )
    trained, others = derived.trained_policies(config), {*config.policies, *config.upstreams}
    players = others | {INITIAL} | (set() if config.policies else {POLICY})
    for role, player in substitutes.items():
        where = f"algorithm.counterfactual.substitutes.{role}"
        if derived.policy_of_role(config, role) not in trained:
            learning = {r for r, name in derived.policy_by_role(config).items() if name in trained}
            yield f"{where}: no trained policy plays this role; {nearest(role, learning)}"
        if player not in players:
            yield f"{where} = {player!r}; {nearest(player, players)}"
        if player == INITIAL and player in others:
            yield (
                f"{where} = {player!r} means the role's own policy before training, but "
                "another player has this name; rename that one"
            )


def _selfplay(config: RunConfig) -> Iterator[str]:
    """The policy that learns plays all seats, with snapshots that the engine can serve."""
    selfplay, trained = config.selfplay, derived.trained_policies(config)
    if not selfplay.seats:
        return
    learner, player_of_role = derived.self_playing_policy(config), derived.policy_by_role(config)
    if learner not in trained:
        yield f"selfplay.seats: {learner!r} plays them and does not learn; {', '.join(trained)} do"
    if len(trained) > 1 and not player_of_role.keys() & set(selfplay.seats):
        yield (
            f"selfplay.seats: {', '.join(trained)} learn; name one of the seats in "
            "policies.NAME.roles of the one that plays"
        )
    for role in selfplay.seats:
        if player_of_role.get(role, learner) != learner:
            yield (
                f"selfplay.seats names {role!r}, which {player_of_role[role]!r} plays by [roles] "
                "or [policies]; remove it there"
            )
    if not isinstance(selfplay, SnapshotOpponents):
        return
    size, seats = config.algorithm.group_size, len(selfplay.seats)
    if size % seats:
        yield (
            f"algorithm.group_size = {size} is not a multiple of the {seats} selfplay.seats, "
            "which the policy plays equally often in every group"
        )
    if config.engine.serves_only_adapters:
        yield from _snapshots(config, selfplay)


def _snapshots(config: RunConfig, selfplay: SnapshotOpponents) -> Iterator[str]:
    """Whether the engine can serve the policy's snapshots as adapters."""
    policy = derived.view(config, derived.self_playing_policy(config)).policy
    if not policy.lora.rank:
        yield (
            f"selfplay.opponents = {selfplay.opponents!r}: engine.kind = {config.engine.kind!r} "
            "serves snapshots only as adapters; set policy.lora.rank, or engine.kind = 'embedded'"
        )


def _lora(settings: LoraConfig) -> Iterator[str]:
    for key, default in msgspec.structs.asdict(LoraConfig()).items():
        if not settings.rank and getattr(settings, key) != default:
            yield f"policy.lora.{key} has no effect while policy.lora.rank is 0; set both"


def _peft(config: RunConfig) -> Iterator[str]:
    """Where models are loaded; a machine that only runs agents needs no peft."""
    tables = {"policy.lora": msgspec.structs.asdict(config.policy.lora)}
    tables |= {f"policies.{name}.lora": member.lora for name, member in config.policies.items()}
    used = [key for key, lora in tables.items() if lora.get("rank") or lora.get("adapter")]
    if used and is_installed("torch") and not is_installed("peft"):
        yield f"{used[0]}: 'peft' is not installed: {install_command('lora')}"


def _schedule(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.min_lr and algorithm.schedule == "constant":
        yield (
            "algorithm.min_lr: a constant algorithm.schedule ignores it; choose linear or cosine"
        )
    if algorithm.min_lr > algorithm.lr:
        yield f"algorithm.min_lr: it is above algorithm.lr = {algorithm.lr}"


def _staleness(config: RunConfig) -> Iterator[str]:
    """Sampling ahead of updates."""
    algorithm = config.algorithm
    ahead, overlap = algorithm.max_staleness, algorithm.async_sampling
    if config.steps and ahead > config.steps:
        yield (
            f"algorithm.max_staleness = {ahead:g} is more than the run's steps = {config.steps}, "
            "so it would limit nothing; lower it"
        )
    if ahead and overlap == "none":
        yield (
            f"algorithm.async_sampling = 'none' samples nothing ahead, but algorithm.max_staleness "
            f"= {ahead:g} requests it; remove one of them"
        )
    for key, value in (("async_sampling", overlap), ("group_order", algorithm.group_order)):
        if not ahead and value not in (None, "none", "requested"):
            yield (
                f"algorithm.{key} = {value!r}: nothing is sampled ahead of an update while "
                "algorithm.max_staleness is 0; set that too"
            )
    if overlap == "one_step_off" and (ahead != 1 or algorithm.group_order != "requested"):
        yield (
            "algorithm.async_sampling = 'one_step_off' samples one step ahead and trains groups in "
            "the order requested; set algorithm.max_staleness = 1 and "
            "algorithm.group_order = 'requested'"
        )
