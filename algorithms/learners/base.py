"""The `Learner` protocol, and the code that all learners share.

The protocol's few methods suffice for every algorithm, because there is one loss:

loss = - sum_t sg[psi_t] * log pi_t - sum_t eta_t * H_t - sum_o omega_o * log pi_o

over the tokens t and, for an algorithm that learns from them, the observations o of a batch;
plus, with a critic, the squared error of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Literal, Protocol

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.load import Adapters, no_progress_bars, read_policy
from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.objective.core import FrozenModel
from agentrl.algorithms.objective.ratios import LearnerOutput
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.core.errors import PolicyError

LossCoefficients = Callable[[Tensor, Tensor], Tensor]
"""(current log-probs [n], token indices int64 [n]) -> psi [n], the coefficients of log-probs.

Called once per micro-batch of whole rows and whole units of `Batch.row_unit`, detached. Indices
point into the batch's token level. If the batch has `topk_tokens`, the log-probs are those of
these tokens, [n, K], the sampled one first; psi is [n] for the sampled tokens, or [n, K]."""

Frozen = Literal["reference", "teacher"]
Scored = Literal["current"] | Frozen
"""The model whose log-probs are computed."""


class StepReport(msgspec.Struct, kw_only=True):
    """The result of one optimizer step."""

    loss: float = 0.0
    grad_norm: float = 0.0
    logprobs: Tensor  # float32 [N]: log-probs before the update, in token order
    tokens: int = 0  # tokens forwarded, context included
    applied: bool = False  # false: the gradient was not finite and the update was skipped
    entropy: Tensor | None = None  # float32 [N], nats, before each token, if it is computed
    # float32 [O]: log-probs of the observations before the update; empty: not computed.
    observations: Tensor = msgspec.field(default_factory=lambda: torch.empty(0))
    topk_logprobs: Tensor | None = None  # float32 [N, K]: log-probs of `Batch.topk_tokens`
    metrics: dict[str, float] = {}  # the learner's other metrics, by full name

    @property
    def current(self) -> Tensor:
        """The log-probs that psi was called with, [N] or [N, K]."""
        return self.logprobs if self.topk_logprobs is None else self.topk_logprobs


class SavedPart(Protocol):
    """A part of a learner's checkpoints besides its policy."""

    def save(self, directory: Path) -> None: ...

    def read(self, directory: Path) -> Callable[[], None]:
        """Read a checkpoint; returns a function that restores it. Raises PolicyError."""
        ...


class Learner(Protocol):
    """Owns weights, optimizer and their random state. One caller at a time."""

    supplies: frozenset[LearnerOutput]
    """The models whose log-probs it can compute, and whether it can compute values, the most
    probable tokens, the gradient of the entropy, and that of observations."""
    undoable: bool
    """Whether `algorithm.max_kl` can undo its steps, by `mark` and `shrink`."""

    @property
    def frozen(self) -> Mapping[Frozen, FrozenModel]:
        """The frozen models of the learner."""

    def logprobs(self, batch: Batch, of: Scored = "current") -> Tensor:
        """Log-probs of every action token at its sampling temperature, float32 [N], no graph."""

    def values(self, batch: Batch) -> Tensor:
        """The critic's value of the state before every action token, float64 [N], no graph."""

    def top(self, batch: Batch, k: int, of: Scored = "current") -> tuple[Tensor, Tensor]:
        """Every action token and the k - 1 most probable alternatives, int64 [N, K], and their
        log-probs at its temperature, float32 [N, K], no graph. K: k, or the vocabulary's size."""

    def topk_logprobs(self, batch: Batch, of: Scored = "current") -> Tensor:
        """Log-probs of `Batch.topk_tokens`, float32 [N, K], no graph."""

    def step(
        self,
        batch: Batch,
        coefficients: LossCoefficients,
        *,
        lr: float,
        critic: ValueTerms | None = None,
        entropy_weights: Tensor | None = None,
        observation_weights: Tensor | None = None,
    ) -> StepReport:
        """Forward, backward and update of the policy, and of the critic if there are terms.
        entropy_weights: [N]. observation_weights: [O], only passed to a learner that supplies
        "observations". If a log-prob, value, loss or gradient is not finite, nothing is updated.

        metrics: memory/*peak_mb (see `memory.peak`) and those of `critic_metrics`."""

    def save(self, directory: Path) -> None:
        """Write a resumable checkpoint: a Hugging Face directory, or peft's for an adapter, plus
        optimizer state. Not atomic by itself; `checkpoint.save_checkpoint` is."""

    def load(self, directory: Path) -> None:
        """Restore a checkpoint of `save`. Raises PolicyError, with nothing changed, if it is
        incomplete or of another model."""

    def mark(self) -> None:
        """Keep the trained weights of the policy as they are, for `shrink`."""

    def shrink(self, share: float) -> None:
        """Scale the policy's change since `mark` by this share; 0: restore the marked weights
        exactly. The optimizer's first moments are scaled by its square, the second moments stay."""

    def rest(self) -> None:
        """Called after the updates of a training step: releases memory for other processes."""

    def close(self) -> None:
        """Stop processes and threads of the learner. May be called again."""


