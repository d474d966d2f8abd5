"""What a metrics sink is, and what it remembers.

A `Mark` is a small file in the run's output folder: under which id the backend knows the run, and
what it has been given. It is written after the backend took a step. So a sink that is killed
between the two gives that step again, and each backend says what it then makes of it.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import msgspec

from agentrl.config import RunConfig
from agentrl.config.keys import flatten
from agentrl.errors import SinkError
from agentrl.types import Json, StepRow

SETTINGS = ("seed", "steps", "policy", "sampling", "algorithm", "learner", "eval")
"""What backends are told of the run file. Not the agent's side: its variables may hold keys."""


class Sink(Protocol):
    """One backend, open for one run. Any exception of its means: not now."""

    def write(self, row: StepRow) -> None:
        """Returns when the backend has the metrics, all finite, and outlives this process."""
        ...

    def close(self) -> None: ...


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """How far a sink is. `names` are the metrics of step `next` that it has already: an evaluation
    after the last step, which a longer run will complete."""

    id: str  # of the run in the backend
    next: int = 0
    names: tuple[str, ...] = ()

    def after(self, row: StepRow) -> Mark:
        """When `row` has been written."""
        if row.committed:
            return Mark(id=self.id, next=row.step + 1)
        known = self.names if row.step == self.next else ()
        return Mark(id=self.id, next=row.step, names=(*known, *sorted(row.metrics)))

    def due(self, rows: Sequence[StepRow], steps: int) -> Iterator[StepRow]:
        """What of `rows` is to be written, of a run of so many steps. A step that is not committed
        may still change, but the one after the last only holds evaluations."""
        for row in rows:
            if row.step < self.next or not (row.committed or row.step == steps):
                continue
            known = self.names if row.step == self.next else ()
            metrics = {
                name: value
                for name, value in row.metrics.items()
                if name not in known and math.isfinite(value)
            }
            if metrics:
                yield msgspec.structs.replace(row, metrics=metrics)


def mark_file(config: RunConfig, sink: str) -> Path:
    return Path(config.output, "metrics", f"{sink}.json")


def load_mark(file: Path) -> Mark:
    """What the file says; where there is none yet, one with a new id, which is kept at once, so
    that the backend's run is found again whatever happens next.

    Raises SinkError for a file that is damaged."""
    if file.exists():
        try:
            return msgspec.json.decode(file.read_bytes(), type=Mark)
        except msgspec.DecodeError as error:
            raise SinkError(
                f"{file} is damaged ({error}); delete it, and the sink begins a new run there with"
                " every step"
            ) from error
    mark = Mark(id=secrets.token_hex(4))
    save_mark(file, mark)
    return mark


def save_mark(file: Path, mark: Mark) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp")
    partial.write_bytes(msgspec.json.encode(mark))
    partial.replace(file)


def open_sink(name: str, config: RunConfig, mark: Mark) -> Sink:
    """The backend of that name, where `mark` says that it was left."""
    return cast("Sink", import_module(f"agentrl.telemetry.sinks.{name}").open_sink(config, mark))


def settings(config: RunConfig) -> dict[str, Json]:
    """The run file as backends are shown it: dotted keys."""
    flat = flatten(msgspec.to_builtins(config))
    return {key: value for key, value in flat.items() if key.split(".")[0] in SETTINGS}


def plain(name: str) -> str:
    """A metric's name for backends that allow letters, digits and `_-. :/`."""
    return re.sub(r"[^\w.: /-]", "_", name)
