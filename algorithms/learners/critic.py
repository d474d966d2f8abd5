"""The critic: V of the state before each action token.

A linear head on hidden states: on those of the policy, which costs no forward pass of its own and
trains the policy's layers too, or on those of a decoder of its own. Owns head, that decoder, and
their optimizer. Always true: a fresh head says 0 everywhere, so the first advantages are the
returns; the head is float32 or wider; what the policy's own weights get from a shared head goes
through the policy's optimizer, at its learning rate.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, ModuleDict
from transformers import PreTrainedModel

from agentrl.algorithms.learners.optimizer import Optimizer, OptimizerKind
from agentrl.algorithms.model.load import copy_weights, read_weights, save_weights
from agentrl.algorithms.model.packing import Pack, hidden_states
from agentrl.algorithms.objective.values import ValueTerms, value_loss

FOLDER = "critic"  # of a checkpoint
WEIGHTS = "critic.safetensors"


class ValueGradient(NamedTuple):
    """One micro-batch of the value loss."""

    values: Tensor  # [n], differentiable
    gradient: Tensor  # [n], of the loss by them, times the coefficient
    loss: float  # before the coefficient
    clipped: int  # tokens that value clipping holds


class ValueModel:
    """policy: whose hidden states it reads; decoder: whose instead, a model of the same vocabulary
    without its language-model head. coefficient: of the value loss, beside that of the policy."""

    def __init__(
        self,
        policy: PreTrainedModel,
        decoder: PreTrainedModel | None = None,
        *,
        lr: float,
        coefficient: float = 1.0,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        optimizer: OptimizerKind = "adamw",
        betas: tuple[float, float] = (0.9, 0.95),
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
        self.optimizer = Optimizer(
            dict(self.modules.named_parameters()),
            kind=optimizer,
            betas=betas,
            weight_decay=weight_decay,
        )

    def values(self, pack: Pack, hidden_NH: Tensor | None) -> Tensor:
        """V [n] of the states before the actions of a pack, differentiable. hidden: the policy's,
        which only a shared critic reads."""
        if self.decoder is not None:
            hidden_NH = hidden_states(self.decoder, pack)
        assert hidden_NH is not None, "a shared critic reads the hidden states of the policy"
        values: Tensor = self.head(hidden_NH.to(self.head.weight.dtype)).squeeze(-1)
        return values

    def pull(self, pack: Pack, hidden_NH: Tensor | None, terms: ValueTerms) -> ValueGradient:
        """Where the loss pulls the values of a pack."""
        v = self.values(pack, hidden_NH)
        loss, gradient, clipped = value_loss(terms, v, pack.index)
        return ValueGradient(
            v, (self.coefficient * gradient).to(v), float(loss), int(clipped.sum())
        )

    def save(self, directory: Path) -> None:
        """Write into a checkpoint."""
        save_weights(self.modules, directory / FOLDER / WEIGHTS)
        self.optimizer.save(directory / FOLDER)

    def read(self, directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What `save` wrote, for `restore`. Raises PolicyError if it does not fit."""
        weights = read_weights(self.modules, directory / FOLDER / WEIGHTS)
        return weights, self.optimizer.read(directory / FOLDER)

    def restore(self, saved: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
        weights, moments = saved
        copy_weights(self.modules, weights)
        self.optimizer.restore(moments)
