"""The tables of the run file about by what a run is done, and where: what trains, what answers the
policy's calls, what runs the agents."""

from __future__ import annotations

from typing import Literal

from agentrl.config.base import Count, Natural, NonNegative, Port, Seconds, Section

ENGINES = ("embedded", "vllm")
LEARNERS = ("torch", "verl")


class VerlConfig(Section, frozen=True):
    """Where verl's workers run, for `learner.kind = "verl"`."""

    address: str = ""  # of a Ray cluster; empty: one is started here
    nodes: Count = 1
    gpus_per_node: Count = 1  # one worker on each
    attention: Literal["flash_attention_2", "sdpa"] = "flash_attention_2"  # sdpa: rows are padded
    offload: bool = False  # weights and moments to the host between calls
    timeout: Seconds = 1800.0  # of one call: an update, or loading the model


class LearnerConfig(Section, frozen=True):
    kind: str = "torch"  # in one process; verl: its workers on many GPUs; or your own: file.py:name
    token_budget: Count = 4096  # tokens forwarded at once; gradients of all are summed
    gradient_checkpointing: bool = False  # recompute activations: less memory, more time
    fp32_head: bool = False  # logits of a bfloat16 policy in float32
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = "adamw"
    # What branches have in common: again, or once. auto: trie; with verl rows, as it has no other
    packing: Literal["auto", "rows", "trie"] = "auto"
    threads: Natural = 0  # 0: all cores; of a small model one, where that is measured to be faster
    verl: VerlConfig = VerlConfig()

    @property
    def packed(self) -> Literal["rows", "trie"]:
        """By what computes in one process."""
        return "trie" if self.packing == "auto" else self.packing


class VllmConfig(Section, frozen=True):
    """A vLLM child process, or servers that run already, for `engine.kind = "vllm"`."""

    urls: list[str] = []  # http://host:port of servers that run already; none: a child process
    key_env: str = ""  # environment variable with the API key of those servers, if they have one
    start_timeout: Seconds = 300.0  # until it must answer
    timeout: Seconds = 60.0  # for calls in flight to end before an update, and for the update
    # How new weights get there; auto: the fastest way that there is.
    sync: Literal["auto", "adapter", "ipc", "nccl", "shared_memory", "reload"] = "auto"
    max_adapters: Count = 8  # that a child serves at once, frozen ones too
    tolerance: NonNegative = 0.0  # of log-probs after an update; 0: 1e-3, in bfloat16 0.1
    tool_parser: str = "hermes"
    arguments: list[str] = []  # more arguments of `vllm serve`


class EngineConfig(Section, frozen=True):
    """The policy server."""

    kind: str = "embedded"  # in the learner's process; vllm: beside it; or your own: file.py:name
    host: str = "127.0.0.1"  # where it listens, and where runners call it
    port: Port = 0  # 0: any free one
    advertise: str = ""  # the address by which runners elsewhere call it, where that is not `host`
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


EXECUTORS = ("auto", "async", "threads", "pool", "command", "container", "kubernetes")


class RunnerConfig(Section, frozen=True):
    # One of EXECUTORS, an entry point of the group agentrl.executors, or "file.py:name".
    executor: str = "auto"  # command if the agent is one, else async
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
