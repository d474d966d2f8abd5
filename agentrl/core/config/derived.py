"""Settings that follow from others of a run file, and hints at mistakes.

A hint says what was probably meant, by the names of other libraries or of another table, or gives
the place of a syntax error; it is empty if nothing fits.

An environment contributes references, `environment:WHICH:PLUGIN:WHAT {...}`, to a run's settings
`agent.path`, `tasks.train`, `tasks.heldout` and `verifier.path`, so code that reads these need not
know about environments. WHICH is agent, train, heldout or verifier; the JSON at the end has
`[environment_options]`.

The names and options of the library's presets are in `presets.json`, so the launcher can check them
without torch; the algorithm process also checks the values of options. `python -m
tests.algorithms.presets.test_names` writes the file; a test compares it with the presets.

The roles and settings of several policies, and the steps in which each learns, are a function of
the run file and the step, so nothing is saved. A run without `[policies]` has a single policy,
which plays every role and learns in every step. In an evaluation plan, frozen policies play roles
too.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from agentrl.core.config.base import field_types, structs_of
from agentrl.core.config.learning import (
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    MemberConfig,
    PolicyConfig,
    ReferenceConfig,
    SnapshotOpponents,
    TeacherConfig,
)
from agentrl.core.config.live import IDLE
from agentrl.core.config.schema import RunConfig
from agentrl.core.errors import ConfigError, nearest
from agentrl.core.plugins import plugin_points
from agentrl.core.types import POLICY

SCHEME = "environment"
SPLITS = ("train", "heldout")
UNBOUNDED = 10**9  # steps of a live run, which trains until it is stopped


class EnvironmentName(msgspec.Struct, frozen=True):
    """An environment as the run file names it."""

    plugin: str  # of an entry point, or "file.py:Class"
    what: str
    options: str = "{}"  # JSON, with `python`
    root: str = "."  # the run file's folder

    @classmethod
    def read(cls, name: str, options: dict[str, Any], root: str | Path = ".") -> EnvironmentName:
        """Raises ConfigError for a name without a plug-in."""
        plugin, colon, what = name.partition(":")
        if plugin.endswith(".py"):
            class_, colon, what = what.partition(":")
            plugin = f"{plugin}:{class_}"
        if not (colon and plugin):
            raise ConfigError(f'environment = {name!r}: write it as "PLUGIN:WHAT"')
        return cls(plugin, what, msgspec.json.encode(options, order="sorted").decode(), str(root))

    @property
    def name(self) -> str:
        """For messages, and in the result of a rollout."""
        return f"{self.plugin}:{self.what}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the plug-in's constructor."""
        return {key: value for key, value in self.all_options.items() if key != "python"}

    @property
    def all_options(self) -> dict[str, Any]:
        return msgspec.json.decode(self.options, type=dict[str, Any])

    @property
    def folder(self) -> str:
        """Of its own interpreter, by default."""
        return f".venv-{Path(self.plugin.partition(':')[0]).stem}"

    @property
    def python(self) -> str:
        """Its own interpreter, or "" if it runs in this one."""
        root, interpreter = Path(self.root), self.all_options.get("python")
        if interpreter is not None:
            return str((root / interpreter).absolute())  # a link into a venv stays one
        interpreters = (folder / self.folder / "bin/python" for folder in (root, Path()))
        return next((str(python.absolute()) for python in interpreters if python.is_file()), "")

    @property
    def fix_hint(self) -> str:
        return f"`agentrl env install {self.plugin}` makes {self.folder} with all that it needs"

    def part(self, which: str) -> str:
        """The reference to what it contributes."""
        options = "" if self.options == "{}" else f" {self.options}"
        return f"{SCHEME}:{which}:{self.plugin}:{self.what}{options}"


def derive(config: RunConfig) -> RunConfig:
    """The settings with those that follow from others. Raises ConfigError."""
    return _of_live_run(_of_environment(config))


