"""One training step: groups into a batch, credit, and one or more optimizer steps on psi."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from agentrl.algorithms.data import rewards as columns
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.diagnostics import metrics
from agentrl.algorithms.diagnostics.credit_records import Ledger
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.learners.auxiliary import score_batch
from agentrl.algorithms.learners.base import Learner, Psi, StepReport
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective import values as targets
from agentrl.algorithms.objective.core import Algo, Terms
from agentrl.algorithms.objective.kl_control import ReferenceControl
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.algorithms.presets.registry import check_supplies
from agentrl.algorithms.train.dump import BadSteps, Dump
from agentrl.algorithms.train.preprocess import Intake
from agentrl.algorithms.train.schedule import learning_rate, minibatches, moved
from agentrl.config import RunConfig
from agentrl.types import POLICY, Group

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Updater:
    """Turns claimed groups into updates of the learner's weights. `policy`: whose calls they learn
    from."""

    config: RunConfig
    algo: Algo
    learner: Learner
    state: AlgorithmState = field(
        default_factory=AlgorithmState
    )  # what earlier steps are remembered for
    intake: Intake = field(default_factory=Intake)  # what of the groups is learned from
    anchor: ReferenceControl = field(
        default_factory=ReferenceControl
    )  # how the policy is held to its reference
    ledger: Ledger | None = None  # what the step made of each call; none: nobody asks
    bad_steps: BadSteps | None = None  # none: a step that cannot be made is skipped and counted
    policy: str = POLICY

    def __post_init__(self) -> None:
        check_supplies(self.algo, self.learner.supplies)

    def update(self, step: int, groups: list[Group], turn: int | None = None) -> Metrics:
        """Learn from the groups of one step; returns its metrics. `turn`: in how many steps the
        policy learned before, which is its version; by default in all of them.

        Where there is nothing to learn from (every reward missing, or all equal and no critic that
        could learn that) no weight changes, `update/skipped` counts it and the log says why.
        Raises TrainingError for a reward that no rollout carries."""
        turn = step if turn is None else turn
        algo = self.anchor.tuned(self.algo)
        groups, taken = self.intake.take(groups)
        columns.check_rewards(groups, [name for name in algo.rewards if name not in algo.optional])
        batch = self.batch(groups)
        recall = self.state.recall(batch, groups)
        batch, streams = score_batch(algo, self.learner, replace(batch, memory=recall.columns))
        values = targets.critic_terms(algo, batch, clip=self.config.critic.clip)
        measured = self.optimize(Step(step, turn, algo, groups, batch, streams, values))
        self.state.adopt(recall)
        rollouts = sum(len(group.rollouts) for group in groups)
        held = self.anchor.finish(turn, batch if "q" in streams else None, rollouts)
        return {
            **taken,
            **metrics.collected(groups, batch, self.policy),
            **metrics.staleness(step, groups, self.policy, version=turn),
            **(targets.value_metrics(values) if values else {}),
            **measured,
            **held,
        }

    def optimize(self, step: Step) -> Metrics:
        """The optimizer steps of a training step, until the policy has moved too far; what they
        measured."""
        if self.ledger is not None:
            self.ledger.open(step.algo, step.batch)
        lr = learning_rate(self.config.algorithm, step.turn, self.config.steps)
        sizes = metrics.call_tokens(step.groups, self.policy)
        planned: list[Terms] = []
        measured: list[Metrics] = []
        bad, early_stop = 0, False
        for number, (part, terms, critic) in enumerate(self.parts(step)):
            planned.append(terms)
            if terms.skip:
                log.warning("step %d changes no weight: %s", step.number, terms.skip)
                continue
            eta = objective.eta(step.algo, terms)
            report = self.learner.step(part, step.psi(terms), lr=lr, critic=critic, eta=eta)
            if not self.made(step, number, part, terms, report):
                bad += 1
                continue
            if self.ledger is not None:
                self.ledger.record(step.algo, part, terms, report.current)
            measured.append(metrics.optimizer_step(step.algo, part, terms, report, sizes))
            if early_stop := self.far(terms, report):
                break
        return {
            **metrics.advantages(planned),
            **metrics.merged(measured),
            "lr": lr,
            "update/steps": len(planned),
            "update/skipped": len(planned) - len(measured),
            "update/bad": bad,
            "update/early_stop": float(early_stop),
        }

    def batch(self, groups: list[Group]) -> Batch:
        """What may be learned from, with the rewards that the algorithm reads."""
        least = self.config.algorithm.min_group
        names = self.algo.rewards
        return build_batch(groups, reward_names=names, min_group=least, policy=self.policy)

    def parts(self, step: Step) -> Iterator[tuple[Batch, Terms, ValueTerms | None]]:
        """The optimizer steps of a batch: minibatches of whole groups, dealt anew in every epoch.
        Credit is computed on the whole batch, whichever way it is cut, and so are the critic's
        targets."""
        settings, algo, batch, values = self.config.algorithm, step.algo, step.batch, step.values
        count = min(settings.minibatches, len(step.groups))
        if count * settings.epochs == 1 or not batch.n_tokens:
            yield batch, objective.loss_terms(algo, batch, step.streams, fresh=True), values
            return
        symbols = None
        if algo.symbols:
            symbols, o_NK = self.learner.top(batch, algo.symbols)
            streams = {"o": o_NK[:, 0], "o_K": o_NK, **step.streams}
        else:
            streams = {"o": self.learner.logprobs(batch), **step.streams}
        advantage = objective.compute_advantages(algo, batch)
        counts = batch.token_group.bincount(minlength=len(batch.groups)).tolist()
        ranges = torch.split(torch.arange(batch.n_tokens), counts)
        tokens_of = dict(zip(batch.groups, ranges, strict=True))
        for epoch in range(settings.epochs):
            order = f"{self.config.seed}/{batch.step}/{epoch}"
            for share in minibatches(step.groups, count, order):
                part = self.batch(share)
                # Within a group the tokens of the part are in the order of the whole.
                tokens = torch.cat([tokens_of[id] for id in part.groups] or [ranges[0][:0]])
                if symbols is not None:
                    part = replace(part, symbols=symbols[tokens])
                cut = {letter: column[tokens] for letter, column in streams.items()}
                terms = objective.loss_terms(algo, part, cut, advantage=advantage[tokens])
                yield part, terms, values and targets.select_tokens(values, tokens)

    def made(self, step: Step, number: int, part: Batch, terms: Terms, report: StepReport) -> bool:
        """Whether an optimizer step changed the weights. Raises TrainingError if too many in a row
        did not."""
        if self.bad_steps is not None:
            if report.applied:
                self.bad_steps.good()
            else:
                dump = Dump(part, terms, report.logprobs, report.loss, report.grad_norm)
                self.bad_steps.bad(step.number, number, dump)
        return report.applied

    def far(self, terms: Terms, report: StepReport) -> bool:
        """Whether the policy has moved so far on its batch that the other steps are left out."""
        target = self.config.algorithm.target_kl
        if target is None or "o" not in terms.streams:
            return False
        return moved(terms.streams["o"], report.logprobs, terms.weight) > target


@dataclass(frozen=True, slots=True)
class Step:
    """A training step before its first optimizer step."""

    number: int
    turn: int  # steps that the policy learned in before
    algo: Algo
    groups: list[Group]
    batch: Batch  # the whole of them
    streams: Mapping[str, Tensor]  # log-probs [N] of frozen models, by letter
    values: ValueTerms | None  # what the critic learns, if there is one

    def psi(self, terms: Terms) -> Psi:
        """Bound to what it reads alone, for it may be sent to other processes."""
        return partial(objective.psi, self.algo, terms)