ReferenceElsewhere = Callable[[Batch], Tensor]
"""Log-probs [N] of the reference, if the learner does not hold it."""


class Teacher(Protocol):
    """A teacher outside the learner."""

    def top(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Learner.top`, for as many tokens as the algorithm reads."""


class LearnerDefaults:
    """Default methods of a learner without anything to undo, to free or to stop."""

    undoable: bool = False
    frozen: Mapping[Frozen, FrozenModel] = MappingProxyType({})

    def mark(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot undo a step")

    def shrink(self, share: float) -> None:
        self.mark()

    def rest(self) -> None: ...

    def close(self) -> None: ...


class PolicyWeights(LearnerDefaults):
    """The trained weights: a model, or one of its adapters. Owns their files in a checkpoint."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        adapters: Adapters | None,
        policy: str,
        supplies: Iterable[LearnerOutput],
    ) -> None:
        """policy: the name of the adapter. supplies: what the learner can compute besides the
        log-probs of the policy and of the reference, which every adapter has in its base."""
        self.model = model.eval()
        self.adapters, self.policy = adapters, policy
        own_base: Iterable[LearnerOutput] = () if adapters is None else ("reference",)
        self.supplies = frozenset[LearnerOutput](("old", "sampler", *own_base, *supplies))
        with TemporaryDirectory() as folder:  # once: it does not change during a run
            tokenizer.save_pretrained(folder)
            if inputs := inputs_of(model):
                inputs.save(Path(folder))
            self._tokenizer = {file.name: file.read_bytes() for file in Path(folder).iterdir()}

    def parameters(self) -> dict[str, Parameter]:
        """The trained parameters, by their names in checkpoints."""
        if self.adapters is not None:
            return self.adapters.parameters(self.policy)
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def save_policy(self, directory: Path) -> None:
        """Write weights and tokenizer into a directory, which is created if missing."""
        directory.mkdir(parents=True, exist_ok=True)
        if self.adapters is None:
            with no_progress_bars():
                self.model.save_pretrained(directory)
        else:
            self.adapters.save(self.policy, directory)
        for name, content in self._tokenizer.items():
            (directory / name).write_bytes(content)

    def read_policy(self, directory: Path) -> Mapping[str, Tensor]:
        """Read the weights that `save_policy` wrote. Raises PolicyError if they do not fit."""
        if self.adapters is not None:
            return self.adapters.read(self.policy, directory)
        return read_policy(self.model, directory)

    @torch.no_grad()
    def restore_policy(self, weights: Mapping[str, Tensor]) -> None:
        """Restore the weights that `read_policy` returned."""
        if self.adapters is not None:
            self.adapters.restore(self.policy, weights)
            return
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(weights[name])

    def check_output(self, output: LearnerOutput) -> None:
        """Raise PolicyError for a model that the learner does not have."""
        if output not in self.supplies:
            raise PolicyError(f"the learner has no {'critic' if output == 'values' else output}")


def fixed_coefficients(psi: Tensor, logprobs: Tensor, index: Tensor) -> Tensor:
    """`LossCoefficients` that look up values [N], for row units of several micro-batches."""
    return psi[index].to(logprobs)


def critic_metrics(terms: ValueTerms, loss: float, clipped: int, norm: float) -> dict[str, float]:
    """critic/loss, without its coefficient; critic/clip_fraction, of the tokens that the critic
    learns from; critic/grad_norm, of the parameters that the policy does not share."""
    live = max(1, int((terms.weight > 0).sum()))
    return {"critic/loss": loss, "critic/clip_fraction": clipped / live, "critic/grad_norm": norm}