def _of_environment(config: RunConfig) -> RunConfig:
    """The settings with the environment's agent, tasks and verifier where the run file has none."""
    if not config.environment:
        if config.environment_options:
            raise ConfigError("[environment_options] has no effect without environment")
        return config
    named = EnvironmentName.read(config.environment, config.environment_options)
    agent, tasks, verifier = config.agent, config.tasks, config.verifier
    if not (agent.path or agent.command or agent.harness):
        agent = replace(agent, path=named.part("agent"))
    missing = {split: named.part(split) for split in SPLITS if not getattr(tasks, split)}
    if not verifier.path:
        verifier = replace(verifier, path=named.part("verifier"))
    return replace(config, agent=agent, tasks=replace(tasks, **missing), verifier=verifier)


def _of_live_run(config: RunConfig) -> RunConfig:
    """The settings of a live run that follow from its sessions: each is a group of its own, calls
    continue during updates, and every step has its checkpoint."""
    live = config.live
    if not live.running:
        return config
    algorithm = replace(
        config.algorithm,
        groups=live.sessions,
        group_size=1,
        max_staleness=config.algorithm.max_staleness or 4.0,
        async_sampling="in_flight",
    )
    return replace(
        config,
        steps=UNBOUNDED,
        algorithm=algorithm,
        checkpoint=replace(config.checkpoint, every=1),
        sessions=replace(config.sessions, idle=config.sessions.idle or IDLE),
    )


def without_interpreter(config: RunConfig) -> RunConfig:
    """The settings without where the environment's interpreter is, for comparison."""
    options = dict(config.environment_options)
    if options.pop("python", None) is None:
        return config
    here = EnvironmentName.read(config.environment, config.environment_options)
    anywhere = EnvironmentName.read(config.environment, options)
    same = {here.part(which): anywhere.part(which) for which in ("agent", "verifier", *SPLITS)}
    paths = {split: getattr(config.tasks, split) for split in SPLITS}
    agent, verifier = config.agent.path, config.verifier.path
    return replace(
        config,
        environment_options=options,
        agent=replace(config.agent, path=same.get(agent, agent)),
        tasks=replace(config.tasks, **{key: same.get(path, path) for key, path in paths.items()}),
        verifier=replace(config.verifier, path=same.get(verifier, verifier)),
    )


PRESETS = Path(__file__).with_name("presets.json")


class PresetNames(msgspec.Struct, frozen=True):
    """The options of each preset and of each modifier; the preset of each recipe."""

    presets: dict[str, list[str]]
    modifiers: dict[str, list[str]]
    recipes: dict[str, str]

    @property
    def hosts(self) -> set[str]:
        """Names that modifiers can follow."""
        return {*self.presets, *self.recipes}

    def options(self, host: str) -> list[str]:
        return self.presets[self.recipes.get(host, host)]


@cache
def preset_names() -> PresetNames:
    return msgspec.json.decode(PRESETS.read_bytes(), type=PresetNames)


def check_presets(config: RunConfig) -> None:
    """Raises ConfigError for an unknown preset, modifier or option of a trained policy. Presets
    from outside the library are checked when they are loaded."""
    for name in trained_policies(config) if config.steps else []:
        try:
            _check(view(config, name).algorithm)
        except ConfigError as error:
            where = f"policies.{name}: " if config.policies else ""
            raise ConfigError(f"{where}{error}") from None


def _check(algorithm: AlgorithmConfig) -> None:
    name, library = algorithm.preset, preset_names()
    if ":" in name:
        return
    host, modifiers = find_preset(name)
    if host not in library.hosts or not library.modifiers.keys() >= set(modifiers):
        return
    options = [*library.options(host), *(o for word in modifiers for o in library.modifiers[word])]
    for option in algorithm.options:
        if option not in options:
            hint = setting_hint(option, None, options) or nearest(option, options)
            raise ConfigError(f"algorithm.options.{option}: no option of {name!r}; {hint}")


