"""Infrastructure settings: learner (trains), engine (serves the policy), runner (runs agents).

A table with several kinds has one class per kind, selected by its tag (`kind` or `executor`), with
only the settings of this kind. Their base class has the settings of all kinds. Parts have further
kinds, which derive from it; `schema` has them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from agentrl.base.access import Access, read_key
from agentrl.base.parts import missing
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

ENGINES = ("embedded",)
Computed = Literal["top_tokens", "entropy"]


class LearnerConfig(KindSection, frozen=True, tag_field="kind"):
    """Settings of every learner."""

    placement: ClassVar[tuple[str, ...]] = ("packing",)  # keys that a started run may change
    # Besides log-probs of sampled tokens, as far as that is known before the learner is made.
    computes: ClassVar[frozenset[Computed]] = frozenset({"top_tokens", "entropy"})
    adapts_experts: ClassVar[bool] = False  # Whether adapters may be on a mixture's experts.

    token_budget: Count = 4096  # tokens per forward pass; gradients accumulate over passes
    # Whether activations are recomputed: less memory, more time.
    gradient_checkpointing: bool = False
    # Compute common prefixes of branches once (trie) or for each branch (rows). auto: trie, where
    # the learner has it
    packing: Literal["auto", "rows", "trie"] = "auto"

    @property
    def packed(self) -> Literal["rows", "trie"]:
        """How models in the algorithm process pack rows."""
        return "trie" if self.packing == "auto" else self.packing

    def derived(self, config: Any) -> str:
        """Comments below the settings on what the learner makes of them, for `--dry-run`. Raises
        ConfigError for those that it does not support."""
        return ""


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
    # Keep the optimizer state in host memory between updates, and free the update's GPU memory for
    # a policy server on the same GPU.
    offload: bool = False

    def __post_init__(self) -> None:
        if self.offload and self.optimizer == "paged_adamw8bit":
            raise ValueError(
                "learner.offload: a paged optimizer moves its state itself; remove learner.offload"
            )

    def problems(self, config: Any) -> Iterator[str]:
        if self.liger_kernel and (why := missing("patches", "learner.liger_kernel")):
            yield f"learner.liger_kernel: {why}"


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
    # KV cache of calls that run during an update, with algorithm.async_sampling = "in_flight".
    # recompute: log-probs are exactly those of one version. keep: faster.
    kv_on_update: Literal["recompute", "keep"] = "recompute"

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
    def one_model(self) -> str:
        """The setting because of which it serves a single model; empty: several."""
        return ""

    @property
    def most_adapters(self) -> tuple[str, int] | None:
        """The setting that limits the adapters served at once, and the limit; None: no limit."""
        return None

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

    def gpu_share(self, config: Any, network: Any, total: int) -> float | None:
        """The fraction of the learner's GPU, of `total` bytes, that the server needs; None: none.
        network: the policy. Raises PolicyError if the learner leaves too little."""
        return None

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


class ExternalEngineConfig(EngineConfig, frozen=True, kw_only=True, tag=EXTERNAL):
    """A custom policy server."""

    factory: str  # "file.py:name", "package.module:name" or the name of an entry point
    options: dict[str, Any] = {}  # Arguments of the factory, with any keys.


EXECUTORS = ("auto", "async", "threads")


class Enclosure(NamedTuple):
    """How a program runs in an environment like that of agents, which is not this machine's own."""

    prefix: list[str]  # of its command line
    pass_env: tuple[str, ...]  # patterns of the runner's variables that the prefix needs
    after: list[str]  # command that ends the program if it did not end by itself


class RunnerConfig(Section, frozen=True, tag_field="executor", tag="auto"):
    """Settings of runners with every executor. auto: command if the agent is one, else async."""

    runs_paths: ClassVar[bool] = False  # whether agents are `agent.path` only
    runs_commands: ClassVar[bool] = False  # whether agents are programs only

    processes: Natural = 1  # Runner processes on this machine; 0: start none here.
    concurrency: Count = 64  # running rollouts per process
    # Additional rollouts that are claimed early, and whose workspaces are made meanwhile.
    prefetch: Natural = 0
    # Rollouts scored concurrently, in addition to the running ones; if the runner dies, another one
    # only scores them. 0: a rollout keeps its slot of `concurrency` while it is scored.
    scoring_concurrency: Natural = 0
    # Seconds without a heartbeat after which another runner gets the rollout.
    lease: Seconds = 15.0
    drain: NonNegative = 5.0  # seconds that rollouts have to finish when their runner is stopped
    # Memory in MB of one process (pool, command) or of a whole rollout; 0: no limit.
    memory_mb: Natural = 0
    host: str = "127.0.0.1"  # address on which the gateway listens
    port: Port = 0  # Port of the gateway; 0: any free one.
    advertise: str = ""  # address of the gateway's host for containers and Jobs
    # Whether steps are traced with OpenInference, inputs and outputs, which is slower.
    framework_spans: bool = False

    @property
    def executor(self) -> str:
        return kind_of(self)

    def problems(self, config: Any) -> Iterator[str]:
        if self.framework_spans and (why := missing("runner", "runner.framework_spans")):
            yield f"runner.framework_spans: {why}"

    def enclosure(self, name: str, folder: str, env: Mapping[str, str]) -> Enclosure | None:
        """For a program in the agent's environment, with access to `folder`; None: it runs on this
        machine. env: its variables; PWD is its working directory."""
        return None


class AsyncRunnerConfig(RunnerConfig, frozen=True, tag="async"):
    """The agent runs in the runner's event loop."""

    runs_paths: ClassVar[bool] = True


class ThreadsRunnerConfig(RunnerConfig, frozen=True, tag="threads"):
    """The agent runs in threads of the runner."""

    runs_paths: ClassVar[bool] = True


class ExternalRunnerConfig(RunnerConfig, frozen=True, kw_only=True, tag=EXTERNAL):
    """A custom executor."""

    factory: str  # "file.py:name", "package.module:name" or the name of an entry point
    options: dict[str, Any] = {}  # Arguments of the factory, with any keys.


# The library's own kinds of tables, the default first and a plug-in's last.
OWN_LEARNERS = TorchLearnerConfig, ExternalLearnerConfig
OWN_ENGINES = EmbeddedEngineConfig, ExternalEngineConfig
OWN_RUNNERS = (
    RunnerConfig,
    AsyncRunnerConfig,
    ThreadsRunnerConfig,
    ExternalRunnerConfig,
)
