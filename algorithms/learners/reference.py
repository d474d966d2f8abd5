"""Frozen models that only score: the reference (stream q) and the teacher (t).

Owns their weights, which change in one way alone: every so many steps a reference becomes the
policy as it is. One that does not is not part of a checkpoint, for it is the model that the run
file names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms.model.load import (
    Tokenizer,
    copy_weights,
    load_model,
    read_weights,
    save_weights,
)
from agentrl.algorithms.model.packing import check_model
from agentrl.errors import PolicyError

WEIGHTS = "reference.safetensors"


@dataclass(frozen=True, slots=True)
class Reference:
    """A frozen model that scores in the place of `policy`. every: training steps after which it
    becomes that; 0: never."""

    model: PreTrainedModel
    policy: PreTrainedModel
    every: int = 0

    def __post_init__(self) -> None:
        check_model(self.model)
        self.model.eval().requires_grad_(False)

    def finish(self, step: int) -> None:
        """Training step number `step` is done."""
        if self.every and (step + 1) % self.every == 0:
            copy_weights(self.model, dict(self.policy.named_parameters()))

    def save(self, directory: Path) -> None:
        """Write into a checkpoint what the run file does not say."""
        if self.every:
            save_weights(self.model, directory / WEIGHTS)

    def read(self, directory: Path) -> dict[str, Tensor] | None:
        """What `save` wrote, for `restore`. Raises PolicyError if it does not fit."""
        return read_weights(self.model, directory / WEIGHTS) if self.every else None

    def restore(self, saved: dict[str, Tensor] | None) -> None:
        if saved is not None:
            copy_weights(self.model, saved)


def load_auxiliary(
    key: str, name: str, policy: PreTrainedModel, tokenizer: Tokenizer, *, head: bool = True
) -> PreTrainedModel:
    """A decoder that reads the token ids of the policy, on its device and in its dtype. key: the
    setting that names it. head: see `load_model`. Raises PolicyError if it cannot be loaded or has
    another vocabulary."""
    try:
        model, own = load_model(name, device="cpu", template=False, head=head)
    except PolicyError as error:
        raise PolicyError(f"{key}: {error}") from None
    check_vocabulary(key, name, own, tokenizer)
    return model.to(device=policy.device, dtype=policy.dtype)


def check_vocabulary(key: str, name: str, own: Tokenizer, tokenizer: Tokenizer) -> None:
    """Raises PolicyError unless the same ids mean the same text."""
    if own.get_vocab() != tokenizer.get_vocab():
        raise PolicyError(
            f"{key} = {name!r}: its vocabulary ({len(own)} tokens) is not the policy's "
            f"({len(tokenizer)}), so it cannot read the policy's tokens; choose a model of the "
            "same family"
        )
