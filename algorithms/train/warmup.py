"""`[warmup]`: supervised fine-tuning of the policy before the run's first step.

Owns `<output>/warmup`, a Hugging Face directory that the run starts from. The same settings give
the same weights, so a run that is killed during the warm-up starts it again.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from msgspec.structs import replace

from agentrl.algorithms.credit.core import Imitated
from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.algorithms.learners import factory
from agentrl.algorithms.model.chat import template_message
from agentrl.algorithms.model.load import Tokenizer, load_model
from agentrl.algorithms.model.tiny import rows_of
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.train.checkpoint import save_policy
from agentrl.algorithms.train.optimize import learning_rate
from agentrl.base.loading import load_tasks
from agentrl.base.processes import PHASE
from agentrl.config import AlgorithmConfig, RunConfig
from agentrl.config.schema import CriticConfig
from agentrl.errors import TrainingError
from agentrl.types import Json

log = logging.getLogger("agentrl.algorithm")


def warm_up(config: RunConfig, start: str) -> tuple[str, bool]:
    """Fine-tune the policy `start`, unless that was done before; returns the directory of the
    result, and whether it is new.

    Raises ConfigError for invalid demonstrations, TrainingError if the chat template marks nothing
    to imitate or a loss is not finite."""
    settings, directory = config.warmup, Path(config.output, "warmup")
    if directory.is_dir():
        return str(directory), False
    log.log(PHASE, f"imitating {settings.data} for {settings.steps} steps")
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    data = load_tasks(settings.data, Path(config.root), key="warmup.data", needs="messages")
    model, tokenizer = load_model(start, config.policy.dtype, config.policy.device, config=config)
    rows = [row for demonstration in data for row in _rows(tokenizer, demonstration)]
    algo = objective.Algo(Imitated(), agg=objective.TOKENS, rewards=(), name="warmup")
    learner = factory.make_learner(replace(config, critic=CriticConfig()), algo, model, tokenizer)
    schedule = AlgorithmConfig(lr=settings.lr, warmup=settings.steps // 10, schedule="linear")
    losses = []
    try:
        for step in range(settings.steps):
            batch = as_batch(random.sample(rows, min(settings.batch, len(rows))))
            terms = objective.loss_terms(algo, batch, GivenLogProbs(), fresh=True)
            lr = learning_rate(schedule, step, settings.steps)
            report = learner.step(batch, partial(objective.loss_coefficients, algo, terms), lr=lr)
            if not report.applied:
                raise TrainingError(f"warmup: the loss of step {step} is not finite; lower its lr")
            losses.append(report.loss)
        save_policy(directory, learner)
    finally:
        learner.close()
    first, last = fmean(losses[:10]), fmean(losses[-10:])
    log.log(PHASE, f"imitated: {first:.3f} to {last:.3f} nats per token")
    return str(directory), True


def _rows(tokenizer: Tokenizer, demonstration: dict[str, Json]) -> list[TokenRow]:
    messages = [template_message(dict(m), n) for n, m in enumerate(demonstration["messages"])]
    return rows_of(tokenizer, [messages], demonstration.get("tools") or None)


def as_batch(rows: Sequence[TokenRow]) -> Batch:
    """A batch without rewards, in which each row is a call, rollout and group of its own."""
    number = torch.arange(len(rows))
    token = number.repeat_interleave(torch.tensor([len(row.actions) for row in rows]))
    names = [str(row) for row in range(len(rows))]
    return Batch(
        rows=list(rows),
        token_row=token,
        token_transition=token,
        behaviour=torch.cat([row.logprobs for row in rows]),
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
