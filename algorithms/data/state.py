"""What a run remembers from step to step besides its weights: baselines, value tables, difficulty.

Owns one `StatePart` per name; `state.json` of a checkpoint holds them. Always true: a part changes
once per trained step, after credit was computed from its earlier value, so a step that is repeated
from the checkpoint before it gives the same psi, bit for bit. Credit itself stays pure: it reads
the columns that `recall` puts into the batch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, next_same, reduce_by, scan
from agentrl.errors import PolicyError, TrainingError, nearest
from agentrl.types import Group, Json, Rollout

log = logging.getLogger(__name__)
# Names of parts contain class names; checkpoints of earlier versions contain the old ones.
RENAMED = {
    "BiLevel": "BiLevelGae",
    "Centred": "DiscountedAdvantages",
    "Combined": "OutcomePlusCalls",
    "Compensated": "RescaledByValid",
    "Best": "BestOverSecond",
    "Hindsight": "HindsightReturns",
    "Hiper": "HiperGae",
    "Histories": "SameStateRelative",
    "Largest": "ScaledByLargestReturn",
    "Others": "CentredOnOthers",
    "Overlong": "OverlongPenalty",
    "PassAtK": "PassAtKReward",
    "Peers": "PeerValues",
    "Received": "CallRewards",
    "Rel": "GroupRelative",
    "Sampled": "SampledRewards",
    "Shaped": "PotentialShaping",
    "Stage": "JointActionSpace",
    "Sum": "SumOfCalls",
    "Survivors": "NonzeroVarianceReward",
    "Training": "CriticTraining",
    "Tree": "BranchAdvantage",
}


class StatePart(Protocol):
    """One thing that is remembered. JSON holds it exactly: floats are read again bit for bit."""

    def dump(self) -> Json: ...

    def restore(self, data: Json) -> None:
        """Restore what `dump` wrote. Raises msgspec.ValidationError for anything else."""


@dataclass(slots=True)
class EmaMeans:
    """A running mean per name, b <- decay * b + (1 - decay) * x, which begins at 0."""

    decay: float
    values: dict[str, float] = field(default_factory=dict)

    def read(self, names: Sequence[str], x: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The mean of its name before each x [U], float64 [U], and the means after all of them. An
        x that is missing (NaN) changes nothing."""
        _, ids = _numbered(names)
        start = torch.tensor([self.values.get(name, 0.0) for name in names], dtype=torch.float64)
        known = (~x.isnan()).nonzero().squeeze(1)
        previous = next_same(ids[known], torch.arange(known.numel() - 1, -1, -1))
        first = torch.where(previous < 0, self.decay * start[known], 0.0)
        after = scan((1 - self.decay) * x[known] + first, self.decay, previous)
        before = start.clone()
        before[known] = torch.where(previous < 0, start[known], after[previous])
        newest = {names[at]: float(b) for at, b in zip(known.tolist(), after, strict=True)}
        return before, self.values | newest

    def dump(self) -> Json:
        return self.values

    def restore(self, data: Json) -> None:
        self.values = msgspec.convert(data, dict[str, float])


@dataclass(slots=True)
class CountedMeans:
    """The mean of all values of a name, with their count."""

    values: dict[str, tuple[float, int]] = field(default_factory=dict)

    def read(self, names: Sequence[str], x: Tensor) -> tuple[Tensor, dict[str, tuple[float, int]]]:
        """The mean of each name [U], 0 if it was never seen, and the means with x [U] as well. An x
        that is missing (NaN) changes nothing."""
        index, ids = _numbered(names)
        count = reduce_by(~x.isnan(), ids, len(index)).tolist()
        total = reduce_by(x.nan_to_num(nan=0.0), ids, len(index)).tolist()
        after = dict(self.values)
        for name, number in index.items():
            mean, seen = self.values.get(name, (0.0, 0))
            if count[number]:
                whole = seen + int(count[number])
                after[name] = (mean + (total[number] - count[number] * mean) / whole, whole)
        before = [self.values.get(name, (0.0, 0))[0] for name in names]
        return torch.tensor(before, dtype=torch.float64), after

    def dump(self) -> Json:
        return self.values

    def restore(self, data: Json) -> None:
        self.values = msgspec.convert(data, dict[str, tuple[float, int]])


