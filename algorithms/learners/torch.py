"""The reference learner: one process, one device, torch.

Owns the optimizer and, while `step` or `load` runs, the weights; between calls anybody may read
them. Always true: the gradient is a sum over micro-batches of whole rows with weights fixed
beforehand, so it does not depend on how rows are split; the model is in eval mode, since dropout
would make the sampler and the learner disagree; no graph and no gradient outlives a call.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners import memory
from agentrl.algorithms.learners.base import Psi, Scored, StepReport, Supply
from agentrl.algorithms.learners.critic import ValueModel
from agentrl.algorithms.learners.implicit_reward import ImplicitTrainer
from agentrl.algorithms.learners.optimizer import Optimizer, OptimizerKind
from agentrl.algorithms.learners.reference import Reference
from agentrl.algorithms.model.cpu_threads import ThreadTuner
from agentrl.algorithms.model.lm_head import action_logprobs, other_logprobs, top_tokens
from agentrl.algorithms.model.load import Tokenizer, no_progress_bars, read_policy
from agentrl.algorithms.model.lora import Adapters
from agentrl.algorithms.model.packing import (
    Pack,
    Packing,
    check_model,
    hidden_states,
    pack_rows,
    supported_packing,
)
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.errors import PolicyError, TrainingError
from agentrl.types import POLICY

T = TypeVar("T")


class TorchLearner:
    """AdamW on one model, which the embedded policy server may share.

    packing: see `packing`. token_budget: tokens of one micro-batch; it is halved, and stays so,
    when memory runs out. gradient_checkpointing: keep what enters a layer and recompute the rest.
    fp32_head: see `head`. adapters: learn the one named `policy`, and nothing else; other learners
    may learn others of the same model. threads: what a call computes with, default what its thread
    already has. critic: gives and learns values; frozen: the reference (q), by default the model
    without its adapters if it has any, and the teacher (t); trainers: reward models that learn
    and are saved with it. Raises PolicyError for a model it cannot train."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        optimizer: OptimizerKind = "adamw",
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        packing: Packing = "trie",
        token_budget: int = 4096,
        gradient_checkpointing: bool = False,
        fp32_head: bool = False,
        adapters: Adapters | None = None,
        policy: str = POLICY,
        threads: ThreadTuner | int | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        critic: ValueModel | None = None,
        frozen: Mapping[Literal["q", "t"], Reference] | None = None,
        trainers: Sequence[ImplicitTrainer] = (),
    ) -> None:
        check_model(model)
        self.model = model.eval()
        self.adapters, self.policy = adapters, policy
        if adapters is None:
            learned = {n: p for n, p in model.named_parameters() if p.requires_grad}
        else:
            learned = adapters.parameters(policy)
        self.optimizer = Optimizer(learned, kind=optimizer, betas=betas, weight_decay=weight_decay)
        self.critic = critic
        self.frozen = dict(frozen or {})
        self.trainers = tuple(trainers)
        values: tuple[Literal["v"], ...] = () if critic is None else ("v",)
        self.supplies = frozenset[Supply](
            {"o", "b", "k", "e", *self.frozen, *values, *(("q",) if adapters is not None else ())}
        )
        self.max_grad_norm = max_grad_norm
        self.packing = supported_packing(model, packing)
        self.token_budget = token_budget
        decoders = [model, critic.decoder] if critic and critic.decoder else [model]
        self.recomputed = [
            layer for each in decoders if gradient_checkpointing for layer in memory.layers_of(each)
        ]
        self.fp32_head = fp32_head
        number = threads or torch.get_num_threads()
        self.threads = number if isinstance(number, ThreadTuner) else ThreadTuner(number)
        self.tokenizer_files = _files_of(tokenizer)

    def logprobs(self, batch: Batch, of: Scored = "o") -> Tensor:
        """Log-probs of every action token at its sampling temperature, float32 [N], no graph."""
        if of not in self.supplies:
            raise PolicyError(f"the learner has no model for stream {of}")
        model = self.frozen[of].model if of in self.frozen else self.model
        alone = of == "q" and of not in self.frozen  # the base of the adapters
        with self.threads.computing(), self._adapted(alone), torch.no_grad():
            return self._within_memory(lambda: self._logprobs(batch, model))

    def values(self, batch: Batch) -> Tensor:
        """The critic's value of the state before every action token, float64 [N], no graph."""
        critic = self._critic()
        with self.threads.computing(), self._adapted(), torch.no_grad():
            return self._within_memory(lambda: self._values(batch, critic))

    def top(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """Every action token and the k - 1 most probable others in its place, int64 [N, K], and
        their log-probs, float32 [N, K], at its temperature, no graph."""
        with self.threads.computing(), self._adapted(), torch.no_grad():
            return self._within_memory(lambda: self._top(batch, k))

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

        metrics: memory/retries, 1 if memory ran out once; memory/*peak_mb (see `memory.peak`);
        critic/loss, before its coefficient, critic/clip_fraction, of the tokens it learns from, and
        critic/grad_norm, of what is the critic's alone.
        Raises TrainingError when memory runs out twice."""
        learning = None if critic is None else self._critic()
        device, budget = self.model.device, self.token_budget
        memory.start_measuring(device)
        with self.threads.working(batch.n_tokens), self._adapted():
            try:
                sums = self._within_memory(lambda: self._backward(batch, psi, critic, eta))
                norm = self.optimizer.clip(self.max_grad_norm)
                pull = learning.optimizer.clip(learning.max_grad_norm) if learning else 0.0
                finite = math.isfinite(norm + sums.loss + pull + sums.value_loss)
                applied = finite and batch.n_tokens > 0
                if applied:
                    # Where psi is 0 and only a critic learns, momentum would still move the policy.
                    if norm > 0 or not learning:
                        self.optimizer.step(lr)
                    if learning:
                        learning.optimizer.step(learning.lr)
            finally:
                self._zero_grad()
        metrics = memory.peak(device)
        metrics["memory/retries"] = float(self.token_budget < budget)
        if critic is not None:
            live = max(1, int((critic.weight > 0).sum()))
            metrics["critic/loss"] = sums.value_loss
            metrics["critic/clip_fraction"] = sums.values_clipped / live
            metrics["critic/grad_norm"] = pull
        return StepReport(
            loss=sums.loss,
            grad_norm=norm,
            logprobs=sums.logprobs,
            symbols=sums.symbols,
            tokens=sums.tokens,
            applied=applied,
            entropy=sums.entropy,
            metrics=metrics,
        )

    def save(self, directory: Path) -> None:
        """Write weights, tokenizer and optimizer into a directory: an ordinary Hugging Face one, or
        with an adapter, that of peft.

        Not atomic by itself; `checkpoint.save_checkpoint` makes it so."""
        directory.mkdir(parents=True, exist_ok=True)
        if self.adapters is None:
            with no_progress_bars():
                self.model.save_pretrained(directory)
        else:
            self.adapters.save(self.policy, directory)
        for name, content in self.tokenizer_files.items():
            (directory / name).write_bytes(content)
        self.optimizer.save(directory)
        for part in self._saved_parts():
            part.save(directory)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises PolicyError, with nothing changed, for a checkpoint of
        another model or a half-written one."""
        weights = self._read(directory)
        moments = self.optimizer.read(directory)
        critic = self.critic and self.critic.read(directory)
        frozen = {letter: scorer.read(directory) for letter, scorer in self.frozen.items()}
        trained = [trainer.read(directory) for trainer in self.trainers]
        if self.adapters is None:
            with torch.no_grad():
                for name, tensor in self.model.state_dict().items():
                    tensor.copy_(weights[name])
        else:
            self.adapters.restore(self.policy, weights)
        self.optimizer.restore(moments)
        if self.critic and critic:
            self.critic.restore(critic)
        for letter, scorer in self.frozen.items():
            scorer.restore(frozen[letter])
        for trainer, saved in zip(self.trainers, trained, strict=True):
            trainer.restore(saved)

    def _read(self, directory: Path) -> Mapping[str, Tensor]:
        """The weights of a checkpoint of this policy. Raises PolicyError if they do not fit."""
        if self.adapters is not None:
            return self.adapters.read(self.policy, directory)
        return read_policy(self.model, directory)

    def _adapted(self, alone: bool = False) -> AbstractContextManager[None]:
        """Within this context the model is the trained policy; alone: without its adapter."""
        if self.adapters is None:
            return nullcontext()
        return self.adapters.using(None if alone else self.policy)

    def _logprobs(self, batch: Batch, model: PreTrainedModel) -> Tensor:
        logprobs_N = torch.empty(batch.n_tokens)
        for pack in pack_rows(batch.rows, self.packing, self.token_budget):
            logprobs_N[pack.index] = self._forward(pack, model)[0].float().cpu()
        return logprobs_N

    def _top(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        places, ids, logprobs = [], [], []
        for pack in pack_rows(batch.rows, self.packing, self.token_budget):
            p, _, hidden = self._forward(pack, self.model)
            head, actions = self.model.get_output_embeddings(), pack.actions.to(hidden.device)
            top = top_tokens(head, hidden, actions, k, fp32=self.fp32_head)
            places.append(pack.index)
            ids.append(top.cpu())
            logprobs.append(self._others(pack, hidden, p, top).float())
        order = torch.cat(places).argsort()
        return torch.cat(ids)[order], torch.cat(logprobs)[order]

    def _others(self, pack: Pack, hidden: Tensor, logprobs: Tensor, ids: Tensor) -> Tensor:
        """Log-probs [n, K] of these tokens, the first of which are the actions, off the graph."""
        head, device = self.model.get_output_embeddings(), hidden.device
        given = (hidden, ids.to(device), logprobs, pack.temperature.to(device))
        return other_logprobs(head, *given, fp32=self.fp32_head).cpu()

    def _values(self, batch: Batch, critic: ValueModel) -> Tensor:
        values_N = torch.empty(batch.n_tokens, dtype=torch.float64)
        for pack in pack_rows(batch.rows, self.packing, self.token_budget):
            hidden = hidden_states(self.model, pack) if critic.decoder is None else None
            values_N[pack.index] = critic.values(pack, hidden).double().cpu()
        return values_N

    def _backward(
        self, batch: Batch, psi: Psi, terms: ValueTerms | None, eta: Tensor | None
    ) -> _Sums:
        """Accumulate the gradient, until a log-prob is not finite."""
        sums = _Sums(*torch.full((2, batch.n_tokens), math.nan))
        if batch.symbols.numel():
            sums.symbols = torch.full(batch.symbols.shape, math.nan)
        for pack in pack_rows(batch.rows, self.packing, self.token_budget):
            with memory.recomputing(self.recomputed):
                p, entropy, hidden = self._forward(pack, self.model, eta is not None)
            current = p.detach().cpu()
            sums.logprobs[pack.index] = current.float()
            sums.entropy[pack.index] = entropy.detach().float().cpu()
            sums.tokens += len(pack.tokens)
            if not current.isfinite().all():
                sums.loss = math.nan
                break
            shown = current
            if sums.symbols is not None:
                shown = self._others(pack, hidden, p, batch.symbols[pack.index])
                sums.symbols[pack.index] = shown.float()
            psi_n = psi(shown, pack.index)
            sums.loss -= float(psi_n.double() @ current.double())
            roots, gradients = [p], [-psi_n.to(p)]
            if eta is not None:
                eta_n = eta[pack.index].to(entropy)
                sums.loss -= float(eta_n @ entropy.detach())
                roots.append(entropy)
                gradients.append(-eta_n)
            if self.critic and terms is not None:
                if self.critic.decoder is not None:
                    # Its graph shares nothing with that of the policy, which is freed before it.
                    torch.autograd.backward(roots, gradients)
                    roots, gradients = [], []
                with memory.recomputing(self.recomputed):
                    pull = self.critic.pull(pack, hidden, terms)
                roots.append(pull.values)
                gradients.append(pull.gradient)
                sums.value_loss += pull.loss
                sums.values_clipped += pull.clipped
            torch.autograd.backward(roots, gradients)
        return sums

    def _critic(self) -> ValueModel:
        if self.critic is None:
            raise PolicyError("the learner has no critic (stream v)")
        return self.critic

    def _saved_parts(self) -> Iterator[ValueModel | Reference | ImplicitTrainer]:
        """The parts that are saved with the policy."""
        if self.critic:
            yield self.critic
        yield from self.frozen.values()
        yield from self.trainers

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()
        if self.critic:
            self.critic.optimizer.zero_grad()

    def _forward(
        self, pack: Pack, model: PreTrainedModel, learn_entropy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob and entropy [n] of the actions of a pack, and the hidden states [n, H] before
        them."""
        hidden_NH, device = hidden_states(model, pack), model.device
        logprobs_N, entropy_N = action_logprobs(
            model.get_output_embeddings(),
            hidden_NH,
            pack.actions.to(device),
            pack.temperature.to(device),
            fp32=self.fp32_head,
            learn_entropy=learn_entropy,
        )
        return logprobs_N, entropy_N, hidden_NH

    def _within_memory(self, compute: Callable[[], T]) -> T:
        """What `compute` returns; if memory runs out, after one more try with half the budget. Only
        gradients may have changed until then."""
        try:
            return compute()
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
        # Outside the handler: its traceback would keep the tensors of the failed try alive.
        self._halve_token_budget()
        try:
            return compute()
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
            raise TrainingError(
                "the update ran out of memory, with learner.token_budget halved to "
                f"{self.token_budget} as well ({str(error).splitlines()[0]}); set a smaller one, "
                "learner.gradient_checkpointing = true, or train a smaller model"
            ) from None

    def _halve_token_budget(self) -> None:
        self._zero_grad()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        self.token_budget = max(1, self.token_budget // 2)
        warnings.warn(
            "the update ran out of memory and is computed again with half the micro-batch: set "
            f"learner.token_budget = {self.token_budget}",
            RuntimeWarning,
            stacklevel=4,
        )


@dataclass(slots=True)
class _Sums:
    """Sums and columns of one backward pass over a batch."""

    logprobs: Tensor  # float32 [N], NaN where it stopped before
    entropy: Tensor  # float32 [N], nats, likewise
    loss: float = 0.0
    value_loss: float = 0.0
    values_clipped: int = 0
    symbols: Tensor | None = None  # float32 [N, K], the same of the batch's symbols
    tokens: int = 0  # forwarded, context included


def _files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """What `save_pretrained` writes, made once: a tokenizer does not change while a run lasts."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}
