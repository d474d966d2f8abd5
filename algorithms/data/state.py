"""Algorithm state that persists between steps: baselines, value tables, task difficulty.

A checkpoint stores one `StatePart` per name in `state.json`. Invariant: a part changes once per
trained step, after credit was computed from its earlier value, so repeating a step from the
checkpoint before it gives the same psi bit for bit. Credit stays pure: it reads the columns that
`recall` puts into the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import ClassVar, Protocol, runtime_checkable

import msgspec
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level
from agentrl.core.errors import PolicyError, TrainingError, nearest
from agentrl.core.types import Group, Json, Rollout

log = logging.getLogger(__name__)


class StatePart(Protocol):
    """One piece of state that JSON stores exactly: floats survive a round trip bit for bit."""

    def dump(self) -> Json: ...

    def restore(self, data: Json) -> None:
        """Load the output of `dump`. Raises msgspec.ValidationError for anything else."""


@runtime_checkable
class Measured(Protocol):
    """A `StatePart` with metrics of the last batch."""

    def metrics(self) -> Mapping[str, float]: ...


class RememberedColumn:
    """A column of a credit whose values come from earlier steps: a frozen dataclass.

    stored_as: the name of its state in checkpoints, which stays the same if the class is
    renamed."""

    __slots__ = ()
    stored_as: ClassVar[str]

    @property
    def name(self) -> str:
        """Name of its state part, such as "running-mean('outcome',0.9)"; equal columns share one.
        It contains the column's settings, because other settings would give other numbers."""
        return self.stored_as + settings(self)

    @property
    def level(self) -> Level:
        """The level of its values."""
        raise NotImplementedError

    def part(self, seed: int) -> StatePart:
        """Its state before the first step. seed: seeds random initial values."""
        raise NotImplementedError

    def recall(
        self, part: StatePart, batch: Batch, rollouts: Sequence[Rollout]
    ) -> tuple[Tensor, StatePart]:
        """The value of each unit, float64, and the state after the batch is trained. Does not
        change `part`. rollouts: those of the batch, in its order."""
        raise NotImplementedError

    def __call__(self, batch: Batch) -> Tensor:
        """The values that `recall` put into the batch. Raises TrainingError without them."""
        if self.name not in batch.remembered:
            raise TrainingError(
                f"step {batch.step}: {self} reads values of earlier steps, and this batch has "
                "none; set its `remembered` to the `columns` that `AlgorithmState.recall` returns"
            )
        return batch.remembered[self.name]


def settings(value: object) -> str:
    """The fields of a record in their order, without names of classes and fields, so that renaming
    them changes nothing; without defaults at the end, so that adding an option changes nothing."""
    if isinstance(value, tuple):
        return f"[{','.join(map(settings, value))}]"
    if not is_dataclass(value):
        return getattr(value, "__qualname__", repr(value))
    items = [(getattr(value, item.name), item.default) for item in fields(value)]
    while items and items[-1][0] == items[-1][1]:
        items.pop()
    return f"({','.join(settings(item) for item, _ in items)})"


@dataclass(frozen=True, slots=True)
class Recalled:
    """The remembered columns of a batch, and the state after the batch is trained, by name."""

    # For `Batch.remembered`: float64, one per unit of the column's level.
    columns: dict[str, Tensor]
    after: dict[str, StatePart]


@dataclass(slots=True)
class AlgorithmState:
    """All state of a run. remembered: the columns of its algorithm; other parts, such as
    the KL controller, are added to `parts` under their own names. seed: the run's seed."""

    remembered: tuple[RememberedColumn, ...] = ()
    parts: dict[str, StatePart] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        names = {column.name: column for column in self.remembered}
        for column in self.remembered:
            if names[column.name] != column:
                raise TrainingError(
                    f"{column} and {names[column.name]} would share the state {column.name}; give "
                    "one of them another `stored_as`"
                )
            self.parts.setdefault(column.name, column.part(self.seed))

    def recall(self, batch: Batch, groups: Sequence[Group]) -> Recalled:
        """Compute the columns for the batch and the next state. Pure: `adopt` changes the state."""
        by_id = {rollout.id: rollout for group in groups for rollout in group.rollouts}
        rollouts = [by_id[name] for name in batch.rollouts]
        read = {m.name: m.recall(self.parts[m.name], batch, rollouts) for m in self.remembered}
        columns = {name: column for name, (column, _) in read.items()}
        return Recalled(columns, {name: after for name, (_, after) in read.items()})

    def adopt(self, recall: Recalled) -> None:
        """Replace the state after the batch is trained."""
        self.parts |= recall.after

    def metrics(self) -> dict[str, float]:
        parts = [part for part in self.parts.values() if isinstance(part, Measured)]
        return {name: value for part in parts for name, value in part.metrics().items()}

    def dump(self) -> dict[str, Json]:
        return {name: part.dump() for name, part in self.parts.items()}

    def restore(self, data: Mapping[str, Json]) -> None:
        """Restore the state of a checkpoint. A part missing from an older checkpoint keeps its
        initial state, with a warning. Raises PolicyError for a part of another algorithm."""
        for name in data:
            if name not in self.parts:
                hint = nearest(name, self.parts) if self.parts else "this algorithm has no state"
                raise PolicyError(
                    f"the checkpoint has state {name!r} of another algorithm; {hint}. Continue "
                    "with the algorithm that wrote it, or start a new run from its weights"
                )
        shown = {column.name: repr(column) for column in self.remembered}
        for name, part in self.parts.items():
            if name not in data:
                log.warning(
                    "The checkpoint has no state of %s; resetting it.", shown.get(name, name)
                )
                continue
            try:
                part.restore(data[name])
            except msgspec.ValidationError as error:
                raise PolicyError(
                    f"the checkpoint's state {name!r} is damaged ({error}); resume from another one"
                ) from error
