"""The infrastructure settings: learner (trains), engine (serves the policy), runner (runs agents).

A table of several kinds has one class per kind, named by its tag (`kind` or `executor`), with only
the settings that this kind reads. Their base has those that all read.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from agentrl.access import Access, read_key
from agentrl.config.base import (
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

ENGINES = ("embedded", "vllm")
LEARNERS = ("torch", "verl")


class VerlConfig(Section, frozen=True):
    """Where verl's workers run, for `learner.kind = "verl"`."""

    address: str = ""  # of a Ray cluster; empty: one is started here
    nodes: Count = 1  # machines of the cluster that train
    gpus_per_node: Count = 1  # one worker on each
    attention: Literal["flash_attention_2", "sdpa"] = "flash_attention_2"  # sdpa: rows are padded
    offload: bool = False  # weights and optimizer state to the host between calls
    timeout: Seconds = 1800.0  # of one call: an update, or loading the model
    # verl's own settings of its model, engine and optimizer, by part: any key that it knows and no
    # setting of agentrl decides, such as engine = {ulysses_sequence_parallel_size = 2}.
    options: dict[Literal["model", "engine", "optimizer"], dict[str, Any]] = {}


class LearnerConfig(KindSection, frozen=True, tag_field="kind"):
    """Settings of every learner."""

    token_budget: Count = 4096  # tokens forwarded at once; gradients of all are summed
    gradient_checkpointing: bool = False  # recompute activations: less memory, more time
    # Common prefixes of branches are computed once (trie) or again for each (rows). auto: trie, but
    # rows with verl
    packing: Literal["auto", "rows", "trie"] = "auto"

    @property
    def packed(self) -> Literal["rows", "trie"]:
        """How models in the algorithm process pack their rows."""
        return "trie" if self.packing == "auto" else self.packing


class TorchLearnerConfig(LearnerConfig, frozen=True, tag="torch"):
    """Training in the algorithm process."""

    fp32_head: bool = False  # logits of a bfloat16 policy in float32
    # of 8 bits: moments in a quarter of the memory, on CUDA
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = "adamw"
    threads: Natural = 0  # 0: all cores, or one where a measurement finds that faster
    # The optimizer's state is in host memory between updates, and the GPU memory of the update is
    # free for a policy server on the same GPU.
    offload: bool = False

    def __post_init__(self) -> None:
        if self.offload and self.optimizer == "paged_adamw8bit":
            raise ValueError(
                "learner.offload: a paged optimizer moves its state itself; leave it out"
            )


class VerlLearnerConfig(LearnerConfig, frozen=True, tag="verl"):
    """Training by verl's workers, on many GPUs."""

    verl: VerlConfig = VerlConfig()


class ExternalLearnerConfig(LearnerConfig, frozen=True, kw_only=True, tag=EXTERNAL):
    """A learner of the user's."""

    factory: str  # "file.py:name", "package.module:name" or the name of an entry point
    options: dict[str, Any] = {}  # any keys, for the factory


Learner = TorchLearnerConfig | VerlLearnerConfig | ExternalLearnerConfig


OF_A_CHILD: tuple[tuple[str, object], ...] = (
    ("arguments", []), ("tool_parser", "hermes"), ("gpu_memory", 0.0), ("sleep", 0),
)  # fmt: skip


