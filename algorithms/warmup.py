"""The warm-up (`[warmup]`): supervised fine-tuning of the policy before the run's first step.

Owns `<output>/warmup`, a Hugging Face directory or, for an adapter, a peft directory, with which
the run starts. Several policies, which are adapters, have one each, `<output>/warmup-NAME`, and
imitate the conversations of their roles. The same settings give the same weights, so a run that is
killed during the warm-up starts it again.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from pathlib import Path
from statistics import fmean

import torch
from msgspec.structs import replace

from agentrl.algorithms.credit.core import Imitated
from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.algorithms.demonstrations import ConversationReader
from agentrl.algorithms.learners import factory
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.load import end_tokens
from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.proof import with_proven_packing
from agentrl.algorithms.train.checkpoint import save_policy
from agentrl.algorithms.train.optimize import learning_rate
from agentrl.algorithms.train.policies import LoadedModel, add_adapter, load_base_model
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.config.learning import CriticConfig, WarmupConfig
from agentrl.core.errors import ConfigError, TrainingError
from agentrl.core.loading import load_tasks
from agentrl.core.processes import log_phase
from agentrl.core.types import POLICY

log = logging.getLogger("agentrl.algorithm")
Conversations = list[list[TokenRow]]  # the rows of each conversation
LINE_EVERY = 10.0  # seconds between lines about the progress
HELD_OUT = 10  # one of this many conversations is held out
# Held-out conversations are at least this many, if that is a tenth, regardless of the batch.
MIN_HELD_OUT = 16
MIN_CONVERSATIONS = 40  # with fewer conversations none is held out
CHECKS = 25  # number of checks on held-out conversations
# Losses of single checks are noisy, with one-word answers above all: the mean of the checks of a
# fifth of the steps, and of at least this many, is compared with the mean of as many before. A
# new lowest loss among the last checks also counts as falling.
COMPARED, MIN_COMPARED = 1 / 5, 12
MIN_CHECKS = 3
GAIN, NATS = 0.01, 0.002  # minimum decrease of the mean, as a fraction and in nats


def warm_up(
    config: RunConfig, start: str, directory: Path, roles: Collection[str] | None = None
) -> bool:
    """Fine-tune the policy `start` into `directory` on the run's demonstrations, unless the
    directory exists. Returns whether it was trained now. roles: values of the field `role` of the
    conversations to imitate; None: all.

    Raises ConfigError for invalid demonstrations, TrainingError for those that the chat template
    does not render and if a loss is not finite."""
    settings = config.warmup
    if directory.is_dir():
        return False
    torch.manual_seed(config.seed)
    data = load_tasks(settings.data, Path(config.root), key="warmup.data", needs="messages")
    if roles is not None and not (data := _of_roles(data, roles)):
        log.warning("warmup: no conversation is of %s, so that policy starts as it is", [*roles])
        return False
    lora = config.policy.lora
    loaded = load_base_model(start, config, adapted=bool(lora.rank))
    loaded.policies.append(POLICY)
    if loaded.adapters:
        add_adapter(loaded.adapters, POLICY, lora, config)
    config = with_proven_packing(config, [loaded])
    train, heldout = _split(_read(data, loaded), settings)
    held = f", {len(heldout)} held out" if heldout else ""
    log_phase(log, f"imitating {len(train)} conversations of {settings.data}{held}")
    algo = objective.Algo(Imitated(), agg=objective.TOKENS, rewards=(), name="warmup")
    learner = factory.make_learner(
        replace(config, critic=CriticConfig()), algo, loaded.model, loaded.tokenizer,
        loaded.adapters,
    )  # fmt: skip
    try:
        WarmUp(learner, algo, settings, Patience(settings, heldout)).run(train, config.seed)
        save_policy(directory, learner)
    finally:
        learner.close()
    return True


def _of_roles(data: Sequence[dict[str, object]], roles: Collection[str]) -> list[dict[str, object]]:
    """The conversations of some roles. Raises ConfigError for a conversation without a role."""
    for number, row in enumerate(data, start=1):
        if not isinstance(row.get("role"), str):
            raise ConfigError(
                f"warmup.data: conversation {number} has no `role`; with [policies] each needs one,"
                " as it tells who imitates it"
            )
    return [row for row in data if row["role"] in roles]


def _read(data: Sequence[dict[str, object]], loaded: LoadedModel) -> Conversations:
    """The rows of each conversation that fits the model's context."""
    ends, inputs = end_tokens(loaded.model, loaded.tokenizer), inputs_of(loaded.model)
    reader = ConversationReader(loaded.tokenizer, ends, inputs)
    limit, conversations = context_length(loaded.model) or inf, []
    for number, conversation in enumerate(data, start=1):
        try:
            rows = reader.rows(conversation)
        except TrainingError as error:
            raise TrainingError(f"warmup.data: conversation {number}: {error}") from None
        if all(len(row.tokens) <= limit for row in rows):
            conversations.append(rows)
    if not conversations:
        raise TrainingError(f"warmup.data: every conversation is longer than {limit} tokens")
    if too_long := len(data) - len(conversations):
        log.warning("warmup: %d conversations are longer than %s tokens: left out", too_long, limit)
    return conversations


