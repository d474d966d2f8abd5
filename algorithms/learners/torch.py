"""The reference learner: one process, one device, torch.

Owns the optimizer and, during `step` and `load`, the weights; between calls anybody may read them.
Invariant: the gradient is a sum over micro-batches of whole rows with weights fixed beforehand,
so it does not depend on the split into micro-batches; the model is in eval mode, since dropout
would make sampler and learner disagree; no graph and no gradient outlives a call.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners import memory
from agentrl.algorithms.learners.auxiliary import Reference, ValueModel
from agentrl.algorithms.learners.base import (
    Frozen,
    LossCoefficients,
    PolicyWeights,
    SavedPart,
    Scored,
    StepReport,
    critic_metrics,
    fixed_coefficients,
)
from agentrl.algorithms.learners.optimizer import Optimizer, OptimizerKind
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.forward import check_model, hidden_states, supported_packing
from agentrl.algorithms.model.lm_head import (
    ThreadTuner,
    action_logprobs,
    other_logprobs,
    top_tokens,
)
from agentrl.algorithms.model.load import Adapters, vocabulary_size
from agentrl.algorithms.model.packing import Pack, Packing, pack_rows
from agentrl.algorithms.objective.ratios import LearnerOutput
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.core.errors import PolicyError, TrainingError
from agentrl.core.types import POLICY

T = TypeVar("T")
Score = Callable[[PreTrainedModel, Pack], Tensor]


class WeightCopy:
    """A copy of weights in the host's memory, to go back to."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    @torch.no_grad()
    def take(self, now: Sequence[Tensor]) -> None:
        """Replace the kept weights by a copy of these."""
        if not self.kept:  # pinned memory, so that the device continues during the copy
            self.kept = [
                torch.empty(w.shape, dtype=w.dtype, pin_memory=w.device.type == "cuda") for w in now
            ]
        for copy, weight in zip(self.kept, now, strict=True):
            copy.copy_(weight, non_blocking=True)

    @torch.no_grad()
    def shrink(self, weights: Iterable[Tensor], share: float) -> None:
        """Scale the weights' distance from the copy by this share; 0: restore the copy bit by
        bit."""
        for copy, weight in zip(self.kept, weights, strict=True):
            start = copy.to(weight.device)
            weight.copy_(start.lerp(weight, share) if share else start)


