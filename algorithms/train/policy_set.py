"""The trained policies of a run, one or several, each with its own updater, on the same groups.

Owns the state of each policy and of the run, which are the same object for a single policy. Always
true: which policies learn in a step is a function of the run file and the step; a policy that does
not learn in a step does not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.diagnostics import metrics
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.train.step import Updater
from agentrl.config import RunConfig
from agentrl.config.policies import learns_in_step, steps_learned
from agentrl.errors import PolicyError
from agentrl.types import Credit, Group, Json, StepReward


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
        """Called before the checkpoint after `steps` steps, of which all from `since` on but the
        last were empty: a reference that was due in one of these follows its policy now."""
        before, after = self.versions(since), self.versions(steps)
        for name, updater in self.updaters.items():
            for step in range(before[name], after[name]):
                updater.reference_control.finish(step)

    def learning(self, step: int) -> Iterator[tuple[str, Updater]]:
        """The policies that learn in a step."""
        for name, updater in self.updaters.items():
            if learns_in_step(self.config, name, step):
                yield name, updater

    def versions(self, steps: int) -> dict[str, int]:
        """The version of every policy after `steps` steps: the number of steps it learned in."""
        return {name: steps_learned(self.config, name, steps) for name in self.updaters}

    def credits(self, step: int, groups: Sequence[Group]) -> list[Credit]:
        """The credit of each call of a step's groups, for its commit; not that of calls which
        preparation added, as they are in no store."""
        own = {c.id for group in groups for row in group.rollouts for c in row.transitions}
        recorders = [updater.recorder for _, updater in self.learning(step)]
        found = (credit for recorder in recorders if recorder for credit in recorder.stored())
        return [credit for credit in found if credit.transition in own]

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
        own = {name: updater.state.dump() for name, updater in self.updaters.items()}
        return {"run": self.state.dump(), "policies": own}

    def restore(self, data: Mapping[str, Json]) -> None:
        """Restore the result of `dump`. Raises PolicyError for a state of other policies."""
        if not self.several:
            self.state.restore(data)
            return
        own: Mapping[str, Json] = data.get("policies", {})
        if own.keys() != self.updaters.keys():
            raise PolicyError(
                f"the checkpoint is of the policies {', '.join(own) or 'of another run'}, and this "
                f"run trains {', '.join(self.updaters)}; continue with the run file that wrote it"
            )
        self.state.restore(data["run"])
        for name, updater in self.updaters.items():
            updater.state.restore(own[name])
