"""The run file: TOML into typed settings. An unknown key is an error with its path.

The settings themselves are in `sections`, what they mean together in `checks`; everybody else has
them from here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agentrl import checks
from agentrl.errors import ConfigError
from agentrl.keys import check_keys, flatten, said
from agentrl.keys import nearest as nearest
from agentrl.sections import AgentConfig as AgentConfig
from agentrl.sections import AlgorithmConfig as AlgorithmConfig
from agentrl.sections import BranchingConfig as BranchingConfig
from agentrl.sections import ContainerConfig as ContainerConfig
from agentrl.sections import Count as Count
from agentrl.sections import CriticConfig as CriticConfig
from agentrl.sections import EngineConfig as EngineConfig
from agentrl.sections import EvalConfig as EvalConfig
from agentrl.sections import KubernetesConfig as KubernetesConfig
from agentrl.sections import LearnerConfig as LearnerConfig
from agentrl.sections import LoraConfig as LoraConfig
from agentrl.sections import MemberConfig as MemberConfig
from agentrl.sections import MetricsConfig as MetricsConfig
from agentrl.sections import Natural as Natural
from agentrl.sections import PolicyConfig as PolicyConfig
from agentrl.sections import PoolConfig as PoolConfig
from agentrl.sections import Positive as Positive
from agentrl.sections import ReferenceConfig as ReferenceConfig
from agentrl.sections import RetriesConfig as RetriesConfig
from agentrl.sections import RewardModelConfig as RewardModelConfig
from agentrl.sections import RunConfig as RunConfig
from agentrl.sections import RunnerConfig as RunnerConfig
from agentrl.sections import Section as Section
from agentrl.sections import SelfplayConfig as SelfplayConfig
from agentrl.sections import TasksConfig as TasksConfig
from agentrl.sections import TeacherConfig as TeacherConfig
from agentrl.sections import TeamConfig as TeamConfig
from agentrl.sections import UpstreamConfig as UpstreamConfig
from agentrl.sections import VerifierConfig as VerifierConfig
from agentrl.sections import VerlConfig as VerlConfig
from agentrl.sections import VllmConfig as VllmConfig
from agentrl.store.urls import concealed


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run file and apply `key.sub=value` overrides.

    Raises ConfigError naming the file, the key and the nearest valid name."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such run file; give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not a readable TOML file: {error}") from None
    data.setdefault("root", str(path.parent.resolve()))
    data.setdefault("name", path.parent.resolve().name)
    for override in overrides:
        _apply(data, override)
    return resolve(data, source=str(path))


def resolve(data: Mapping[str, Any], *, source: str) -> RunConfig:
    """Typed settings from a mapping, with every path absolute."""
    check_keys(RunConfig, data, prefix="", source=source)
    try:
        config = msgspec.convert(data, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {said(str(error))}") from None
    checks.check(config, source)
    output = Path(config.output or Path("runs", config.name)).resolve()
    return msgspec.structs.replace(
        config,
        root=str(Path(config.root).resolve()),
        output=str(output),
        store=config.store or f"sqlite:///{output / 'store.db'}",
    )


def to_toml(config: RunConfig) -> str:
    """The resolved settings as a run file, for `--dry-run`."""
    lines: list[str] = []

    def table(values: Mapping[str, Any], prefix: str) -> None:
        plain = {k: v for k, v in values.items() if not isinstance(v, dict) and v is not None}
        if prefix and (plain or not values):
            lines.append(f"\n[{prefix}]")
        lines.extend(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items())
        for key, value in values.items():
            if isinstance(value, dict):
                table(value, f"{prefix}.{_toml_key(key)}" if prefix else key)

    public, _ = concealed(config.store)
    table(msgspec.to_builtins(msgspec.structs.replace(config, store=public)), "")
    return "\n".join(lines) + "\n"


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Settings that would change what a run learns, as "key: old -> new"."""
    ignored = {"root", "output", "store", "steps", "keep_checkpoints", "eval", "runner", "engine"}
    ignored |= {"metrics"}
    # Either learner goes on from the other's checkpoint, on any number of GPUs.
    placement = ("learner.kind", "learner.packing", "learner.verl.")
    before, after = (
        flatten(msgspec.to_builtins(config)) | {"policies": list(config.policies)}  # their order
        for config in (old, new)
    )
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if key.split(".")[0] not in ignored
        and not key.startswith(placement)
        and before.get(key) != after.get(key)
    ]


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: write it as key.sub=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: no quoting on the command line
    *parents, last = key.split(".")
    table = data
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a table")
    table[last] = value


<<<<<<< HEAD
def _check_keys(
    section: type[msgspec.Struct], data: Mapping[str, Any], *, prefix: str, source: str
) -> None:
    types = {field.name: field.type for field in msgspec.structs.fields(section)}
    for key, value in data.items():
        if key not in types:
            where = f" in [{prefix.rstrip('.')}]" if prefix else ""
            raise ConfigError(
                f"{source}: unknown key {prefix + key!r}{where}; {nearest(key, types)}"
            )
        kind = types[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            _check_keys(kind, value, prefix=f"{prefix}{key}.", source=source)
        elif isinstance(value, dict):
            inner = get_args(kind)[-1] if get_args(kind) else Any
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                for name, table in value.items():
                    if isinstance(table, dict):
                        where = f"{prefix}{key}.{name}."
                        _check_keys(inner, table, prefix=where, source=source)


def _said(message: str) -> str:
    """What msgspec says, with the key as it is in the run file and the words that it may be."""
    wrong = re.fullmatch(r"Invalid enum value '(.*)' - at `\$\.(.*)`", message, re.DOTALL)
    if wrong is None:
        return message.replace("`$.", "`").replace("`$`", "the top level")
    kind: Any = RunConfig
    for name, inner in re.findall(r"(\w+)(\[\.\.\.\])?", wrong[2]):
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == name)
        if inner:
            kind = get_args(kind)[-1]
    return f"{wrong[2]} = {wrong[1]!r}; {nearest(wrong[1], map(str, get_args(kind)))}"


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
        _check_keys(kind, differs, prefix=f"{where}.{key}.", source=source)
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
        raise ConfigError(f"{own}: {_said(str(error))}") from None
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


def _check_engine(engine: EngineConfig, source: str) -> None:
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
    for name, default in msgspec.to_builtins(VerlConfig()).items():
        if learner.kind != "verl" and getattr(learner.verl, name) != default:
            raise ConfigError(
                f"{source}: learner.verl.{name} is for learner.kind = 'verl', and it is "
                f"{learner.kind!r}"
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
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"{source}: metrics.sinks: {name!r}; {nearest(name, SINKS)}")
        if names.count(name) > 1:
            raise ConfigError(f"{source}: metrics.sinks names {name!r} twice")
    for name in missing(names):
        raise ConfigError(
            f"{source}: metrics.sinks: {name!r} is not installed: pip install 'agentrl[{name}]'"
        )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


=======
>>>>>>> review
def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else msgspec.json.encode(key).decode()


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return msgspec.json.encode(value).decode() if isinstance(value, str) else repr(value)
