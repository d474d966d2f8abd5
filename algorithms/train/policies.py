"""What a run trains: one policy or several, each with an updater of its own, on the same groups.

Owns what is remembered from step to step: of each policy, and of the run as a whole, which of a
single policy is the same. Always true: which policies learn in a step is a function of the run file
and the step; a policy whose turn it is not changes in nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.diagnostics import metrics
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.train.update import Updater
from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.errors import PolicyError
from agentrl.types import Credit, Group, Json, Judgement


@dataclass(frozen=True, slots=True)
class Team:
    """The updaters of the policies that learn, by name. `memory` is what the run remembers."""

    config: RunConfig
    updaters: Mapping[str, Updater]
    memory: AlgorithmState = field(default_factory=AlgorithmState)

    @property
    def several(self) -> bool:
        return bool(self.config.policies)

    def update(self, step: int, groups: list[Group]) -> Metrics:
        """Let the policies whose turn it is learn from the groups of a step; what they measured.

        Of several, what is true of the step whatever is learned from it keeps its name, counts are
        added up under theirs, and everything else is under `<policy>/`."""
        measured = {
            name: updater.update(step, groups, team.turns(self.config, name, step))
            for name, updater in self.learning(step)
        }
        if not self.several:
            return next(iter(measured.values()))
        return metrics.of_several(metrics.sampled(groups), measured)

    def learning(self, step: int) -> Iterator[tuple[str, Updater]]:
        """The policies whose turn it is."""
        for name, updater in self.updaters.items():
            if team.learns(self.config, name, step):
                yield name, updater

    def versions(self, steps: int) -> dict[str, int]:
        """Of every policy after so many steps: in how many it learned."""
        return {name: team.turns(self.config, name, steps) for name in self.updaters}

    def credits(self, step: int) -> list[Credit]:
        """What the step made of each call, for its commit."""
        ledgers = [updater.ledger for _, updater in self.learning(step)]
        return [credit for ledger in ledgers if ledger for credit in ledger.take()]

    def judgements(self, step: int) -> list[Judgement]:
        """The rewards that the step gave, for its commit."""
        return [made for _, updater in self.learning(step) for made in updater.intake.judgements]

    def save(self, directory: Path) -> None:
        """Write what the learners need to continue: of several each into a folder of its own."""
        for name, updater in self.updaters.items():
            updater.learner.save(self.folder(directory, name))

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises PolicyError for what is damaged or of other models."""
        for name, updater in self.updaters.items():
            updater.learner.load(self.folder(directory, name))

    def folder(self, directory: Path, name: str) -> Path:
        """Where in a checkpoint a policy is."""
        return directory / name if self.several else directory

    def dump(self) -> dict[str, Json]:
        """What is remembered, as JSON."""
        if not self.several:
            return self.memory.dump()
        own = {name: updater.state.dump() for name, updater in self.updaters.items()}
        return {"run": self.memory.dump(), "policies": own}

    def restore(self, data: Mapping[str, Json]) -> None:
        """Take over what `dump` wrote. Raises PolicyError for that of other policies."""
        if not self.several:
            self.memory.restore(data)
            return
        own: Mapping[str, Json] = data.get("policies", {})
        if own.keys() != self.updaters.keys():
            raise PolicyError(
                f"the checkpoint is of the policies {', '.join(own) or 'of another run'}, and this "
                f"run trains {', '.join(self.updaters)}; continue with the run file that wrote it"
            )
        self.memory.restore(data["run"])
        for name, updater in self.updaters.items():
            updater.state.restore(own[name])
