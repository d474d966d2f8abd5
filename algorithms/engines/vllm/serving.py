"""What vLLM serves, and where it runs: the interfaces of learner, server and host."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode

from torch import Tensor

from agentrl.types import POLICY, Json

BASE = "base"  # name in requests of the model that a child's adapters are applied to
HOLD, CLOSE, OPEN = "/agentrl/hold", "/agentrl/close", "/agentrl/open"
RUNNING = "/agentrl/running"  # a control request: the adapters that calls in flight name
MEMORY = "agentrl"  # vLLM's name of the weight-transfer engine in `worker_extension`


@dataclass(frozen=True)
class TrainedModel:
    """The model that is trained, as a whole or by its adapters."""

    save: Callable[[Path], None]  # all weights, adapter merged, as a Hugging Face checkpoint
    weights: Callable[[], Mapping[str, Tensor]]  # the same in memory, by that checkpoint's names
    save_tokenizer: Callable[[Path], None]
    score: Callable[[str, Sequence[int]], list[float]]
    """Policy, token ids -> the learner's log-prob of each but the first, at temperature 1."""
    probe: Sequence[int]  # token ids whose log-probs are compared after each publish
    gpu: int = -1  # where the weights are, as this process counts GPUs; -1: on none
    adapters: Sequence[str] = ()  # their names; none: all weights are trained
    save_base: Callable[[Path], None] | None = None  # the model without its adapters
    save_adapter: Callable[[str, Path], None] | None = None  # by name, in peft's format
    rank: int = 0  # of the largest adapter


@dataclass
class ServedModel:
    """What a server is started with, and the current version of each policy."""

    weights: Path  # the checkpoint it starts with; newer weights are sent
    tokenizer: Path
    versions: dict[str, int] = field(default_factory=lambda: {POLICY: 0})
    adapters: bool = False  # those versions are of adapters
    backend: str = ""  # engine of vLLM's weight transfer; empty: none

    def name(self, policy: str) -> str:
        """Of its current version at vLLM, where each version of an adapter has one."""
        return versioned(policy, self.versions[policy]) if self.adapters else policy

    def query(self) -> str:
        """The versions of a `RequestHold`. Without adapters, any model name means the policy."""
        nameless = {} if self.adapters else {"": next(iter(self.versions.values()))}
        return urlencode(self.versions | nameless)


def versioned(policy: str, version: int) -> str:
    """The name at vLLM of a version of an adapter."""
    return f"{policy}#{version}"


class LostError(Exception):
    """A request failed as it does on a server that is dying."""


class VllmHost(Protocol):
    """Where vLLM runs: a child process, or servers that somebody else started. What listens at its
    URL holds requests."""

    url: str
    # Known after `probe`:
    name: str  # of the model, in requests where all weights are trained
    refuses_adapters: str  # why adapters cannot be loaded by name; empty: they can be
    room: int  # adapters that can be served
    backend: str | None  # of vLLM's weight transfer; empty: none; None: that of `ServedModel`
    spans: bool  # calls that cross an update name the version of each token: see `spans`
    gpus: int  # how many of the GPUs that this process sees, from the first, vLLM computes on

    @property
    def servers(self) -> Sequence[str]:
        """URLs of the servers that have the newest weights."""

    async def probe(self) -> None:
        """Find out what the servers can do. Raises PolicyError if they take no new weights."""

    async def start(self, serving: ServedModel) -> None:
        """Returns once vLLM answers; requests are held. Called again after `ended`. Raises
        PolicyError when the port is taken, and when vLLM ends or stays silent."""

    async def request(
        self, method: str, path: str, body: Json = None, server: str = ""
    ) -> list[tuple[int, bytes]]:
        """Send a control request to all servers that have the newest weights, or to one server.
        Returns status and body of each response. HOLD is answered once no call is in flight, CLOSE
        at once; from then on new calls wait, or go to other servers, until OPEN?VERSIONS. Raises
        LostError where no server answers."""

    async def ended(self) -> object:
        """Returns when nothing answers any more."""

    def returned(self) -> AsyncGenerator[str, None]:
        """Servers that answer again, with unknown weights, while others went on."""

    async def adopt(self, server: str) -> None:
        """A returned server has the newest weights now: calls may go there once it is opened."""

    async def stop(self) -> None: ...

    def failure_reason(self) -> str:
        """What is known about why vLLM ended."""
