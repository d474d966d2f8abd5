"""Infrastructure settings: learner (trains), engine (serves the policy), runner (runs agents), and
where metrics go.

A table with several kinds has one class per kind, selected by its tag (`kind` or `executor`), with
only the settings of this kind. Their base class has the settings of all kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from agentrl.core.access import Access, read_key
from agentrl.core.config.base import (
    EXTERNAL,
    Count,
    KindSection,
    Natural,
    NonNegative,
    Port,
    Seconds,
    Section,
    kind_of,
)
from agentrl.core.errors import install_command, nearest
from agentrl.core.loading import is_installed
from agentrl.core.plugins import BUILT_IN, plugin_points

if TYPE_CHECKING:
    from agentrl.core.config.schema import RunConfig


ENGINES = ("embedded",)
Computed = Literal["top_tokens", "entropy", "observations"]


class LearnerConfig(KindSection, frozen=True, tag_field="kind"):
    """Settings of every learner."""

    # Keys that a started run may change.
    placement: ClassVar[tuple[str, ...]] = ("packing", "offload")
    # What it computes besides log-probs of sampled tokens, if known before the learner is made.
    computes: ClassVar[frozenset[Computed]] = frozenset({"top_tokens", "entropy", "observations"})
    adapts_experts: ClassVar[bool] = False  # Whether adapters may be on a mixture's experts.

    token_budget: Count = 4096  # tokens per forward pass; gradients accumulate over passes
    # Whether activations are recomputed: less memory, more time.
    gradient_checkpointing: bool = False
    # Compute common prefixes of branches once (trie) or for each branch (rows). auto: trie, where
    # the learner has it
    packing: Literal["auto", "rows", "trie"] = "auto"
    # Keep the optimizer state, and verl's weights, in host memory between updates, and free the
    # update's GPU memory for a policy server on the same GPU.
    offload: bool = False

    @property
    def packed(self) -> Literal["rows", "trie"]:
        """How models in the algorithm process pack rows."""
        return "trie" if self.packing == "auto" else self.packing


class TorchLearnerConfig(LearnerConfig, frozen=True, tag="torch"):
    """Training in the algorithm process."""

    adapts_experts: ClassVar[bool] = True

    fp32_head: bool = False  # Whether logits of a bfloat16 policy are computed in float32.
    # Whether Liger Kernel computes norms and gated activations, on a GPU: faster, less memory.
    liger_kernel: bool = False
    # Optimizer; those of 8 bits keep moments in a quarter of the memory, and need CUDA.
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = "adamw"
    # Threads of training; 0: all cores, or one if a measurement shows that it is faster.
    threads: Natural = 0

    def __post_init__(self) -> None:
        if self.offload and self.optimizer == "paged_adamw8bit":
            raise ValueError(
                "learner.offload: a paged optimizer moves its state itself; remove learner.offload"
            )


class VerlConfig(Section, frozen=True):
    """Settings of verl's workers, for `learner.kind = "verl"`. They run on the Ray cluster whose
    address is in RAY_ADDRESS, or else on one of this machine alone."""

    nodes: Count = 1  # machines of the cluster that train
    gpus_per_node: Count = 1  # GPUs of a machine, each with one worker.
    # Implementation of attention; sdpa pads rows.
    attention: Literal["flash_attention_2", "sdpa"] = "flash_attention_2"
    # Settings of verl for its model, engine and optimizer, by part: any key that no setting of
    # agentrl determines, such as engine = {ulysses_sequence_parallel_size = 2}.
    options: dict[Literal["model", "engine", "optimizer"], dict[str, Any]] = {}


class VerlLearnerConfig(LearnerConfig, frozen=True, tag="verl"):
    """Training with verl's workers, on many GPUs."""

    packages = ("verl", "ray", "flash-attn")
    placement = ("packing", "offload", "verl.")
    computes = frozenset()

    verl: VerlConfig = VerlConfig()

    @property
    def lacking(self) -> str:
        if self.verl.attention == "sdpa" or find_spec("flash_attn"):
            return ""
        return "no flash attention; set learner.verl.attention=sdpa, or install flash-attn"


class ExternalLearnerConfig(LearnerConfig, frozen=True, kw_only=True, tag=EXTERNAL):
    """A custom learner."""

    factory: str  # "file.py:name", "package.module:name" or the name of an entry point
    options: dict[str, Any] = {}  # Arguments of the factory, with any keys.