class VllmConfig(Section, frozen=True):
    """A vLLM child process, or servers that run already, for `engine.kind = "vllm"`."""

    urls: list[str] = []  # http://HOST:PORT of servers that run already; none: a child process
    key_env: str = ""  # environment variable with the API key of those servers, if they have one
    start_timeout: Seconds = 300.0  # until it must answer
    timeout: Seconds = 60.0  # for calls in flight to end before an update, and for the update
    # How new weights are transferred; auto: the fastest way that works here.
    sync: Literal["auto", "adapter", "ipc", "nccl", "shared_memory", "reload"] = "auto"
    max_adapters: Count = 8  # that a child serves at once, frozen ones too
    # Share of the GPU's memory that a child takes; 0: what the learner leaves, by its model.
    gpu_memory: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    # During updates a child frees its GPU memory. 1: its weights wait in host memory; 2: they are
    # dropped and sent anew, which takes no host memory; 0: it keeps all.
    sleep: Literal[0, 1, 2] = 0
    tolerance: NonNegative = 0.0  # of log-probs after an update; 0: 1e-3, or 0.1 in bfloat16
    tool_parser: str = "hermes"  # of vLLM, for the model's format of tool calls
    arguments: list[str] = []  # more arguments of `vllm serve`

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"engine.vllm.urls = {url!r}: give it as http://HOST:PORT")
        for name, default in OF_A_CHILD:
            if self.urls and getattr(self, name) != default:
                raise ValueError(
                    f"engine.vllm.{name} is for a vLLM child, and engine.vllm.urls are servers that"
                    " run already; start those with it"
                )


class EngineConfig(KindSection, frozen=True, tag_field="kind"):
    """Settings of every policy server."""

    host: str = "127.0.0.1"  # where it listens, and where runners call it
    port: Port = 0  # 0: any free one
    advertise: str = ""  # the address by which runners elsewhere call it, where that is not `host`
    # Environment variable with the keys of which callers must send one, separated by spaces;
    # runners send the first. Empty: anybody who can connect, which is then this machine alone.
    key_env: str = ""
    ssl_certfile: str = ""  # PEM, for https; SSL_CERT_FILE names its authority to the runners
    ssl_keyfile: str = ""  # PEM, of the key of that certificate
    max_batch: Count = 64  # calls decoded together
    max_context: Count = 2048  # tokens of prompt and completion
    threads: Count = 1  # of the CPU that the embedded engine decodes with
    # Keys and values of calls that run while their weights change, with algorithm.overlap =
    # "in_flight". recompute: log-probs are exactly those of a version. keep: faster.
    keys: Literal["recompute", "keep"] = "recompute"

    def __post_init__(self) -> None:
        if self.host in ("0.0.0.0", "::") and not self.advertise:
            raise ValueError(
                f"engine.host = {self.host!r} listens everywhere and is no address that a runner "
                "could call; set engine.advertise to this machine's"
            )
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ValueError("engine.ssl_certfile and engine.ssl_keyfile belong together")

    @property
    def access(self) -> Access:
        """Raises ConfigError where the environment lacks the key."""
        keys = read_key(self.key_env, "engine.key_env", "the policy server's").split()
        return Access(tuple(keys), self.ssl_certfile, self.ssl_keyfile)


class EmbeddedEngineConfig(EngineConfig, frozen=True, tag="embedded"):
    """A policy server in the algorithm process."""


class VllmEngineConfig(EngineConfig, frozen=True, tag="vllm"):
    """vLLM beside the algorithm process."""

    vllm: VllmConfig = VllmConfig()


class ExternalEngineConfig(EngineConfig, frozen=True, kw_only=True, tag=EXTERNAL):
    """A policy server of the user's."""

    factory: str  # "file.py:name", "package.module:name" or the name of an entry point
    options: dict[str, Any] = {}  # any keys, for the factory


Engine = EmbeddedEngineConfig | VllmEngineConfig | ExternalEngineConfig


class PoolConfig(Section, frozen=True):
    """Warm processes, for `executor = "pool"`."""

    processes: Natural = 0  # 0: one for each core
    rollouts: Count = 1  # at a time in one process
    recycle_after: Count = 1000  # rollouts of a process until it is replaced
    recycle_mb: Natural = 0  # resident size after a rollout at which a process ends; 0: any
    start: Literal["fork", "spawn"] = "fork"  # fork: import the agent once; spawn: in each process


class ContainerConfig(Section, frozen=True):
    """A container for each rollout, for `executor = "container"`."""

    image: str  # that holds the agent
    network: str = ""  # of `docker run`; with "host" the gateway's loopback address is reached
    options: list[str] = []  # more arguments of `docker run`
    cli: str = "docker"  # or podman


