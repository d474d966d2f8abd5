"""Adapters of a model that several policies share: the protocol.

Always true: the base is never written; a forward pass outside `using` and `routed` is that of the
base; only one thread at a time is inside either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

CONFIG = "adapter_config.json"  # in the directory of an adapter

Selection = Sequence[tuple[str, Tensor | None]]
"""Adapters of one forward pass, each with its tokens: int64 indices into the second-last axis of
activations; None: all tokens."""


class Adapters(Protocol):
    """The adapters of one model, by name."""

    model: PreTrainedModel

    @property
    def names(self) -> list[str]: ...

    def add(
        self, name: str, *, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0
    ) -> None:
        """Add an adapter scale * B A with scale = alpha / rank and B = 0, which has no effect yet.

        targets: names of linear layers, such as "q_proj", or of experts, such as "gate_up_proj" or
        "experts"; empty: all of the text decoder but routers. The same seed and name give the same
        A. Raises PolicyError for a target the model does not have."""

    def open(self, name: str, directory: Path) -> None:
        """Add an adapter that `save` or peft wrote. Raises PolicyError if it does not fit."""

    def fits(self, directory: Path) -> bool:
        """Whether the files of an adapter name this base."""

    def copy(self) -> Adapters:
        """A copy of adapters and modules on the same base weights, so that another thread can be
        inside `using` or `routed` of it."""

    def duplicate(self, name: str, source: Adapters, original: str) -> None:
        """Add a copy of the adapter `original` of `source`."""

    def keep_reference(self, name: str) -> None:
        """Keep the adapter as it is now, as the reference of the policy that it is."""

    def reference(self, name: str) -> str | None:
        """The adapter that was kept as its reference; None: the base alone is."""

    def close(self, name: str) -> None:
        """Remove an adapter. Raises PolicyError for the first one."""

    def parameters(self, name: str) -> dict[str, Parameter]:
        """The parameters of one adapter, by names without the adapter's name."""

    def coverage(self, name: str) -> str:
        """What an adapter is on, its share of the weights, and what is without it; a sentence."""

    def rank(self, name: str) -> int: ...

    def using(self, name: str | None, *, wide: bool = False) -> AbstractContextManager[None]:
        """Context in which forward passes apply one adapter to all tokens; None: the base alone.

        wide: see `routed`. Run the backward pass inside as well: it may recompute layers."""

    def routed(self, selection: Selection, *, wide: bool = True) -> AbstractContextManager[None]:
        """Context in which forward passes apply these adapters, each to its tokens.

        wide: on a CPU, multiply in the adapter's float32 and not in the dtype of the base: faster
        for few tokens, and the bits of a token do not depend on how many there are."""

    def save(self, name: str, directory: Path) -> None:
        """Write one adapter in peft's format, with the base's fingerprint in the metadata."""

    def read(self, name: str, directory: Path) -> dict[str, Tensor]:
        """The weights that `save` wrote, by the names of `parameters`. Raises PolicyError for
        another base, rank, scale or target, and DamagedError for incomplete files."""

    def restore(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights that `read` returned into the adapter."""

    def merge(self, name: str, directory: Path) -> None:
        """Write base + adapter as an ordinary Hugging Face directory, without changing memory."""

    def merged(self, name: str) -> dict[str, Tensor]:
        """Weights of base + adapter, by the base's names, without changing memory."""

    def save_base(self, directory: Path) -> None:
        """Write the base alone as an ordinary Hugging Face directory."""
