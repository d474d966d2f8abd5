"""The run file: TOML into typed settings. An unknown key is an error with its path."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from agentrl.errors import ConfigError
from agentrl.sinks import SINKS, missing
from agentrl.store.urls import concealed
from agentrl.types import Sampling

Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all tables of the run file."""


class RetriesConfig(Section, frozen=True):
    """After which failures a rollout is tried again: when fewer than so many attempts came before,
    and never beyond `max_attempts`. None: as often as that allows."""

    agent_error: Natural | None = 0
    timeout: Natural | None = 0
    model_error: Natural | None = None
    verifier_error: Natural | None = 0
    lost_runner: Natural = 2  # by the sandbox; a runner that dies is bounded by `max_attempts`


class AgentConfig(Section, frozen=True):
    """The unmodified agent and how it is run: a Python object by `path`, or a `command`."""

    path: str = ""  # "file.py:name" or "package.module:name"
    command: str | list[str] = []  # in any language; a string is split as a shell would
    folder: str = ""  # where the command works; default: the run file's folder, or the image's
    env: dict[str, str] = {}  # the command's own variables
    pass_env: list[str] = []  # patterns of the runner's variables it sees, beside PATH and the like
    timeout: Seconds = 60.0  # for one attempt
    max_attempts: Count = 3  # tries at one rollout when the infrastructure fails
    retries: RetriesConfig = RetriesConfig()
    error_reward: float | None = None  # outcome when the agent itself raises; none: missing


class TasksConfig(Section, frozen=True):
    """Each a "file.jsonl", or a "file.py:name" that is an iterable of tasks or returns one."""

    train: str = ""
    heldout: str = ""
    # Of training: every task once an epoch, or drawn by how often it was solved, most often those
    # that are solved half of the time. Outcomes are taken to be from 0 to 1.
    order: Literal["shuffle", "difficulty"] = "shuffle"


class VerifierConfig(Section, frozen=True):
    path: str = ""  # "file.py:name"


class LoraConfig(Section, frozen=True):
    """A low-rank adapter is trained, the model stays as it is. The default scale is that of
    thinkingmachines.ai/blog/lora, which leaves the best learning rate independent of the rank."""

    rank: Natural = 0  # 0: no adapter, all weights are trained
    alpha: Positive = 32.0  # what the adapter adds is scaled by alpha / rank
    targets: list[str] = []  # names of linear layers, such as "q_proj"; default: all but the head
    adapter: str = ""  # directory of an adapter to start from; default: one that changes nothing


class PolicyConfig(Section, frozen=True):
    """The model to train: a Hugging Face checkpoint directory or hub name."""

    model: str = ""  # default with `build`: <output>/policy
    build: str = ""  # "file.py:name": called as (directory, seed) to make `model` if it is absent
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    lora: LoraConfig = LoraConfig()


class BranchingConfig(Section, frozen=True):
    """Rollouts that repeat the first calls of those of a group and are sampled from there, asked
    for when these have ended.

    mc: from the state before each call of every rollout. tree: from the calls of the group where
    the policy is least certain."""

    kind: Literal["none", "mc", "tree"] = "none"
    width: Count = 1  # branches from each of them
    calls: Natural = 0  # at most so many, the least certain: of each rollout (mc), of the group

    def __post_init__(self) -> None:
        if self.kind == "none" and (self.width, self.calls) != (1, 0):
            raise ValueError("width and calls mean nothing without kind = 'mc' or 'tree'")
        if self.kind == "tree" and not self.calls:
            raise ValueError("kind = 'tree' needs to know from how many `calls` of a group")


class AlgorithmConfig(Section, frozen=True):
    """What is learned from a batch. `options` are the preset's own arguments."""

    preset: str = "grpo"
    options: dict[str, Any] = {}
    groups: Count = 8  # per step
    group_size: Count = 8
    min_group: Count = 2  # valid rollouts below which a group is dropped
    inexact: Literal["refuse", "retokenize"] = "refuse"  # calls whose token ids are unknown
    max_staleness: Natural = 0  # steps that may be asked for ahead of the update
    dynamic_sampling: bool | None = None  # replace groups that teach nothing; none: as the preset
    max_rounds: Count | None = None  # in which they are; then the step does with fewer. Default 10
    store_credit: bool = True  # advantages, baselines and gates with each step, for `explain`
    minibatches: Count = 1  # optimizer steps a batch is split into
    epochs: Count = 1  # passes over a batch
    lr: Positive = 1e-6
    warmup: Natural = 0  # steps of linear learning-rate warm-up
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after it
    min_lr: NonNegative = 0.0  # at the end of a linear or cosine schedule
    target_kl: Positive | None = None  # nats by which a batch moves the policy; then no more steps
    max_bad_steps: Count = 3  # optimizer steps in a row that are not finite, until the run ends
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    branching: BranchingConfig = BranchingConfig()


