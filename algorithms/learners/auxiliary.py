"""Models beside the policy: the critic (stream v), and frozen ones that only score, the reference
(q) and the teacher (t).

The critic is a linear head on hidden states: on those of the policy, which costs no forward pass of
its own and trains the policy's layers too, or on those of a decoder of its own. Always true: a new
head returns 0 everywhere, so the first advantages are the returns; the head is float32 or wider;
the gradient of a shared head by the policy's weights is applied by the policy's optimizer, at its
learning rate. The weights of a frozen model change in one case only: every `every` steps a
reference becomes the current policy. Others are not in a checkpoint, for the run file names them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, ModuleDict
from transformers import PreTrainedModel

from agentrl.algorithms.learners.optimizer import Optimizer, read_trained, save_trained
from agentrl.algorithms.model.load import (
    Tokenizer,
    copy_weights,
    load_model,
    read_weights,
    save_weights,
)
from agentrl.algorithms.model.packing import Pack, check_model, hidden_states
from agentrl.algorithms.objective.values import ValueTerms, value_loss
from agentrl.errors import PolicyError

CRITIC = Path("critic", "critic.safetensors")  # in a checkpoint, beside the critic's optimizer
REFERENCE = "reference.safetensors"  # in a checkpoint


class ValueGradient(NamedTuple):
    """One micro-batch of the value loss."""

    values: Tensor  # [n], differentiable
    gradient: Tensor  # [n], of the loss by them, times the coefficient
    loss: float  # before the coefficient
    clipped: int  # tokens whose value is clipped


class ValueModel:
    """The critic. policy: whose hidden states it reads; decoder: whose instead, a model of the same
    vocabulary without its language-model head. coefficient: of the value loss, beside that of the
    policy."""

    def __init__(
        self,
        policy: PreTrainedModel,
        decoder: PreTrainedModel | None = None,
        *,
        lr: float,
        coefficient: float = 1.0,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        trunk = policy if decoder is None else decoder
        width = trunk.config.get_text_config().hidden_size
        wide = torch.float64 if trunk.dtype == torch.float64 else torch.float32
        self.head = Linear(width, 1, device=trunk.device, dtype=wide)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.decoder = None if decoder is None else decoder.eval()
        self.modules = ModuleDict({"head": self.head})
        if decoder is not None:
            self.modules["decoder"] = decoder
        self.lr = lr
        self.coefficient = coefficient
        self.max_grad_norm = max_grad_norm
        own = dict(self.modules.named_parameters())
        self.optimizer = Optimizer(own, weight_decay=weight_decay)

    def values(self, pack: Pack, hidden_NH: Tensor | None) -> Tensor:
        """V [n] of the states before the actions of a pack, differentiable. hidden: the policy's,
        which only a shared critic reads."""
        if self.decoder is not None:
            hidden_NH = hidden_states(self.decoder, pack)
        assert hidden_NH is not None, "a shared critic reads the hidden states of the policy"
        values: Tensor = self.head(hidden_NH.to(self.head.weight.dtype)).squeeze(-1)
        return values

    def pull(self, pack: Pack, hidden_NH: Tensor | None, terms: ValueTerms) -> ValueGradient:
        """The value loss of a pack, and its gradient by the values."""
        v = self.values(pack, hidden_NH)
        loss, gradient, clipped = value_loss(terms, v, pack.index)
        return ValueGradient(
            v, (self.coefficient * gradient).to(v), float(loss), int(clipped.sum())
        )

    def save(self, directory: Path) -> None:
        """Write into a checkpoint."""
        save_trained(self.modules, self.optimizer, directory / CRITIC)

    def read(self, directory: Path) -> Callable[[], None]:
        """What `save` wrote, to be restored by a call. Raises PolicyError if it does not fit."""
        return read_trained(self.modules, self.optimizer, directory / CRITIC)


@dataclass(frozen=True, slots=True)
class Reference:
    """A frozen model that scores the tokens of `policy`. every: training steps after which it
    becomes the current policy; 0: never."""

    model: PreTrainedModel
    policy: PreTrainedModel
    every: int = 0

    def __post_init__(self) -> None:
        freeze(self.model)

    def finish(self, step: int) -> None:
        """Training step number `step` is done."""
        if self.every and (step + 1) % self.every == 0:
            copy_weights(self.model, dict(self.policy.named_parameters()))

    def save(self, directory: Path) -> None:
        """Write weights that the run file does not name into a checkpoint."""
        if self.every:
            save_weights(self.model, directory / REFERENCE)

    def read(self, directory: Path) -> Callable[[], None]:
        """What `save` wrote, to be restored by a call. Raises PolicyError if it does not fit."""
        if not self.every:
            return lambda: None
        return partial(copy_weights, self.model, read_weights(self.model, directory / REFERENCE))


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """The model, which computes without dropout and does not learn. Raises PolicyError if its
    log-probs cannot be computed here."""
    check_model(model)
    return model.eval().requires_grad_(False)


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