class TorchLearner(PolicyWeights):
    """AdamW on one model, which the embedded policy server may share."""

    undoable = True
    frozen: dict[Frozen, Reference]

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
        critic: ValueModel | None = None,
        frozen: Mapping[Frozen, Reference] | None = None,
        offload: bool = False,
        release: bool = False,
    ) -> None:
        """packing: see `model.packing`. token_budget: tokens of one micro-batch; halved permanently
        when memory runs out. gradient_checkpointing: see `memory.recomputing`. fp32_head: see
        `model.lm_head`. adapters: train only the adapter `policy`; other learners may train the
        others. threads: CPU threads of a call, default: those of its thread. frozen: the reference,
        by default an adapter's base model, and the teacher. offload: `rest` moves the optimizer's
        state to the host; release: `rest` frees unused GPU memory. Raises PolicyError for a model
        that it cannot train."""
        check_model(model)
        self.critic, self.frozen, self.more = critic, dict(frozen or {}), list[SavedPart]()
        values: tuple[LearnerOutput, ...] = () if critic is None else ("values",)
        supplies = ("top_tokens", "entropy", "observations", *values, *self.frozen)
        super().__init__(model, tokenizer, adapters, policy, supplies)
        self.optimizer = Optimizer(self.parameters(), kind=optimizer, weight_decay=weight_decay)
        if offload and model.device.type == "cpu":
            raise PolicyError("learner.offload: the policy is on the host already; leave it out")
        self._offload, self._release = offload, offload or release
        self.max_grad_norm, self.marked = max_grad_norm, WeightCopy()
        self.packing, self.token_budget = supported_packing(model, packing), token_budget
        decoders = [model, critic.decoder] if critic and critic.decoder else [model]
        self.recomputed = [
            layer
            for decoder in decoders
            if gradient_checkpointing
            for layer in memory.layers_of(decoder)
        ]
        self.fp32_head = fp32_head
        number = threads or torch.get_num_threads()
        self.threads = number if isinstance(number, ThreadTuner) else ThreadTuner(number)

    def logprobs(self, batch: Batch, of: Scored = "current") -> Tensor:
        return self._scored(
            batch, of, lambda model, pack: self._forward(pack, model)[0], torch.float32
        )

    def values(self, batch: Batch) -> Tensor:
        critic = self._critic()

        def values(model: PreTrainedModel, pack: Pack) -> Tensor:
            hidden = hidden_states(model, pack) if critic.decoder is None else None
            return critic.values(pack, hidden)

        return self._scored(batch, "current", values, torch.float64)

    def top(self, batch: Batch, k: int, of: Scored = "current") -> tuple[Tensor, Tensor]:
        def tokens(model: PreTrainedModel, pack: Pack, hidden: Tensor) -> Tensor:
            head, actions = model.get_output_embeddings(), pack.actions.to(hidden.device)
            return top_tokens(head, hidden, actions, k, fp32=self.fp32_head)

        return self._topk(batch, of, tokens)

    def topk_logprobs(self, batch: Batch, of: Scored = "current") -> Tensor:
        return self._topk(batch, of, lambda model, pack, hidden: batch.topk_tokens[pack.index])[1]

    def step(
        self,
        batch: Batch,
        coefficients: LossCoefficients,
        *,
        lr: float,
        critic: ValueTerms | None = None,
        entropy_weights: Tensor | None = None,
        observation_weights: Tensor | None = None,
        # Earlier name of the attribute, for subclasses until the next version.
        eta: Tensor | None = None,
    ) -> StepReport:
        """See `Learner.step`; metric memory/retries is 1 if memory ran out once. Raises
        TrainingError when memory runs out twice."""
        entropy_weights = eta if entropy_weights is None else entropy_weights
        learning = None if critic is None else self._critic()
        device, budget = self.model.device, self.token_budget
        if self._offload:
            self.optimizer.move(None)
        if device.type == "cuda":
            memory.start_measuring(device)
        with self.threads.working(batch.n_tokens), self._adapted():
            try:
                terms = (batch, coefficients, critic, entropy_weights, observation_weights)
                report = self._within_memory(lambda: self._backward(*terms))
                report.grad_norm = self.optimizer.clip(self.max_grad_norm)
                finite = math.isfinite(report.loss + report.grad_norm)
                if learning:
                    norm = learning.optimizer.clip(learning.max_grad_norm)
                    report.metrics["critic/grad_norm"] = norm
                    finite &= math.isfinite(norm + report.metrics["critic/loss"])
                report.applied = finite and batch.n_tokens > 0
                # If psi is 0 and only the critic learns, momentum would still move the policy.
                if report.applied and (report.grad_norm > 0 or not learning):
                    self.optimizer.step(lr)
                if report.applied and learning:
                    learning.optimizer.step(learning.lr)
            finally:
                self._zero_grad()
        report.metrics |= memory.peak(device)
        report.metrics["memory/retries"] = float(self.token_budget < budget)
        return report

    def mark(self) -> None:
        self.marked.take(list(self.optimizer.masters.values()))

    def shrink(self, share: float) -> None:
        self.marked.shrink(self.optimizer.masters.values(), share)
        self.optimizer.shrunk(share)

    def rest(self) -> None:
        if self._offload:
            self.optimizer.move(torch.device("cpu"))
        if self._release and self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def save(self, directory: Path) -> None:
        """Write a resumable checkpoint, including the auxiliary models that change."""
        self.save_policy(directory)
        for part in self._saved_parts():
            part.save(directory)

    def load(self, directory: Path) -> None:
        weights = self.read_policy(directory)
        restores = [part.read(directory) for part in self._saved_parts()]
        self.restore_policy(weights)
        for restore in restores:
            restore()

    def keep(self, *parts: SavedPart) -> None:
        """Register parts that are saved and read with the policy."""
        self.more += parts

    def _saved_parts(self) -> list[SavedPart]:
        """The parts of a checkpoint besides the policy."""
        critic = (self.critic,) if self.critic else ()
        return [self.optimizer, *critic, *self.frozen.values(), *self.more]

    def _adapted(self, *, base: bool = False) -> AbstractContextManager[None]:
        """Context in which the model is the trained policy; base: the reference of its adapter."""
        if self.adapters is None:
            return nullcontext()
        return self.adapters.using(self.adapters.reference(self.policy) if base else self.policy)

    def _scored(self, batch: Batch, of: Scored, score: Score, dtype: torch.dtype) -> Tensor:
        """`score` of every action, computed pack by pack, [N] in token order, no graph."""

        def compute(model: PreTrainedModel) -> Tensor:
            scores_N = torch.empty(batch.n_tokens, dtype=dtype)
            for pack in pack_rows(batch.rows, self.packing, self.token_budget):
                scores_N[pack.index] = score(model, pack).to("cpu", dtype)
            return scores_N

        return self._without_graph(of, compute)

    def _topk(
        self, batch: Batch, of: Scored, tokens: Callable[[PreTrainedModel, Pack, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`tokens` [N, K] at every action and their log-probs, in token order, no graph."""

        def compute(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
            index, ids, logprobs = [], [], []
            for pack in pack_rows(batch.rows, self.packing, self.token_budget):
                p, _, hidden = self._forward(pack, model)
                chosen = tokens(model, pack, hidden)
                index.append(pack.index)
                ids.append(chosen.cpu())
                logprobs.append(self._others(model, pack, hidden, p, chosen).float().cpu())
            order = torch.cat(index).argsort()
            return torch.cat(ids)[order], torch.cat(logprobs)[order]

        return self._without_graph(of, compute)

    def _without_graph(self, of: Scored, compute: Callable[[PreTrainedModel], T]) -> T:
        """Call `compute` with a model."""
        self.check_output("old" if of == "current" else of)
        model = self.frozen[of].model if of in self.frozen else self.model
        base = of == "reference" and of not in self.frozen
        with self.threads.computing(), self._adapted(base=base), torch.no_grad():
            return self._within_memory(lambda: compute(model))

    def _others(
        self, model: PreTrainedModel, pack: Pack, hidden: Tensor, logprobs: Tensor, ids: Tensor
    ) -> Tensor:
        """Log-probs [n, K] of `ids` [n, K], whose first column is the actions."""
        head, to = model.get_output_embeddings(), hidden.device
        temperature = pack.temperature.to(to)
        return other_logprobs(head, hidden, ids.to(to), logprobs, temperature, fp32=self.fp32_head)

    def _backward(
        self,
        batch: Batch,
        psi: LossCoefficients,
        terms: ValueTerms | None,
        bonus: Tensor | None,
        observed: Tensor | None,
    ) -> StepReport:
        """Accumulate the gradient. Stops at a log-prob that is not finite; the remaining ones stay
        NaN."""
        logprobs_N, entropy_N = torch.full((2, batch.n_tokens), math.nan)
        topk_logprobs = None
        if batch.topk_tokens.numel():
            topk_logprobs = torch.full(batch.topk_tokens.shape, math.nan)
        report = StepReport(logprobs=logprobs_N, entropy=entropy_N, topk_logprobs=topk_logprobs)
        # Where an observation is less than half as probable as any token by chance, the policy was
        # never trained on such text. The gradient of unlearning that would drown the reward's.
        chance = -math.log(2 * vocabulary_size(self.model))
        if observed is not None:
            report.observations = torch.full(observed.shape, math.nan)
        value_loss, clipped = 0.0, 0
        packs, whole = self._packs(batch)
        if not whole:
            psi = self._computed(packs, psi, batch.n_tokens)
        for pack in packs:
            read_pack = pack if observed is None else pack.with_observations()
            with self._recomputing():
                forwarded = self._forward(read_pack, self.model, bonus is not None)
            n = len(pack.index)
            p, entropy, hidden = (x[:n] for x in forwarded)
            current = p.detach().cpu()
            logprobs_N[pack.index] = current.float()
            entropy_N[pack.index] = entropy.detach().float().cpu()
            report.tokens += len(pack.tokens)
            if not current.isfinite().all():
                report.loss = math.nan
                break
            read, root = current, p
            if topk_logprobs is not None:
                inputs = self.model, pack, hidden, p, batch.topk_tokens[pack.index]
                with torch.no_grad():  # the graph is large, and rarely needed
                    read = self._others(*inputs).cpu()
                topk_logprobs[pack.index] = read.float()
            coefficients_n = psi(read, pack.index)
            if coefficients_n.dim() == 2:
                current, root = read, self._others(*inputs)
            report.loss -= float((coefficients_n.double() * current.double()).sum())
            roots, gradients = [root], [-coefficients_n.to(root)]
            if bonus is not None:
                bonus_n = bonus[pack.index].to(entropy)
                report.loss -= float(bonus_n @ entropy.detach())
                roots.append(entropy)
                gradients.append(-bonus_n)
            if observed is not None:
                observed_logprobs = forwarded[0][n:]
                learned = observed_logprobs.detach() > chance
                weights_o = observed[pack.observed_index].to(p) * learned
                report.loss -= float(weights_o @ observed_logprobs.detach())
                report.observations[pack.observed_index] = observed_logprobs.detach().float().cpu()
                roots.append(observed_logprobs)
                gradients.append(-weights_o)
            if self.critic and terms is not None:
                if self.critic.decoder is not None:
                    # The critic has a graph of its own, so the policy's can be freed first.
                    torch.autograd.backward(roots, gradients)
                    roots, gradients = [], []
                with self._recomputing():
                    value = self.critic.loss(pack, hidden, terms)
                roots.append(value.values)
                gradients.append(value.gradient)
                value_loss += value.loss
                clipped += value.clipped
            torch.autograd.backward(roots, gradients)
        if terms is not None:
            report.metrics = critic_metrics(terms, value_loss, clipped, 0.0)
        if observed is not None and len(observed):
            below = (report.observations <= chance).double().mean()
            report.metrics["echo/below_chance"] = float(below)
        return report

    def _packs(self, batch: Batch) -> tuple[list[Pack], bool]:
        """The micro-batches of an update, and whether each has whole units, which do not always fit
        into the token budget."""
        # A CPU multiplies few rows as fast as many, so there packs only save duplicate tokens.
        small = self.model.device.type == "cpu"
        split = partial(pack_rows, batch.rows, self.packing, self.token_budget, small=small)
        packs = split(batch.row_unit)
        if len(batch.row_unit) and max(len(pack.tokens) for pack in packs) > self.token_budget:
            return split(), False
        return packs, True

    def _computed(self, packs: list[Pack], psi: LossCoefficients, n: int) -> LossCoefficients:
        """psi of the current log-probs, from a separate forward pass, because packs may split
        units."""
        p_N = torch.empty(n, dtype=torch.float64)
        with torch.no_grad():
            for pack in packs:
                p_N[pack.index] = self._forward(pack, self.model)[0].double().cpu()
        return partial(fixed_coefficients, psi(p_N, torch.arange(n)))

    def _recomputing(self) -> AbstractContextManager[None]:
        return memory.recomputing(self.recomputed) if self.recomputed else nullcontext()

    def _critic(self) -> ValueModel:
        self.check_output("values")
        assert self.critic is not None
        return self.critic

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()
        if self.critic:
            self.critic.optimizer.zero_grad()

    def _forward(
        self, pack: Pack, model: PreTrainedModel, learn_entropy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob and entropy [n] of the actions of a pack, and the hidden states [n, H] before
        them."""
        hidden_NH, to = hidden_states(model, pack), model.device
        inputs = hidden_NH, pack.actions.to(to), pack.temperature.to(to)
        logprobs_N, entropy_N = action_logprobs(
            model.get_output_embeddings(), *inputs, fp32=self.fp32_head, learn_entropy=learn_entropy
        )
        return logprobs_N, entropy_N, hidden_NH

    def _within_memory(self, compute: Callable[[], T]) -> T:
        """Call `compute`, and retry once with half the token budget if memory runs out. `compute`
        may change nothing but gradients."""
        try:
            return compute()
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
        # Outside of the handler, because its traceback would keep the tensors of the failed attempt
        # alive.
        self._zero_grad()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        self.token_budget = max(1, self.token_budget // 2)
        warnings.warn(
            "the update ran out of memory and is computed again with half the micro-batch: set "
            f"learner.token_budget = {self.token_budget}",
            RuntimeWarning,
            stacklevel=3,
        )
        try:
            return compute()
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
            raise TrainingError(
                "the update ran out of memory, also with learner.token_budget halved to "
                f"{self.token_budget} ({str(error).splitlines()[0]}); set a smaller one, "
                "learner.gradient_checkpointing = true, or train a smaller model"
            ) from None