class CriticConfig(Section, frozen=True):
    """What gives the values that a preset such as ppo reads."""

    # "shared": a head on the policy's hidden states; "copy": a model of its own that begins as the
    # policy did; or a checkpoint directory or hub name of one with its vocabulary. Empty: none.
    model: str = ""
    lr: Positive = 1e-5  # constant; of a shared critic: that of its head
    coefficient: Positive = 0.5  # of the value loss beside the policy's, for a shared one
    clip: Positive = 0.2  # how far a value may move in one step, value clipping; inf: any
    weight_decay: NonNegative = 0.0


class ReferenceConfig(Section, frozen=True):
    """What a penalty on leaving the reference is about."""

    # A checkpoint directory or hub name; empty: what the policy begins as, or for an adapter the
    # model without it.
    model: str = ""
    every: Natural = 0  # steps after which the policy as it is becomes the reference; 0: never
    target: NonNegative = 0.0  # nats per token: adapts the penalty to keep their KL there; 0: fixed
    horizon: Count = 10_000  # rollouts over which it adapts


class TeacherConfig(Section, frozen=True):
    """Whom the preset distill imitates."""

    model: str = ""  # a checkpoint directory or hub name with the policy's vocabulary


class RewardModelConfig(Section, frozen=True):
    """A model whose scores are rewards, under its name."""

    model: str  # a checkpoint directory or hub name with the policy's vocabulary
    # scalar: a decoder with a head of one label; implicit: a decoder, of which it is beta * (log
    # probability - that of the reference) that is the reward
    kind: Literal["scalar", "implicit"] = "scalar"
    scope: Literal["rollout", "transition"] = "rollout"  # a reward of the rollout, or of each call
    beta: Positive = 0.05  # of an implicit one
    reference: str = ""  # of an implicit one; empty: what the policy begins as
    train: bool = False  # an implicit one learns from every step, once it has scored it
    # from outcomes from 0 to 1 (PRIME), or from pairs of rollouts of a group (iStar)
    loss: Literal["outcome", "pairs"] = "outcome"
    lr: Positive = 1e-6  # constant, where it learns


class VerlConfig(Section, frozen=True):
    """Where verl's workers run, for `learner.kind = "verl"`."""

    address: str = ""  # of a Ray cluster; empty: one is started here
    nodes: Count = 1
    gpus_per_node: Count = 1  # one worker on each
    attention: Literal["flash_attention_2", "sdpa"] = "flash_attention_2"  # sdpa: rows are padded
    offload: bool = False  # weights and moments to the host between calls
    timeout: Seconds = 1800.0  # of one call: an update, or loading the model


class LearnerConfig(Section, frozen=True):
    kind: Literal["torch", "verl"] = "torch"  # in one process, or verl's workers on many GPUs
    token_budget: Count = 4096  # tokens forwarded at once; gradients of all are summed
    gradient_checkpointing: bool = False  # recompute activations: less memory, more time
    fp32_head: bool = False  # logits of a bfloat16 policy in float32
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = "adamw"
    # What branches have in common: again, or once; verl has rows only.
    packing: Literal["rows", "trie"] = "trie"
    threads: Natural = 0  # 0: all cores
    verl: VerlConfig = VerlConfig()


class VllmConfig(Section, frozen=True):
    """A vLLM child process, or servers that run already, for `engine.kind = "vllm"`."""

    urls: list[str] = []  # http://host:port of servers that run already; none: a child process
    key_env: str = ""  # environment variable with the API key of those servers, if they have one
    start_timeout: Seconds = 300.0  # until it must answer
    timeout: Seconds = 60.0  # for calls in flight to end before an update, and for the update
    tolerance: NonNegative = 0.0  # of log-probs after an update; 0: 1e-3, in bfloat16 0.1
    tool_parser: str = "hermes"
    arguments: list[str] = []  # more arguments of `vllm serve`


class EngineConfig(Section, frozen=True):
    """The policy server."""

    kind: Literal["embedded", "vllm"] = "embedded"  # in the learner's process, or beside it
    host: str = "127.0.0.1"
    port: Port = 0  # 0: any free one
    max_batch: Count = 64  # calls decoded together
    max_context: Count = 2048  # tokens of prompt and completion
    threads: Count = 1
    vllm: VllmConfig = VllmConfig()


class PoolConfig(Section, frozen=True):
    """Warm processes, for `executor = "pool"`."""

    processes: Natural = 0  # 0: one for each core
    rollouts: Count = 1  # at a time in one process
    recycle_after: Count = 1000  # rollouts of a process until it is replaced
    recycle_mb: Natural = 0  # resident size after a rollout that ends a process; 0: any
    start: Literal["fork", "spawn"] = "fork"  # fork: import once and for all; spawn: in each


class ContainerConfig(Section, frozen=True):
    """A container for each rollout, for `executor = "container"`."""

    image: str = ""
    network: str = ""  # of `docker run`; with "host" the gateway's loopback address is reached
    options: list[str] = []  # more arguments of `docker run`
    cli: str = "docker"  # or podman


class KubernetesConfig(Section, frozen=True):
    """A Job for each rollout, for `executor = "kubernetes"`."""

    image: str = ""
    namespace: str = "default"
    context: str = ""  # of the kubeconfig; default: its current one, or that of the own pod
    template: str = ""  # YAML or JSON file of a Job that is completed, relative to the run file
    ttl: Natural = 300  # seconds a finished Job is kept