class EngineConfig(KindSection, frozen=True, tag_field="kind"):
    """Settings of every policy server."""

    serves_images: ClassVar[bool] = False  # Whether the messages of calls may have images.
    host: str = "127.0.0.1"  # address on which it listens and at which runners call it
    port: Port = 0  # Port on which it listens; 0: any free one.
    advertise: str = ""  # address for runners on other machines, if not `host`
    # Environment variable with the API keys that callers may send, separated by spaces; runners
    # send the first. Empty: no keys, which is allowed only on this machine's loopback address.
    key_env: str = ""
    ssl_certfile: str = ""  # PEM certificate for https; runners find its CA in SSL_CERT_FILE
    ssl_keyfile: str = ""  # PEM key of that certificate
    max_batch: Count = 64  # calls decoded together
    # Tokens of prompt and completion. The KV cache may hold max_batch calls of that length, which
    # are 1.6 GB by default, for a model like Qwen2.5-0.5B in bfloat16.
    max_context: Count = 2048
    # CPU threads of the embedded engine. 0: one for a model of at most 5 million parameters, else
    # the largest power of two of the cores, at most 8.
    threads: Natural = 0

    def __post_init__(self) -> None:
        if self.host in ("0.0.0.0", "::") and not self.advertise:
            raise ValueError(
                f"engine.host = {self.host!r} listens on all interfaces and is not an address that "
                "runners can call; set engine.advertise to this machine's address"
            )
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ValueError("engine.ssl_certfile and engine.ssl_keyfile belong together")

    @property
    def frees_gpu(self) -> bool:
        """Whether the server gives its GPU memory to the learner during updates."""
        return False

    @property
    def single_model_setting(self) -> str:
        """The setting that limits it to a single model; empty: none does."""
        return ""

    @property
    def serves_only_adapters(self) -> bool:
        """Whether further versions of a policy can be served only as adapters."""
        return False

    @property
    def serves_adapted_experts(self) -> bool:
        """Whether it serves policies with adapters on the experts of a mixture."""
        return False

    @property
    def sent_keys(self) -> dict[str, str]:
        """Environment variables with keys that this machine sends, by their setting."""
        return {}

    @property
    def access(self) -> Access:
        """Keys and certificate. Raises ConfigError if the environment has no key."""
        keys = read_key(self.key_env, "engine.key_env", "the policy server's").split()
        return Access(tuple(keys), self.ssl_certfile, self.ssl_keyfile)


class EmbeddedEngineConfig(EngineConfig, frozen=True, tag="embedded"):
    """A policy server in the algorithm process."""

    serves_images: ClassVar[bool] = True

    @property
    def serves_adapted_experts(self) -> bool:
        return True


CHILD_ONLY: tuple[tuple[str, object], ...] = (
    ("arguments", []), ("gpu_memory", 0.0), ("sleep", 0),
)  # fmt: skip


class VllmConfig(Section, frozen=True):
    """A vLLM child process or running vLLM servers, for `engine.kind = "vllm"`."""

    urls: list[str] = []  # Running servers as http://HOST:PORT; none: start a child process.
    key_env: str = ""  # environment variable with the API key of those servers, if they have one
    # How new weights are transferred; auto: the fastest method that works here.
    sync: Literal["auto", "adapter", "ipc", "nccl", "shared_memory", "reload"] = "auto"
    # Fraction of the GPU's memory for a child; 0: what the learner leaves, estimated by model size.
    gpu_memory: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    # Sleep mode of vLLM: free the child's GPU memory during updates. 1: keep its weights in host
    # memory; 2: drop its weights and send them again, without host memory; 0: off.
    sleep: Literal[0, 1, 2] = 0
    arguments: list[str] = []  # additional arguments of `vllm serve`

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"engine.vllm.urls = {url!r}: give it as http://HOST:PORT")
        for name, default in CHILD_ONLY:
            if self.urls and getattr(self, name) != default:
                raise ValueError(
                    f"engine.vllm.{name} is for a vLLM child, but engine.vllm.urls are servers that"
                    " run already; set it when you start them"
                )


class VllmEngineConfig(EngineConfig, frozen=True, tag="vllm"):
    """A vLLM policy server."""

    packages = ("vllm",)
    serves_images: ClassVar[bool] = True

    vllm: VllmConfig = VllmConfig()

    @property
    def frees_gpu(self) -> bool:
        return self.vllm.sleep > 0

    @property
    def single_model_setting(self) -> str:
        return "engine.vllm.urls" if self.vllm.urls else ""

    @property
    def serves_only_adapters(self) -> bool:
        return True

    @property
    def serves_adapted_experts(self) -> bool:
        return self.vllm.sync not in ("auto", "adapter")  # it gets them merged into the weights

    @property
    def sent_keys(self) -> dict[str, str]:
        return {"engine.vllm": self.vllm.key_env}

    def problems(self, config: RunConfig) -> Iterator[str]:
        overlap, sleep = config.algorithm.async_sampling, self.vllm.sleep
        if sleep and overlap == "in_flight":
            yield (
                "engine.vllm.sleep: set algorithm.async_sampling to 'drained'; a sleeping vLLM "
                "answers no calls"
            )
        if sleep == 2 and config.policy.lora.rank:
            yield (
                "engine.vllm.sleep = 2 drops weights that policy.lora never sends again; set it to "
                "1"
            )


class ExternalEngineConfig(EngineConfig, frozen=True, kw_only=True, tag=EXTERNAL):
    """A custom policy server."""

    factory: str  # "file.py:name", "package.module:name" or the name of an entry point
    options: dict[str, Any] = {}  # Arguments of the factory, with any keys.


EXECUTORS = ("auto", "async", "threads")


