"""What a model reads beside text, such as images: the protocol.

In a batch and in the rows of the embedded engine, token ids below 0 stand for what is no text:
who has put them there knows what each is. Everything between compares and counts ids only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from agentrl.types import Json

if TYPE_CHECKING:
    from agentrl.algorithms.model.chat import Chat
    from agentrl.algorithms.model.packing import Pack
    from agentrl.algorithms.model.text import Codec
    from agentrl.store.base import Store
    from agentrl.types import Transition

ATTRIBUTE = "agentrl_inputs"


class ReadPrompt(tuple[int, ...]):
    """The token ids of a prompt, and those that the engine reads in their place."""

    read: NDArray[np.int32]  # of the same length
    rotary: NDArray[np.int64] | None = None  # [axes, P]; None: each token's place


class Inputs(Protocol):
    """Reads a model's ids below 0. One per model; the learner and the engine may call it at the
    same time."""

    @property
    def learner(self) -> Callable[..., Any]:
        """Makes its learner, in place of `TorchLearner`."""
        ...

    def of_pack(self, pack: Pack) -> tuple[Module, dict[str, Any]]:
        """The decoder, and what it is called with: embeddings [1, T, H] and positions of a pack,
        differentiable."""
        ...

    def generate(self, *, input_ids: Tensor, logits_to_keep: int, **options: Any) -> Any:
        """In place of calling the model: its output for a step of the engine."""
        ...

    def changed(self) -> None:
        """Called when the engine's weights have changed."""
        ...

    def save(self, directory: Path) -> None:
        """Write the files of a checkpoint that it needs beside those of model and tokenizer."""
        ...

    def chat(self, tokenizer: Any, codec: Codec) -> Chat:
        """Renders requests to `ReadPrompt`s."""
        ...

    async def fetch(self, store: Store, run: str, calls: Iterable[Transition]) -> None:
        """Read from the store what calls name, and keep it until the next time."""
        ...

    def check(self, other: Module) -> str:
        """Why another model does not read the same ids; empty if it does."""
        ...

    def probe(self) -> list[dict[str, Json]]:
        """Messages with what it reads, to compare a policy server's log-probs with the learner's;
        empty: only text is trained."""
        ...

    def prompt(self, tokenizer: Any) -> list[int]:
        """What the learner reads for `probe`, as the chat template renders it. Raises PolicyError
        if it cannot."""
        ...

    def read(self, prompt: Sequence[int], messages: Sequence[dict[str, Json]]) -> list[int]:
        """What the learner reads for a prompt that a server has rendered from messages. Raises
        PolicyError for a prompt that is not that of the messages."""
        ...


def attach(model: Module, inputs: Inputs) -> None:
    """Let `inputs` read for a model, and its copies."""
    setattr(model, ATTRIBUTE, inputs)


def inputs_of(model: Module) -> Inputs | None:
    found: Inputs | None = getattr(model, ATTRIBUTE, None)
    return found


def rotary_positions(
    prompts: Sequence[NDArray[np.int64] | None], rows: NDArray[np.int64], places: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Rotary positions of tokens at `places` of `rows`, int64 [N] each: their places, or [axes, N]
    if a row has others. prompts: `ReadPrompt.rotary` of each row; text after it goes on from its
    largest position."""
    axes = max((len(prompt) for prompt in prompts if prompt is not None), default=0)
    if not axes:
        return places
    found = np.tile(places, (axes, 1))
    for row, prompt in enumerate(prompts):
        if prompt is not None:
            own = np.flatnonzero(rows == row)
            at, size = places[own], prompt.shape[1]
            after = prompt.max() + 1 + at - size
            found[:, own] = np.where(at < size, prompt[:, np.minimum(at, size - 1)], after)
    return found