class RunnerConfig(Section, frozen=True):
    executor: Literal["auto", "async", "threads", "pool", "command", "container", "kubernetes"] = (
        "auto"  # auto: command if the agent is one, else async
    )
    processes: Natural = 1  # 0: runners are started elsewhere
    concurrency: Count = 64  # rollouts at a time in one process
    lease: Seconds = 15.0  # without a heartbeat until a rollout is given to another runner
    drain: NonNegative = 5.0  # seconds a runner told to stop lets its rollouts finish
    memory_mb: Natural = 0  # of one process (pool, command) or of all of a rollout; 0: no limit
    host: str = "127.0.0.1"  # where the gateway listens
    port: Port = 0  # of the gateway; 0: any free one
    advertise: str = ""  # how a container or a job calls the gateway's host
    pool: PoolConfig = PoolConfig()
    container: ContainerConfig = ContainerConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    framework_spans: bool = False  # record steps by OpenInference, with inputs and outputs: slower


class UpstreamConfig(Section, frozen=True):
    """An endpoint that answers calls and is not trained: a judge, an opponent, a tool's model."""

    base_url: Annotated[str, msgspec.Meta(pattern=r"^https?://")]  # ends in /v1
    model: str = ""  # the name it answers to; empty: the one the agent asks for
    key_env: str = ""  # environment variable of the runner that holds its API key


class EvalConfig(Section, frozen=True):
    """Held-out evaluations before and after training, and every so many steps between."""

    every: Natural = 0  # steps; 0: only before and after
    tasks: Natural = 0  # before and after; 0: all held-out tasks
    curve_tasks: Natural = 64  # in the evaluations between; 0: all
    sampled: bool = True  # before and after, also at temperature 1
    temperature: NonNegative = 0.0  # everything else is sampled as in training


class MetricsConfig(Section, frozen=True):
    """Where metrics go besides the store. Each sink is an extra: `pip install 'agentrl[wandb]'`."""

    sinks: list[str] = []  # tensorboard, wandb, mlflow, trackio
    project: Annotated[str, msgspec.Meta(min_length=1)] = "agentrl"  # there; MLflow's experiment


class RunConfig(Section, frozen=True):
    """One training job. Files are looked up in `root`, the run file's folder; what the run writes
    goes to `output`, relative to the working directory."""

    name: Name = "run"
    root: str = "."
    output: str = ""  # folder of store, checkpoints and figures; default runs/<name>
    store: str = ""  # store URL; default: SQLite in the output folder
    seed: Natural = 0
    steps: Natural = 100
    keep_checkpoints: Count = 2
    agent: AgentConfig = AgentConfig()
    tasks: TasksConfig = TasksConfig()
    verifier: VerifierConfig = VerifierConfig()
    policy: PolicyConfig = PolicyConfig()
    sampling: Sampling = Sampling()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    reward_models: dict[Name, RewardModelConfig] = {}  # by the name of their reward
    learner: LearnerConfig = LearnerConfig()
    engine: EngineConfig = EngineConfig()
    runner: RunnerConfig = RunnerConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    upstreams: dict[Name, UpstreamConfig] = {}  # by name, which is a model name for the agent too
    roles: dict[str, str] = {}  # role -> the upstream that answers it, or "policy"

    def path(self, name: str) -> Path:
        """A file named in the run file, relative to its folder."""
        return Path(self.root, name)


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
    _check_keys(RunConfig, data, prefix="", source=source)
    try:
        config = msgspec.convert(data, RunConfig)
    except msgspec.ValidationError as error:
        message = str(error).replace("`$.", "`").replace("`$`", "the top level")
        raise ConfigError(f"{source}: {message}") from None
    _check_roles(config, source)
    _check_lora(config.policy.lora, source)
    _check_schedule(config.algorithm, source)
    _check_sinks(config.metrics.sinks, source)
    _check_engine(config.engine, source)
    _check_learner(config.learner, source)
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
    placement = ("learner.kind", "learner.verl.")
    before, after = (flatten(msgspec.to_builtins(config)) for config in (old, new))
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if key.split(".")[0] not in ignored
        and not key.startswith(placement)
        and before.get(key) != after.get(key)
    ]


def nearest(name: str, valid: Iterable[str]) -> str:
    """ "; did you mean 'x'?" or the list of what is valid."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(names)}"


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


def _check_roles(config: RunConfig, source: str) -> None:
    known = {*config.upstreams, "policy"}
    for role, target in config.roles.items():
        if target not in known:
            raise ConfigError(f"{source}: roles.{role} = {target!r}; {nearest(target, known)}")
    if "policy" in config.upstreams:
        raise ConfigError(f"{source}: [upstreams.policy]: that is the trained policy's name")


def _check_engine(engine: EngineConfig, source: str) -> None:
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


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else msgspec.json.encode(key).decode()


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return msgspec.json.encode(value).decode() if isinstance(value, str) else repr(value)
