"""The table [engine.vllm] of the run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from agentrl.config.base import Count, NonNegative, Seconds, Section
from agentrl.config.infrastructure import EngineConfig

OF_A_CHILD: tuple[tuple[str, object], ...] = (
    ("arguments", []), ("tool_parser", "hermes"), ("gpu_memory", 0.0), ("sleep", 0),
)  # fmt: skip


class VllmConfig(Section, frozen=True):
    """A vLLM child process or running vLLM servers, for `engine.kind = "vllm"`."""

    urls: list[str] = []  # Running servers as http://HOST:PORT; none: start a child process.
    key_env: str = ""  # environment variable with the API key of those servers, if they have one
    start_timeout: Seconds = 300.0  # Seconds in which a server starts, at most.
    # Seconds for calls in flight to end before an update, and for the update.
    timeout: Seconds = 60.0
    # How new weights are transferred; auto: the fastest method that works here.
    sync: Literal["auto", "adapter", "ipc", "nccl", "shared_memory", "reload"] = "auto"
    max_adapters: Count = 8  # adapters that a child serves at once, including frozen ones
    # Fraction of the GPU's memory for a child; 0: what the learner leaves, estimated by model size.
    gpu_memory: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    # vLLM's sleep mode: free the child's GPU memory during updates. 1: keep its weights in host
    # memory; 2: drop its weights and send them again, without host memory; 0: off.
    sleep: Literal[0, 1, 2] = 0
    # Tolerance of log-probs after an update; 0: 1e-3, or 0.1 in bfloat16.
    tolerance: NonNegative = 0.0
    # vLLM's parser for the model's format of tool calls; hermes: that of policy.tool_format
    tool_parser: str = "hermes"
    arguments: list[str] = []  # additional arguments of `vllm serve`

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"engine.vllm.urls = {url!r}: give it as http://HOST:PORT")
        for name, default in OF_A_CHILD:
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
    def one_model(self) -> str:
        return "engine.vllm.urls" if self.vllm.urls else ""

    @property
    def most_adapters(self) -> tuple[str, int] | None:
        return None if self.vllm.urls else ("engine.vllm.max_adapters", self.vllm.max_adapters)

    @property
    def serves_only_adapters(self) -> bool:
        return True

    @property
    def serves_adapted_experts(self) -> bool:
        return self.vllm.sync not in ("auto", "adapter")  # it gets them merged into the weights

    @property
    def sent_keys(self) -> dict[str, str]:
        return {"engine.vllm": self.vllm.key_env}

    def gpu_share(self, config: Any, network: Any, total: int) -> float | None:
        from agentrl.algorithms.engines.vllm.factory import vllm_share

        return self.vllm.gpu_memory or vllm_share(config, network, total)

    def problems(self, config: Any) -> Iterator[str]:
        overlap, sleep = config.algorithm.async_sampling, self.vllm.sleep
        if sleep and overlap == "in_flight":
            yield (
                "engine.vllm.sleep: set algorithm.async_sampling to 'drained'; vLLM asleep answers "
                "no calls"
            )
        if sleep == 2 and config.policy.lora.rank:
            yield (
                "engine.vllm.sleep = 2 drops weights that policy.lora never sends again; set it to "
                "1"
            )
        if self.kv_on_update != "recompute" and overlap == "in_flight":
            yield (
                f"engine.kv_on_update = {self.kv_on_update!r}: after every update vLLM's log-probs "
                "are compared with the learner's, and a cache of older weights would falsify "
                "them; remove it"
            )


def vllm_of(config: Any) -> VllmEngineConfig:
    """The settings of a run whose policies vLLM serves."""
    assert isinstance(config.engine, VllmEngineConfig)
    return config.engine