def find_preset(
    name: str, presets: Collection[str] = (), modifiers: Collection[str] = ()
) -> tuple[str, list[str]]:
    """Split "grpo+tis" or "mine.py:lenient+tis" into preset and modifiers; a preset's own name may
    contain "+". presets, modifiers: registered names besides the library's and those of packages.
    Raises ConfigError for an unknown name."""
    library, installed = preset_names(), plugin_points("presets").names
    names = {*library.hosts, *presets, *(word for word in installed if word[0] != "+")}
    words = {*library.modifiers, *modifiers, *(word[1:] for word in installed if word[0] == "+")}
    source, colon, rest = name.rpartition(":")
    hosts = [host for host in names if f"{name}+".startswith(f"{host}+")]
    host = max(hosts, key=len, default=source + colon + rest.split("+")[0])
    if ":" not in name and host not in names:
        hint = preset_hint(host, names) or nearest(host, names)
        raise ConfigError(f"algorithm.preset: no preset {host!r}; {hint}")
    added = name.removeprefix(host).split("+")[1:]
    for word in added:
        if word not in words:
            raise ConfigError(
                f"algorithm.preset: no modifier +{word} for {host!r}; {nearest(word, words)}"
            )
    return host, added


TABLES: dict[str, type[msgspec.Struct]] = {
    "algorithm": AlgorithmConfig,
    "critic": CriticConfig,
    "reference": ReferenceConfig,
    "teacher": TeacherConfig,
}

"""The tables that a policy may override."""

SHARED = frozenset({"groups", "group_size", "max_staleness", "dynamic_sampling"})

SHARED |= {"async_sampling", "group_order", "branching", "counterfactual"}

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


def trained_reward(config: RunConfig) -> str:
    """The reference of the reward that the algorithm maximises."""
    return str(config.algorithm.options.get("reward", "outcome"))


def frozen_policies(config: RunConfig) -> list[str]:
    """The policies that are served and never learn."""
    return [name for name, member in config.policies.items() if member.frozen]


def has_no_own_policy(config: RunConfig) -> bool:
    """Whether the run has no model of its own, so `[upstreams]` answer every call."""
    has_policy = config.policies or config.policy.model or config.policy.build
    return bool(config.upstreams) and not has_policy and POLICY not in config.roles.values()


def seeing_policies(config: RunConfig) -> frozenset[str]:
    """The names of the policies that see images."""
    every = config.policy.vision
    if not config.policies:
        return frozenset([POLICY] if every else [])
    return frozenset(name for name, member in config.policies.items() if member.vision or every)


def self_playing_policy(config: RunConfig) -> str:
    """The policy that plays against itself and its snapshots."""
    player = policy_by_role(config)
    named = (player[role] for role in config.selfplay.seats if role in player)
    return next(named, trained_policies(config)[0])


def snapshots_served(config: RunConfig) -> int:
    """The snapshots that self-play needs at once: its pool, and those of games that still run."""
    selfplay = config.selfplay
    if not isinstance(selfplay, SnapshotOpponents):
        return 0
    return selfplay.pool + math.ceil(config.algorithm.max_staleness / selfplay.every)


def policy_by_role(config: RunConfig) -> dict[str, str]:
    """Role -> the policy or upstream that plays it, from `[roles]` and `[policies]`."""
    by_member = {role: name for name, member in config.policies.items() for role in member.roles}
    return by_member | config.roles


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
    overridden: dict[str, Any] = {}
    for key, kind in TABLES.items():
        base, overrides = msgspec.to_builtins(getattr(config, key)), getattr(member, key)
        if overrides.get("preset", base.get("preset")) != base.get("preset"):
            base["options"] = {}  # they belong to the run's preset
        overridden[key] = _typed(_merged(base, overrides), kind, key)
    # A frozen adapter's files have its settings.
    inherited = {} if member.frozen else msgspec.to_builtins(config.policy.lora)
    lora = _typed(_merged(inherited, member.lora), LoraConfig, "policy.lora")
    differing = (set(field_types(MemberConfig)) & set(field_types(PolicyConfig))) - {"lora"}
    settings = {key: value for key in differing if (value := getattr(member, key))}
    policy = replace(
        config.policy, lora=lora, **settings, **({"build": ""} if member.model else {})
    )
    steps = steps_learned(config, name, config.steps)
    return replace(config, policy=policy, steps=steps, policies={}, roles={}, **overridden)