class RunnerConfig(Section, frozen=True, tag_field="executor", tag="auto"):
    """Where agents run; auto: command if the agent is one, else async."""

    runs_paths: ClassVar[bool] = False  # whether agents are `agent.path` only
    runs_commands: ClassVar[bool] = False  # whether agents are programs only

    processes: Natural = 1  # Runner processes on this machine; 0: start none here.
    concurrency: Count = 64  # rollouts per process that run or are scored
    # Seconds without a heartbeat after which another runner gets the rollout.
    lease: Seconds = 15.0
    drain: NonNegative = 5.0  # seconds that rollouts have to finish when their runner is stopped
    # Memory in MB of one process (pool, command) or of a whole rollout; 0: no limit.
    memory_mb: Natural = 0
    host: str = "127.0.0.1"  # address on which the gateway listens
    port: Port = 0  # Port of the gateway; 0: any free one.
    advertise: str = ""  # address of the gateway's host for containers and Jobs

    @property
    def executor(self) -> str:
        return kind_of(self)


class AsyncRunnerConfig(RunnerConfig, frozen=True, tag="async"):
    """The agent runs in the runner's event loop."""

    runs_paths: ClassVar[bool] = True


class ThreadsRunnerConfig(RunnerConfig, frozen=True, tag="threads"):
    """The agent runs in threads of the runner."""

    runs_paths: ClassVar[bool] = True


class ContainerConfig(Section, frozen=True):
    """A container for each rollout, for `executor = "container"`."""

    image: str  # image with the agent and a shell, `sh`
    # Network of `docker run`. none: nothing but the gateway; bridge: the internet; host: this
    # machine's
    network: str = "none"
    options: list[str] = []  # additional arguments of `docker run`, such as "--cpus=2"
    # Program that runs containers: docker, podman or a compatible one; default: the first of the
    # two that works.
    cli: str = ""


class KubernetesConfig(Section, frozen=True):
    """A Job for each rollout, for `executor = "kubernetes"`."""

    image: str = ""  # image with the agent; default: the template's
    template: str = ""  # YAML or JSON file of a Job to start from, relative to the run file


class ContainerRunnerConfig(RunnerConfig, frozen=True, kw_only=True, tag="container"):
    """The agent runs in a container for each rollout."""

    runs_commands: ClassVar[bool] = True

    container: ContainerConfig  # image and options


class KubernetesRunnerConfig(RunnerConfig, frozen=True, tag="kubernetes"):
    """The agent runs in a Job for each rollout."""

    runs_commands: ClassVar[bool] = True

    kubernetes: KubernetesConfig = KubernetesConfig()


class PoolConfig(Section, frozen=True):
    """Warm processes, for `executor = "pool"`."""

    processes: Natural = 0  # Processes; 0: one per core.
    rollouts: Count = 1  # concurrent rollouts per process
    # Start of processes. fork: import the agent once; spawn: in each process.
    start: Literal["fork", "spawn"] = "fork"


class CommandRunnerConfig(RunnerConfig, frozen=True, tag="command"):
    """`agent.command` runs in a process for each rollout."""

    runs_commands: ClassVar[bool] = True


class PoolRunnerConfig(RunnerConfig, frozen=True, tag="pool"):
    """The agent runs in warm processes."""

    runs_paths: ClassVar[bool] = True

    pool: PoolConfig = PoolConfig()


class ExternalRunnerConfig(RunnerConfig, frozen=True, kw_only=True, tag=EXTERNAL):
    """A custom executor."""

    factory: str  # "file.py:name", "package.module:name" or the name of an entry point
    options: dict[str, Any] = {}  # Arguments of the factory, with any keys.


Learner = TorchLearnerConfig | VerlLearnerConfig | ExternalLearnerConfig
Engine = EmbeddedEngineConfig | VllmEngineConfig | ExternalEngineConfig
Runner = (
    RunnerConfig
    | AsyncRunnerConfig
    | ThreadsRunnerConfig
    | ContainerRunnerConfig
    | KubernetesRunnerConfig
    | CommandRunnerConfig
    | PoolRunnerConfig
    | ExternalRunnerConfig
)


class MetricsConfig(Section, frozen=True):
    """Sinks of metrics besides the store. Each is an extra: `pip install '.[wandb]'` in a clone."""

    # Sinks besides the store: tensorboard, wandb, mlflow, trackio, or your own as "file.py:name"
    sinks: list[str] = []
    # Project, or in MLflow the experiment.
    project: Annotated[str, msgspec.Meta(min_length=1)] = "agentrl"

    def problems(self, config: RunConfig) -> Iterator[str]:
        available = plugin_points("sinks").names
        for name in self.sinks:
            if ":" not in name and name not in available:
                fix = f"{nearest(name, available)}, or your own as file.py:name"
                yield f"metrics.sinks: {name!r}; {fix}"
            if self.sinks.count(name) > 1:
                yield f"metrics.sinks names {name!r} twice"
        for name in self.sinks:
            if name in BUILT_IN["sinks"] and not is_installed(name):
                yield f"metrics.sinks: {name!r} is not installed: {install_command(name)}"