def _split(
    conversations: Conversations, settings: WarmupConfig
) -> tuple[Conversations, Conversations]:
    """The training conversations and an evenly spaced held-out sample, of at most a batch or 16:
    with fewer, perhaps one-word answers, the loss is mostly noise."""
    if len(conversations) < MIN_CONVERSATIONS:
        return conversations, []
    size = min(len(conversations) // HELD_OUT, max(settings.batch, MIN_HELD_OUT))
    chosen = {index * len(conversations) // size for index in range(size)}
    heldout = [rows for index, rows in enumerate(conversations) if index in chosen]
    return [rows for index, rows in enumerate(conversations) if index not in chosen], heldout


class Patience:
    """When to stop: once the loss of held-out conversations does not fall any more.

    Keeps the weights of the best check, where the learner can."""

    def __init__(self, settings: WarmupConfig, heldout: Conversations) -> None:
        self._batch = as_batch([row for rows in heldout for row in rows]) if heldout else None
        self._interval = max(2, settings.steps // CHECKS)
        steps = max(MIN_COMPARED, COMPARED * settings.steps)
        self._compared = max(MIN_CHECKS, ceil(steps / self._interval))  # checks
        self._losses = list[float]()
        self.best = inf

    def ends(self, learner: Learner, steps: int) -> bool:
        """Check after `steps` steps, if it is time; returns whether to stop."""
        if self._batch is None or steps % self._interval:
            return False
        loss = -float(learner.logprobs(self._batch).double().mean())
        log.info("warmup: held-out loss %.3f after %d steps", loss, steps)
        self._losses.append(loss)
        if loss < self.best:
            self.best = loss
            if learner.undoable:
                learner.mark()
        return not self._falls()

    def _falls(self) -> bool:
        """Whether the loss still falls, or too few checks were made to tell."""
        recent, earlier = self._losses[-MIN_CHECKS:], self._losses[:-MIN_CHECKS]
        if len(recent) == MIN_CHECKS and max(recent) < NATS:
            return False  # learned
        if len(self._losses) < 2 * self._compared or _is_lower(min(recent), min(earlier)):
            return True
        last = fmean(self._losses[-self._compared :])
        before = fmean(self._losses[-2 * self._compared : -self._compared])
        return _is_lower(last, before)

    def restore(self, learner: Learner) -> None:
        """Go back to the weights of the best check."""
        if self.best < inf and learner.undoable:
            learner.shrink(0.0)


def _is_lower(loss: float, before: float) -> bool:
    return loss < before * (1 - GAIN) - NATS


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The optimizer steps."""

    learner: Learner
    algo: objective.Algo
    settings: WarmupConfig
    patience: Patience

    def run(self, conversations: Conversations, seed: int) -> None:
        """Make the steps, and report their progress."""
        drawn, losses = random.Random(seed), list[float]()
        logged, at = 0, time.monotonic()  # steps at the last line, and its time
        for step in range(self.settings.steps):
            size = min(self.settings.batch, len(conversations))
            chosen = drawn.sample(conversations, size)
            losses.append(self._step(step, as_batch([row for rows in chosen for row in rows])))
            done, now = step + 1, time.monotonic()
            if step == 0 or now - at >= LINE_EVERY:
                seconds = (now - at) / (done - logged) * (self.settings.steps - done)
                logged, at = done, now
                log_phase(
                    log, f"imitation step {done}/{self.settings.steps}  loss {losses[-1]:.3f}  "
                    f"at most {seconds:.0f} s left",
                )  # fmt: skip
            if self.patience.ends(self.learner, done):
                break
        self.patience.restore(self.learner)
        first, last = fmean(losses[:10]), fmean(losses[-10:])
        held = f", held out {self.patience.best:.3f}" if self.patience.best < inf else ""
        early = "" if len(losses) == self.settings.steps else ", no longer falling"
        log_phase(
            log,
            f"imitated for {len(losses)} steps: {first:.3f} to {last:.3f} nats per token"
            f"{held}{early}",
        )

    def _step(self, step: int, batch: Batch) -> float:
        """Returns the loss in nats per token, before the update."""
        settings = self.settings
        schedule = AlgorithmConfig(lr=settings.lr, warmup=settings.steps // 10, schedule="linear")
        terms = objective.loss_terms(self.algo, batch, GivenLogProbs(), fresh=True)
        coefficients = partial(objective.loss_coefficients, self.algo, terms)
        lr = learning_rate(schedule, step, settings.steps)
        report = self.learner.step(batch, coefficients, lr=lr)
        if not report.applied:
            raise TrainingError(f"warmup: the loss of step {step} is not finite; lower its lr")
        return report.loss


def as_batch(rows: Sequence[TokenRow]) -> Batch:
    """A batch without rewards, in which each row is a separate call, rollout and group."""
    number = torch.arange(len(rows))
    token = number.repeat_interleave(torch.tensor([len(row.actions) for row in rows]))
    names = [str(row) for row in range(len(rows))]
    return Batch(
        rows=list(rows),
        token_row=token,
        token_transition=token,
        sampler_logprobs=torch.cat([row.logprobs for row in rows]),
        transition_rollout=number,
        transition_role=torch.zeros_like(number),
        row_rollout=number,
        rollout_group=number,
        rewards={},
        roles=["agent"],
        groups=names,
        rollouts=names,
        transitions=names,
    )
