"""Auxiliary models: the critic, and two frozen scorers, the reference and the teacher.

The critic is a linear head on the policy's hidden states, which costs no extra forward pass and
trains the policy's layers too, or on those of a separate decoder. Invariant: a new head returns 0
everywhere, so the first advantages are the returns; the head is float32 or wider; the policy's
optimizer, at its learning rate, applies the gradient of a shared head by the policy's weights. A
frozen model changes in one case only: every `every` steps the reference becomes the current policy,
or moves a share of the way to it.
Checkpoints hold no other frozen model, because the run file names it.
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
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.forward import check_model, hidden_states
from agentrl.algorithms.model.load import copy_weights, load_model, read_weights, save_weights
from agentrl.algorithms.model.packing import Pack
from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.objective.values import ValueTerms, value_loss
from agentrl.core.errors import PolicyError

# File in a checkpoint, next to the critic's optimizer.
CRITIC = Path("critic", "critic.safetensors")
REFERENCE = "reference.safetensors"  # file in a checkpoint


class ValueGradient(NamedTuple):
    """The value loss of one micro-batch and its gradient."""

    values: Tensor  # [n], differentiable
    gradient: Tensor  # [n], d loss / d values, times the coefficient
    loss: float  # before the coefficient
    clipped: int  # number of clipped values


class ValueModel:
    """The critic. It reads the hidden states of `decoder`, a model of the same vocabulary without
    its language-model head, or by default those of `policy`. coefficient: weight of the value loss
    relative to the policy's loss."""

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
        parameters = dict(self.modules.named_parameters())
        self.optimizer = Optimizer(parameters, weight_decay=weight_decay)

    def values(self, pack: Pack, hidden_NH: Tensor | None) -> Tensor:
        """Values [n] of the states before the actions of a pack, differentiable. hidden_NH: the
        policy's hidden states, which only a shared critic reads."""
        if self.decoder is not None:
            hidden_NH = hidden_states(self.decoder, pack)
        assert hidden_NH is not None, "a shared critic reads the hidden states of the policy"
        values: Tensor = self.head(hidden_NH.to(self.head.weight.dtype)).squeeze(-1)
        return values

    def loss(self, pack: Pack, hidden_NH: Tensor | None, terms: ValueTerms) -> ValueGradient:
        """The value loss of a pack, and its gradient with respect to the values."""
        v = self.values(pack, hidden_NH)
        loss, gradient, clipped = value_loss(terms, v, pack.index)
        scaled = (self.coefficient * gradient).to(v)
        return ValueGradient(v, scaled, float(loss), int(clipped.sum()))

    def save(self, directory: Path) -> None:
        """Write weights and optimizer into a checkpoint."""
        save_trained(self.modules, self.optimizer, directory / CRITIC)

    def read(self, directory: Path) -> Callable[[], None]:
        """Read a checkpoint; returns a function that restores it. Raises PolicyError."""
        return read_trained(self.modules, self.optimizer, directory / CRITIC)


@dataclass(frozen=True, slots=True)
class Reference:
    """A frozen model that scores the tokens of `policy`. every: number of training steps after
    which `policy` is copied into it; 0: never."""

    model: PreTrainedModel
    policy: PreTrainedModel
    every: int = 0

    def __post_init__(self) -> None:
        freeze(self.model)

    def finish(self, step: int) -> None:
        """Called after training step number `step`: copies the policy, if it is time."""
        if self.every and (step + 1) % self.every == 0:
            copy_weights(self.model, dict(self.policy.named_parameters()))

    def save(self, directory: Path) -> None:
        """Write the weights into a checkpoint, if they change during the run."""
        if self.every:
            save_weights(self.model, directory / REFERENCE)

    def read(self, directory: Path) -> Callable[[], None]:
        """See `ValueModel.read`."""
        if not self.every:
            return lambda: None
        return partial(copy_weights, self.model, read_weights(self.model, directory / REFERENCE))


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Switch off dropout and gradients; returns the model. Raises PolicyError if its log-probs
    cannot be computed here."""
    check_model(model)
    return model.eval().requires_grad_(False)


def load_auxiliary(
    key: str, name: str, policy: PreTrainedModel, tokenizer: Tokenizer, *, head: bool = True
) -> PreTrainedModel:
    """Load a decoder with the policy's vocabulary, on its device and in its dtype. key: the setting
    that names it. head: see `load_model`. Raises PolicyError if it cannot be loaded or has another
    vocabulary."""
    try:
        model, its_tokenizer = load_model(name, device="cpu", template=False, head=head)
    except PolicyError as error:
        raise PolicyError(f"{key}: {error}") from None
    check_vocabulary(key, name, its_tokenizer, tokenizer)
    if (inputs := inputs_of(policy)) and (why := inputs.check(model)):
        raise PolicyError(f"{key} = {name!r}: {why}")
    return model.to(device=policy.device, dtype=policy.dtype)


def check_vocabulary(
    key: str, name: str, its_tokenizer: Tokenizer, tokenizer: Tokenizer, *, added: str = ""
) -> None:
    """Raise PolicyError unless both tokenizers have the same vocabulary. added: a token that only
    `its_tokenizer` may have."""
    vocabulary = {
        token: number for token, number in its_tokenizer.get_vocab().items() if token != added
    }
    if vocabulary != tokenizer.get_vocab():
        raise PolicyError(
            f"{key} = {name!r}: its vocabulary ({len(its_tokenizer)} tokens) is not the policy's "
            f"({len(tokenizer)}), so it cannot read the policy's tokens; choose a model of the "
            "same family"
        )