class KubernetesConfig(Section, frozen=True):
    """A Job for each rollout, for `executor = "kubernetes"`."""

    image: str = ""  # that holds the agent; default: that of the template
    namespace: str = "default"  # of the Jobs
    context: str = ""  # of the kubeconfig; default: its current one, or that of the own pod
    template: str = ""  # YAML or JSON file of a Job to add to, relative to the run file
    ttl: Natural = 300  # seconds a finished Job is kept


EXECUTORS = ("auto", "async", "threads", "pool", "command", "container", "kubernetes")


class RunnerConfig(Section, frozen=True, tag_field="executor", tag="auto"):
    """Settings of runners with every executor. auto: command if the agent is one, else async."""

    processes: Natural = 1  # 0: runners are started elsewhere
    concurrency: Count = 64  # rollouts at a time in one process, of which agents run
    prepare: Natural = 0  # more rollouts that are claimed, and whose workspaces are made, ahead
    # Rollouts that are scored at a time beside those that run; should the runner die, the next one
    # only scores them. 0: each is scored in the place in which it ran.
    score: Natural = 0
    lease: Seconds = 15.0  # without a heartbeat, until a rollout is given to another runner
    drain: NonNegative = 5.0  # seconds that rollouts have to finish when their runner is stopped
    memory_mb: Natural = 0  # of one process (pool, command) or of all of a rollout; 0: no limit
    host: str = "127.0.0.1"  # where the gateway listens
    port: Port = 0  # of the gateway; 0: any free one
    advertise: str = ""  # how a container or a job calls the gateway's host
    framework_spans: bool = False  # record steps by OpenInference, with inputs and outputs: slower

    @property
    def executor(self) -> str:
        return kind_of(self)


class AsyncRunnerConfig(RunnerConfig, frozen=True, tag="async"):
    """The agent runs in the runner's event loop."""


class ThreadsRunnerConfig(RunnerConfig, frozen=True, tag="threads"):
    """The agent runs in threads of the runner."""


class CommandRunnerConfig(RunnerConfig, frozen=True, tag="command"):
    """`agent.command` runs as a process for each rollout."""


class PoolRunnerConfig(RunnerConfig, frozen=True, tag="pool"):
    """The agent runs in warm processes."""

    pool: PoolConfig = PoolConfig()


class ContainerRunnerConfig(RunnerConfig, frozen=True, kw_only=True, tag="container"):
    """The agent runs in a container for each rollout."""

    container: ContainerConfig  # its image and how it is started


class KubernetesRunnerConfig(RunnerConfig, frozen=True, tag="kubernetes"):
    """The agent runs in a Job for each rollout."""

    kubernetes: KubernetesConfig = KubernetesConfig()


class ExternalRunnerConfig(RunnerConfig, frozen=True, kw_only=True, tag=EXTERNAL):
    """An executor of the user's."""

    factory: str  # "file.py:name", "package.module:name" or the name of an entry point
    options: dict[str, Any] = {}  # any keys, for the factory


Runner = (
    RunnerConfig
    | AsyncRunnerConfig
    | ThreadsRunnerConfig
    | CommandRunnerConfig
    | PoolRunnerConfig
    | ContainerRunnerConfig
    | KubernetesRunnerConfig
    | ExternalRunnerConfig
)


class SessionsConfig(Section, frozen=True):
    """What `agentrl gateway serve` records of a deployed agent."""

    header: str = "x-session-id"  # names the session of a request, where it is sent
    # Where it is not: the conversation that a request goes on with, or all requests of a key.
    by: Literal["conversation", "key"] = "conversation"
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # share of sessions that are recorded
    idle: Seconds = 1800.0  # without a call, until a session has ended
    timeout: Seconds = 600.0  # of one call
    # Regular expressions; what they match is stored as [redacted], without the tokens of the call.
    redact: list[str] = []
    # Environment variable with the keys that callers may send, as a bearer token or x-api-key,
    # separated by spaces. Empty: anybody who can connect, which is then this machine alone.
    key_env: str = ""

    def __post_init__(self) -> None:
        for pattern in self.redact:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"redact has {pattern!r}: {error}") from None
