"""The trained policies of a run, one or several, which learn from the same groups, each with its
own updater; and models in memory: a model is a policy, or shared by several policies that are its
adapters.

Owns the state of each policy and of the run, which are the same object for a single policy.
Invariant: which policies learn in a step is a function of the run file and the step; a policy
that does not learn in a step does not change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel

from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.model import digests
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.load import Adapters, load_model, vocabulary_size
from agentrl.algorithms.model.lora import load_adapted
from agentrl.algorithms.train import metrics
from agentrl.algorithms.train.metrics import Metrics
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import LoraConfig, RunConfig
from agentrl.core.config.derived import steps_learned
from agentrl.core.errors import PolicyError
from agentrl.core.processes import log_phase
from agentrl.core.types import Credit, Group, Json, StepReward

log = logging.getLogger("agentrl.algorithm")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with the names of its policies: the model itself, or its adapters."""

    source: str  # directory or hub name
    model: PreTrainedModel
    tokenizer: Tokenizer
    adapters: Adapters | None = None  # named by policy; None: the model is the policy
    policies: list[str] = field(default_factory=list)
    built: bool = False  # whether policy.build or [warmup] has just made the weights


def load_base_model(
    source: str, config: RunConfig, *, adapted: bool, built: bool = False
) -> LoadedModel:
    digests.check(Path(source))
    log_phase(log, f"loading the model {source}")
    if adapted:
        return LoadedModel(source, *load_adapted(source, config), built=built)
    policy = config.policy
    model, tokenizer = load_model(source, policy.dtype, policy.device, config=config)
    return LoadedModel(source, model, tokenizer, built=built)


def add_adapter(adapters: Adapters, name: str, lora: LoraConfig, config: RunConfig) -> None:
    """Add the adapter of a policy. An adapter directory without a rank is loaded frozen."""
    if not lora.rank:
        adapters.open(name, config.path(lora.adapter))
        log_phase(log, adapters.coverage(name))
        return
    rank, alpha, targets = lora.rank, lora.alpha, lora.targets
    adapters.add(name, rank=rank, alpha=alpha, targets=targets, seed=config.seed)
    log_phase(log, adapters.coverage(name))
    if lora.adapter:
        adapters.restore(name, adapters.read(name, config.path(lora.adapter)))


def vocabulary_sizes(bases: Sequence[LoadedModel]) -> dict[str, int]:
    """The vocabulary size by policy."""
    return {name: vocabulary_size(base.model) for base in bases for name in base.policies}


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The updaters of the trained policies, by name. state: that of the run."""

    config: RunConfig
    updaters: dict[str, Updater]
    state: AlgorithmState = field(default_factory=AlgorithmState)

    @property
    def several(self) -> bool:
        return bool(self.config.policies)

    def update(self, step: int, groups: list[Group]) -> Metrics:
        """Train the policies that learn in a step on its groups; returns the metrics.

        With several policies, metrics of the step itself keep their names, counts are summed, and
        all others are under `<policy>/`."""
        measured = {
            name: updater.update(step, groups, steps_learned(self.config, name, step))
            for name, updater in self.learning(step)
        }
        for updater in self.updaters.values():
            updater.learner.rest()
        if not self.several:
            return next(iter(measured.values()))
        return metrics.merge_policies(metrics.group_metrics(groups), measured)

    def update_references(self, since: int, steps: int) -> None:
        """Called before the checkpoint after `steps` steps; all steps from `since` on except the
        last were empty. A reference whose update was due in one of these is updated now."""
        before, after = self.versions(since), self.versions(steps)
        for name, updater in self.updaters.items():
            for step in range(before[name], after[name]):
                updater.reference_control.finish(step)

    def learning(self, step: int) -> Iterator[tuple[str, Updater]]:
        """The policies that learn in a step."""
        before, after = self.versions(step), self.versions(step + 1)
        for name, updater in self.updaters.items():
            if after[name] > before[name]:
                yield name, updater

    def versions(self, steps: int) -> dict[str, int]:
        """The version of every policy after `steps` steps: the number of steps it learned in."""
        return {name: steps_learned(self.config, name, steps) for name in self.updaters}

    def credits(self, step: int, groups: Sequence[Group]) -> list[Credit]:
        """The credit of each call of a step's groups, for the commit of the step; without calls
        that preparation added, because they are not in the store."""
        collected = {c.id for group in groups for row in group.rollouts for c in row.transitions}
        recorders = [updater.recorder for _, updater in self.learning(step)]
        credits = (credit for recorder in recorders if recorder for credit in recorder.stored())
        return [credit for credit in credits if credit.transition in collected]

    def step_rewards(self, step: int) -> list[StepReward]:
        """The rewards that preprocessing added in a step, for the step's commit."""
        learning = [updater for _, updater in self.learning(step)]
        return [row for updater in learning for row in updater.preprocessor.step_rewards]

    def save(self, directory: Path) -> None:
        """Save the learners; several policies have a folder each."""
        for name, updater in self.updaters.items():
            updater.learner.save(self.folder(directory, name))

    def load(self, directory: Path) -> None:
        """Load a checkpoint of `save`. Raises PolicyError for damaged files or other models."""
        for name, updater in self.updaters.items():
            updater.learner.load(self.folder(directory, name))

    def folder(self, directory: Path, name: str) -> Path:
        """The folder of a policy in a checkpoint."""
        return directory / name if self.several else directory

    def dump(self) -> dict[str, Json]:
        """The state of the run and its policies, as JSON values."""
        if not self.several:
            return self.state.dump()
        states = {name: updater.state.dump() for name, updater in self.updaters.items()}
        return {"run": self.state.dump(), "policies": states}

    def restore(self, data: Mapping[str, Json]) -> None:
        """Restore the result of `dump`. Raises PolicyError for a state of other policies."""
        if not self.several:
            self.state.restore(data)
            return
        old: Mapping[str, Json] = data.get("policies", {})
        if old.keys() != self.updaters.keys():
            raise PolicyError(
                f"the checkpoint is of the policies {', '.join(old) or 'of another run'}, and this "
                f"run trains {', '.join(self.updaters)}; continue with the run file that wrote it"
            )
        self.state.restore(data["run"])
        for name, updater in self.updaters.items():
            updater.state.restore(old[name])