def warmup_folder(config: RunConfig, policy: str) -> Path:
    """The directory of a policy after the warm-up; several have one each."""
    return Path(config.output, f"warmup-{policy}") if config.policies else config.warmup_path


def initial_lora(config: RunConfig, policy: str) -> LoraConfig:
    """The adapter that a policy starts from: that of the warm-up, once it has made one."""
    settings, warmed_up = view(config, policy), warmup_folder(config, policy)
    if config.policies and config.warmup.data and warmed_up.is_dir():
        return replace(settings.policy.lora, adapter=str(warmed_up))
    return settings.initial_policy.lora


def initial_version(config: RunConfig, policy: str) -> tuple[str, FrozenPolicy]:
    """The served name and the frozen record of a policy before training."""
    settings = view(config, policy)
    directory, lora = settings.model_path(), initial_lora(config, policy)
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
    steps_since = max(step - index * every, 0)
    return steps_since if index == last else min(steps_since, every)


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated with the values of `differs`, recursively."""
    merged = dict(base)
    for key, value in overrides.items():
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


OTHER_NAMES = Path(__file__).with_name("other_names.toml")
VERY_CLOSE = 0.8  # a typo of a valid name
MAX_PLACES = 3  # of one name in several tables


@cache
def other_names() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(OTHER_NAMES.read_text(encoding="utf-8"))


def preset_hint(name: str, valid: Collection[str]) -> str:
    """The valid preset that a name probably means."""
    plain = name.lower().replace("_", "-")
    candidates = [plain, *other_names()["presets"].get(_plain(name), ())]
    return _suggestion([candidate for candidate in candidates if candidate in valid][:1])


def setting_hint(key: str, value: Any, valid: Collection[str]) -> str:
    """The settings that a key of the run file, or an option of a preset, probably means. value: the
    key's, perhaps a table with known keys; valid: keys of its table."""
    if difflib.get_close_matches(key, valid, n=1, cutoff=VERY_CLOSE):
        return ""
    paths = list(dict.fromkeys(_paths(RunConfig)))
    for name in (key, *_leaves(value)):
        listed = other_names()["settings"].get(_plain(name), [])
        same = [path for path in paths if path.rpartition(".")[2] == name]
        if suggested := listed or (same if len(same) <= MAX_PLACES else []):
            return _suggestion(suggested, "" if name == key else f" for its {name}")
    return ""


def syntax_hint(text: str, message: str) -> str:
    """The line of a syntax error in TOML, with a caret below its column."""
    place = re.search(r"\(at line (\d+), column (\d+)\)", message)
    if place is None:
        return ""
    row, column = map(int, place.groups())
    start = f"  {row} | "
    line = text.split("\n")[row - 1].rstrip("\r")
    blank = "".join(char if char == "\t" else " " for char in line[: column - 1])
    return f"\n{start}{line}\n{' ' * len(start)}{blank}^"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _suggestion(names: Collection[str], of: str = "") -> str:
    return f"did you mean {' or '.join(map(repr, names))}{of}?" if names else ""


def _leaves(value: Any) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if isinstance(inner, Mapping):
            yield from _leaves(inner)
        else:
            yield str(key)


def _paths(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings, without those of tables by name."""
    for key, kind in field_types(section).items():
        yield f"{prefix}{key}"
        for inner in structs_of(kind):
            if tag := inner.__struct_config__.tag_field:
                yield f"{prefix}{key}.{tag}"
            yield from _paths(inner, f"{prefix}{key}.")
