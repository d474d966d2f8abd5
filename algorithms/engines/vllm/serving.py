"""What a vLLM server serves: the learner's weights as files, and where vLLM runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode

from torch import Tensor

from agentrl.types import POLICY

BASE = "base"  # on the wire, what a child's adapters are applied to
HOLD, OPEN = "/agentrl/hold", "/agentrl/open"
MEMORY = "agentrl"  # vLLM's name of the weight-transfer engine in `worker_extension`


@dataclass(frozen=True)
class TrainedModel:
    """The learner's weights, however they are trained."""

    save: Callable[[Path], None]  # all of them, adapter merged, as a Hugging Face checkpoint
    weights: Callable[[], Mapping[str, Tensor]]  # the same in memory, by that checkpoint's names
    save_tokenizer: Callable[[Path], None]
    score: Callable[[str, Sequence[int]], list[float]]
    """Policy, token ids -> the learner's log-prob of each but the first, at temperature 1."""
    probe: Sequence[int]  # token ids whose log-probs are compared after each publish
    gpu: int = -1  # the weights are on, as this process counts them; -1: on none
    adapters: Sequence[str] = ()  # their names; none: all weights are trained
    save_base: Callable[[Path], None] | None = None  # what the adapters are applied to
    save_adapter: Callable[[str, Path], None] | None = None  # as peft does
    rank: int = 0  # of the largest adapter


@dataclass
class ServedModel:
    """What a server is started with, and the versions that it has by now."""

    weights: Path  # that it comes up with; newer ones are sent
    tokenizer: Path
    versions: dict[str, int] = field(default_factory=lambda: {POLICY: 0})
    adapters: bool = False  # those versions are of adapters
    backend: str = ""  # engine of vLLM's weight transfer; empty: none

    def query(self) -> str:
        """For a `RequestHold`. Without adapters every call is the policy's, whatever it names."""
        nameless = {} if self.adapters else {"": next(iter(self.versions.values()))}
        return urlencode(self.versions | nameless)


class VllmHost(Protocol):
    """Where vLLM runs: a child process, or servers that somebody else started. Behind its URL is a
    gate (see `child.HoldMiddleware`) that obeys who has the key."""

    key: str

    @property
    def url(self) -> str: ...

    @property
    def name(self) -> str:
        """Of the policy where all weights are trained, as calls name it; known after `probe`."""
        ...

    @property
    def servers(self) -> Sequence[str]:
        """Those that are up to date, as long as they are told of every update."""
        ...

    @property
    def refuses_adapters(self) -> str:
        """Why adapters cannot be loaded by name, empty if they can; known after `probe`."""
        ...

    @property
    def room(self) -> int:
        """For how many adapters; known after `probe`."""
        ...

    @property
    def backend(self) -> str | None:
        """The engine of vLLM's weight transfer, empty if there is none; None: that of
        `ServedModel`. Known after `probe`."""
        ...

    @property
    def gpus(self) -> int:
        """That vLLM computes on, of those this process sees and from the first; 0: others."""
        ...

    async def probe(self) -> None:
        """Find out what is possible. Raises PolicyError for servers that cannot be published to."""
        ...

    async def start(self, serving: ServedModel) -> None:
        """Returns once it answers, the gate closed. Again after `ended`. Raises PolicyError."""
        ...

    async def ended(self) -> object:
        """Returns when nothing answers any more."""
        ...

    def returned(self) -> AsyncGenerator[str, None]:
        """Servers that answer again, with weights that nobody knows, while others went on."""
        ...

    async def adopt(self, server: str) -> None:
        """It has the newest weights: calls may go there."""
        ...

    async def stop(self) -> None: ...

    def failure_reason(self) -> str:
        """What is known about why it ended."""
        ...