def _numbered(names: Sequence[str]) -> tuple[dict[str, int], Tensor]:
    """A number for each different name, and the numbers int64 [U] of `names`."""
    index = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return index, torch.tensor([index[name] for name in names], dtype=torch.int64)


class RememberedColumn:
    """A part of a credit whose values come from earlier steps."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Of its state part: equal columns share one."""
        return repr(self)

    @property
    def level(self) -> Level:
        """Of its values."""
        raise NotImplementedError

    def part(self, seed: int) -> StatePart:
        """Its state before the first step. seed: of random initial values."""
        raise NotImplementedError

    def recall(
        self, part: StatePart, batch: Batch, rollouts: Sequence[Rollout]
    ) -> tuple[Tensor, StatePart]:
        """The value of each unit, float64, and the state after the batch is trained; `part` itself
        does not change. `rollouts` are those of the batch."""
        raise NotImplementedError

    def __call__(self, batch: Batch) -> Tensor:
        """What `recall` put into the batch. Raises TrainingError where it was not called."""
        if self.name not in batch.memory:
            raise TrainingError(
                f"step {batch.step}: {self.name} remembers earlier steps, and this batch carries "
                "nothing of it; put what `AlgorithmState.recall` says into its memory"
            )
        return batch.memory[self.name]


@dataclass(frozen=True, slots=True)
class Recalled:
    """The remembered columns of a batch, and the state after the batch is trained."""

    columns: dict[str, Tensor]  # by name of the memory: `Batch.memory`
    after: dict[str, StatePart]  # by the same names


@dataclass(slots=True)
class AlgorithmState:
    """Everything a run remembers. `memories` are those of its algorithm; other parts, such as the
    KL controller, are added under names of their own. seed: the run's."""

    memories: tuple[RememberedColumn, ...] = ()
    parts: dict[str, StatePart] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for memory in self.memories:
            self.parts.setdefault(memory.name, memory.part(self.seed))

    def recall(self, batch: Batch, groups: Sequence[Group]) -> Recalled:
        """What to put into the batch. Pure: `adopt` changes the state."""
        found = {rollout.id: rollout for group in groups for rollout in group.rollouts}
        rollouts = [found[name] for name in batch.rollouts]
        read = {m.name: m.recall(self.parts[m.name], batch, rollouts) for m in self.memories}
        columns = {name: column for name, (column, _) in read.items()}
        return Recalled(columns, {name: after for name, (_, after) in read.items()})

    def adopt(self, recall: Recalled) -> None:
        """Change the state, once the batch is trained."""
        self.parts |= recall.after

    def dump(self) -> dict[str, Json]:
        return {name: part.dump() for name, part in self.parts.items()}

    def restore(self, data: Mapping[str, Json]) -> None:
        """Restore the state of a checkpoint. A part that an older checkpoint does not have begins
        anew, with a warning. Raises PolicyError for a part of another algorithm."""
        data = {_current_name(name): saved for name, saved in data.items()}
        for name in data:
            if name not in self.parts:
                hint = nearest(name, self.parts) if self.parts else "this one remembers nothing"
                raise PolicyError(
                    f"the checkpoint remembers {name!r} of another algorithm; {hint}. Continue "
                    "with the algorithm that wrote it, or start a new run from its weights"
                )
        for name, part in self.parts.items():
            if name not in data:
                log.warning("The checkpoint does not have %s, which begins anew.", name)
                continue
            try:
                part.restore(data[name])
            except msgspec.ValidationError as error:
                raise PolicyError(
                    f"the checkpoint's {name!r} is damaged ({error}); resume from another"
                ) from error


def _current_name(name: str) -> str:
    """A part's name with the class names of today; a change is logged."""
    current = re.sub(r"\b([A-Z]\w*)(?=\()", lambda found: RENAMED.get(found[1], found[1]), name)
    if current != name:
        log.warning("The checkpoint's %s is now called %s.", name, current)
    return current
