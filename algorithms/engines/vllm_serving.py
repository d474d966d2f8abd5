"""What a vLLM server serves: the learner's weights as files, and the requests that load them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode

from agentrl.types import POLICY, Json

BASE = "base"  # on the wire, what a child's adapters are applied to
HOLD, OPEN = "/agentrl/hold", "/agentrl/open"


@dataclass(frozen=True)
class Learned:
    """The learner's weights, however they are trained."""

    save: Callable[[Path], None]  # all of them, adapter merged, as a Hugging Face checkpoint
    save_tokenizer: Callable[[Path], None]
    score: Callable[[str, Sequence[int]], list[float]]
    """Policy, token ids -> the learner's log-prob of each but the first, at temperature 1."""
    probe: Sequence[int]  # token ids whose log-probs are compared after each publish
    adapters: Sequence[str] = ()  # their names; none: all weights are trained
    save_base: Callable[[Path], None] | None = None  # what the adapters are applied to
    save_adapter: Callable[[str, Path], None] | None = None  # as peft does
    rank: int = 0  # of the largest adapter


@dataclass
class Serving:
    """Files and versions that a server is to have. `adapters` are on top of `weights`."""

    weights: Path
    tokenizer: Path
    adapters: dict[str, Path] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=lambda: {POLICY: 0})

    @property
    def mechanism(self) -> str:
        """In words, how new weights get there."""
        if self.adapters:
            return f"loading the adapters {', '.join(self.adapters)} in place"
        return "reading them from a directory"

    def query(self) -> str:
        """For a `Gate`. Without adapters every call is the policy's, whatever it names."""
        nameless = {} if self.adapters else {"": next(iter(self.versions.values()))}
        return urlencode(self.versions | nameless)

    def loads(self, policy: str) -> list[tuple[str, dict[str, Json]]]:
        """Requests, by path, that bring a running server's copy of a policy up to date."""
        if policy in self.adapters:
            path = str(self.adapters[policy])
            named: dict[str, Json] = {"lora_name": policy, "lora_path": path, "load_inplace": True}
            return [("/v1/load_lora_adapter", named)]
        weights: dict[str, Json] = {"weights_path": str(self.weights)}
        return [("/collective_rpc", {"method": "reload_weights", "kwargs": weights})]


class Host(Protocol):
    """Where vLLM runs: a child process, or servers that somebody else started. Behind its URL is a
    gate (see `vllm_child`) that obeys who has the key."""

    key: str

    @property
    def url(self) -> str: ...

    @property
    def name(self) -> str:
        """Of the policy where all weights are trained, as calls name it; known after `start`."""
        ...

    @property
    def hot(self) -> bool:
        """Whether adapters can be loaded by name; known after `probe`."""
        ...

    async def probe(self) -> None:
        """Find out what is possible. Raises PolicyError for servers that cannot be published to."""
        ...

    async def start(self, serving: Serving) -> None:
        """Returns once it answers, the gate open. Again after `ended`. Raises PolicyError."""
        ...

    async def ended(self) -> object:
        """Returns when it no longer serves what it was started with."""
        ...

    async def stop(self) -> None: ...

    def last_words(self) -> str:
        """What is known about why it ended."""
        ...
