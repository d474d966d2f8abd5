"""The interfaces between learner, vLLM server and host."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode

from torch import Tensor

from agentrl.algorithms.model.inputs import Inputs
from agentrl.types import POLICY, Json

BASE = "base"  # the base model's name in requests to a child that serves adapters
HOLD, CLOSE, OPEN = "/agentrl/hold", "/agentrl/close", "/agentrl/open"
RUNNING = "/agentrl/running"  # control request that lists the adapters of calls in flight
INIT, START = "/init_weight_transfer_engine", "/start_weight_update"
UPDATE, FINISH = "/update_weights", "/finish_weight_update"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MEMORY = "agentrl"  # name in vLLM of the weight-transfer backend in `worker_extension`


@dataclass(frozen=True)
class TrainedModel:
    """The learner's model, trained as a whole or by its adapters."""

    save: Callable[[Path], None]  # writes all weights, adapter merged, as a Hugging Face checkpoint
    weights: Callable[[], Mapping[str, Tensor]]  # the same in memory, by checkpoint names
    save_tokenizer: Callable[[Path], None]
    score: Callable[[str, Sequence[int]], list[float]]
    """(policy, token ids) -> the learner's log-prob of each token but the first, temperature 1;
    0 for ids below 0, which are no text."""
    probe: Sequence[int]  # token ids whose log-probs are compared after each publish
    inputs: Inputs | None = None  # what it reads beside text, whose probe is compared too
    gpu: int = -1  # index in this process of the weights' GPU; -1: none
    adapters: Sequence[str] = ()  # names; empty: all weights are trained
    save_base: Callable[[Path], None] | None = None  # writes the model without its adapters
    save_adapter: Callable[[str, Path], None] | None = None  # writes one by name, in peft's format
    rank: int = 0  # of the largest adapter


@dataclass
class ServedModel:
    """The files that a server starts with, and the current version of each policy."""

    weights: Path  # the checkpoint that it starts with; newer weights are sent
    tokenizer: Path
    versions: dict[str, int] = field(default_factory=lambda: {POLICY: 0})
    adapters: bool = False  # whether the policies are adapters
    backend: str = ""  # vLLM's weight-transfer backend; empty: none

    def name(self, policy: str) -> str:
        """A policy's name at vLLM, where each version of an adapter has a name of its own."""
        return versioned(policy, self.versions[policy]) if self.adapters else policy

    def query(self) -> str:
        """`RequestHold.versions` as a query. A whole model answers to any name."""
        nameless = {} if self.adapters else {"": next(iter(self.versions.values()))}
        return urlencode(self.versions | nameless)


def versioned(policy: str, version: int) -> str:
    """The name of an adapter's version at vLLM."""
    return f"{policy}#{version}"


class LostError(Exception):
    """A request failed in a way that may mean the server is dying."""


class VllmHost(Protocol):
    """Where vLLM runs: a child process, or servers that somebody else started."""

    url: str  # of the server that holds requests and answers calls
    # Known after `probe`:
    name: str  # the model's name in requests if all weights are trained
    refuses_adapters: str  # why adapters cannot be loaded by name; empty: they can be
    max_adapters: int  # number of adapters that can be served
    backend: str | None  # vLLM's weight-transfer backend; empty: none; None: `ServedModel.backend`
    spans: bool  # whether calls that span an update name the version of each token: see `spans`
    gpus: int  # vLLM computes on the first `gpus` GPUs that this process sees

    @property
    def servers(self) -> Sequence[str]:
        """URLs of the servers that have the newest weights."""

    async def probe(self) -> None:
        """Detect the servers' capabilities. Raises PolicyError if they accept no new weights."""

    async def start(self, serving: ServedModel) -> None:
        """Start vLLM with requests held; returns once it answers. Called again after `ended`.
        Raises PolicyError if the port is taken, or if vLLM ends or does not answer in time."""

    async def request(
        self, method: str, path: str, body: Json = None, server: str = ""
    ) -> list[tuple[int, bytes]]:
        """Send a control request to all servers that have the newest weights, or to one server.
        Returns status and body of each response. After HOLD and CLOSE new calls wait, or go to
        other servers, until OPEN?VERSIONS; HOLD returns once no call is in flight. Raises LostError
        if no server answers."""

    async def ended(self) -> object:
        """Wait until no server answers."""

    def returned(self) -> AsyncGenerator[str, None]:
        """Yield servers that answer again, with unknown weights, while others stayed up."""

    async def adopt(self, server: str) -> None:
        """Called when a returned server has the newest weights: calls may go there after OPEN."""

    async def stop(self) -> None: ...

    def failure_reason(self) -> str:
        """The most likely reason why vLLM ended, for an error message."""
