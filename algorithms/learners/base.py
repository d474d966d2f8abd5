"""What a learner is, and what all learners share. Its few methods suffice for every algorithm,
because there is one loss.

loss = - sum_t sg[psi_t] * log pi_t - sum_t eta_t * H_t

plus, with a critic, the squared error of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Protocol

import msgspec
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.model.load import Tokenizer, no_progress_bars, read_policy
from agentrl.algorithms.model.lora import Adapters
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.algorithms.presets.registry import Supply
from agentrl.errors import PolicyError

Psi = Callable[[Tensor, Tensor], Tensor]
"""(current log-probs [n], token indices int64 [n]) -> psi [n]. Called once per micro-batch with
whole rows, and whole units of `Batch.row_unit`; detached input, detached output. Indices point into
the batch's token level. Of a batch with `symbols` the log-probs are those of the symbols, [n, K],
the sampled token's first, and psi is [n], of the sampled tokens, or [n, K]."""

Frozen = Literal["q", "t"]
Scored = Literal["o"] | Frozen
"""Whose log-probs: of the current policy, the reference model or the teacher."""


class StepReport(msgspec.Struct, kw_only=True):
    """What one optimizer step did."""

    loss: float = 0.0
    grad_norm: float = 0.0
    logprobs: Tensor  # float32 [N]: log-probs before the update, in token order
    tokens: int = 0  # tokens forwarded, context included
    applied: bool = False  # false: the gradient was not finite and the update was skipped
    entropy: Tensor | None = None  # float32 [N], nats, before each token, if it is computed
    symbols: Tensor | None = None  # float32 [N, K]: also those of the batch's symbols, if any
    metrics: dict[str, float] = {}  # more of this learner's own, by their full names

    @property
    def current(self) -> Tensor:
        """What psi was given, [N] or [N, K]."""
        return self.logprobs if self.symbols is None else self.symbols


class Learner(Protocol):
    """Owns weights, optimizer and their random state. One caller at a time."""

    supplies: frozenset[Supply]
    """What it can compute besides the current log-probs: streams, values (v), the most probable
    tokens (k), and the gradient of the entropy (e)."""

    def logprobs(self, batch: Batch, of: Scored = "o") -> Tensor:
        """Log-probs of every action token at its sampling temperature, float32 [N], no graph."""

    def values(self, batch: Batch) -> Tensor:
        """The critic's value of the state before every action token, float64 [N], no graph."""

    def top(self, batch: Batch, k: int, of: Scored = "o") -> tuple[Tensor, Tensor]:
        """Every action token and the k - 1 most probable others in its place, int64 [N, K], and
        their log-probs, float32 [N, K], at its temperature, no graph. K: k, or the vocabulary."""

    def symbol_logprobs(self, batch: Batch, of: Scored = "o") -> Tensor:
        """Log-probs of the batch's symbols, float32 [N, K], no graph."""

    def step(
        self,
        batch: Batch,
        psi: Psi,
        *,
        lr: float,
        critic: ValueTerms | None = None,
        eta: Tensor | None = None,
    ) -> StepReport:
        """One forward, backward and update on psi, on the entropies that eta [N] weighs, and of the
        critic on its terms. A log-prob, value, loss or gradient that is not finite changes nothing.

        metrics: memory/*peak_mb (see `memory.peak`) and those of `critic_metrics`."""

    def save(self, directory: Path) -> None:
        """Write a resumable checkpoint: an ordinary Hugging Face directory, or with an adapter that
        of peft, plus optimizer state. Not atomic by itself; `checkpoint.save_checkpoint` is."""

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises PolicyError, with nothing changed, for a checkpoint of
        another model or a half-written one."""


class PolicyWeights:
    """What a learner trains: a model, or one of its adapters. Owns its files in a checkpoint."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        adapters: Adapters | None,
        policy: str,
        supplies: Iterable[Supply],
    ) -> None:
        """policy: the name of the adapter. supplies: what the learner can compute in addition to
        the current log-probs and, of an adapter, those of its base."""
        self.model = model.eval()
        self.adapters, self.policy = adapters, policy
        own_base: Iterable[Supply] = () if adapters is None else ("q",)
        self.supplies = frozenset[Supply](("o", "b", *own_base, *supplies))
        with TemporaryDirectory() as folder:  # once: it does not change while a run lasts
            tokenizer.save_pretrained(folder)
            self._tokenizer = {file.name: file.read_bytes() for file in Path(folder).iterdir()}

    def parameters(self) -> dict[str, Parameter]:
        """The trained parameters, by their names in checkpoints."""
        if self.adapters is not None:
            return self.adapters.parameters(self.policy)
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def save_policy(self, directory: Path) -> None:
        """Write weights and tokenizer into a directory, which is made if it is not there."""
        directory.mkdir(parents=True, exist_ok=True)
        if self.adapters is None:
            with no_progress_bars():
                self.model.save_pretrained(directory)
        else:
            self.adapters.save(self.policy, directory)
        for name, content in self._tokenizer.items():
            (directory / name).write_bytes(content)

    def read_policy(self, directory: Path) -> Mapping[str, Tensor]:
        """The weights that `save_policy` wrote. Raises PolicyError if they do not fit."""
        if self.adapters is not None:
            return self.adapters.read(self.policy, directory)
        return read_policy(self.model, directory)

    def check_supply(self, stream: Supply) -> None:
        """Raises PolicyError for a stream that the learner has no model for."""
        if stream not in self.supplies:
            what = "critic (stream v)" if stream == "v" else f"model for stream {stream}"
            raise PolicyError(f"the learner has no {what}")


def fixed_psi(psi_N: Tensor, p: Tensor, index: Tensor) -> Tensor:
    """A `Psi` that is known before the pass, for rows whose unit is computed in parts."""
    return psi_N[index].to(p)


def critic_metrics(terms: ValueTerms, loss: float, clipped: int, norm: float) -> dict[str, float]:
    """critic/loss, before its coefficient; critic/clip_fraction, of the tokens that the critic
    learns from; critic/grad_norm, of what is the critic's alone."""
    live = max(1, int((terms.weight > 0).sum()))
    return {"critic/loss": loss, "critic/clip_fraction": clipped / live, "critic/grad_norm": norm}
