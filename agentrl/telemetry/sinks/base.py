"""The protocol of metrics sinks, and the position up to which a sink has a run's steps.

The position is a small file in the run's output folder, written after the backend has a step. A
sink killed between the two gets the step again; the module of each backend documents the effect.
"""

from __future__ import annotations

import inspect
import math
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from agentrl.base.files import replace_file
from agentrl.config import RunConfig
from agentrl.config.keys import flatten
from agentrl.errors import AgentRLError
from agentrl.plugins import BUILT_IN, check_call, check_protocol, load_plugin
from agentrl.types import Json, StepRow

SETTINGS = ("seed", "steps", "policy", "sampling", "algorithm", "learner", "eval")
"""The settings that backends get; not those of the agent, whose variables may contain keys."""
KEY = "metrics.sinks"


class SinkError(AgentRLError):
    """A metrics sink cannot be reached or refuses metrics."""


class Sink(Protocol):
    """A backend that is open for one run. After any exception it is opened again later."""

    def write(self, row: StepRow) -> None:
        """Write a step's metrics, all finite. Returns when they survive the end of this process."""

    def close(self) -> None: ...


class SinkPosition(msgspec.Struct, frozen=True, kw_only=True):
    """All steps before `next` are written, and of step `next` the metrics `names`: those of the
    evaluation after the last step. A longer run completes this step."""

    id: str  # of the run in the backend
    next: int = 0
    names: tuple[str, ...] = ()

    def after(self, row: StepRow) -> SinkPosition:
        """The position once `row` is written."""
        if row.committed:
            return SinkPosition(id=self.id, next=row.step + 1)
        known = self.names if row.step == self.next else ()
        return SinkPosition(id=self.id, next=row.step, names=(*known, *sorted(row.metrics)))

    def unwritten(self, rows: Sequence[StepRow], steps: int) -> Iterator[StepRow]:
        """The parts of `rows` to write, in a run of `steps` steps. An uncommitted step may still
        change, except the one after the last step, which has only evaluations."""
        for row in rows:
            if row.step < self.next or not (row.committed or row.step == steps):
                continue
            known = self.names if row.step == self.next else ()
            finite = {name: value for name, value in row.metrics.items() if math.isfinite(value)}
            if metrics := {name: finite[name] for name in finite if name not in known}:
                yield msgspec.structs.replace(row, metrics=metrics)


def position_file(config: RunConfig, sink: str) -> Path:
    return Path(config.output, "metrics", quote(sink, safe="") + ".json")


def load_position(file: Path) -> SinkPosition:
    """The position in the file. A new one is saved at once, so the backend's run is always found
    again by its id. Raises SinkError for a damaged file."""
    if file.exists():
        try:
            return msgspec.json.decode(file.read_bytes(), type=SinkPosition)
        except msgspec.DecodeError as error:
            raise SinkError(
                f"{file} is damaged ({error}); delete it, and the sink starts a new run with all"
                " steps"
            ) from error
    position = SinkPosition(id=secrets.token_hex(4))
    save_position(file, position)
    return position


def save_position(file: Path, position: SinkPosition) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, msgspec.json.encode(position))


def sink_factory(name: str, root: Path) -> Any:
    """The function or class that opens a sink: built-in, a package's or the user's.

    Raises ConfigError for an unknown name, or if it does not take (config, position)."""
    factory: Any = load_plugin("sinks", name, (), root, key=KEY)
    check_call(factory, "config", "position", key=KEY)
    if inspect.isclass(factory):
        check_protocol(factory, Sink, by=factory, key=KEY)
    return factory


def check_sinks(config: RunConfig) -> None:
    """Raises ConfigError for unusable sinks of users."""
    for name in config.metrics.sinks:
        if name not in BUILT_IN["sinks"]:
            sink_factory(name, Path(config.root))


def open_sink(name: str, config: RunConfig, position: SinkPosition) -> Sink:
    """Open the backend of that name to continue at `position`."""
    factory = sink_factory(name, Path(config.root))
    sink: Sink = factory(config, position)
    check_protocol(sink, Sink, by=factory, key=KEY)
    return sink


def public_settings(config: RunConfig) -> dict[str, Json]:
    """The settings for backends, with dotted keys."""
    flat = flatten(msgspec.to_builtins(config))
    return {key: value for key, value in flat.items() if key.split(".")[0] in SETTINGS}


def plain_name(name: str) -> str:
    """A metric's name for backends that allow only letters, digits and `_-. :/`."""
    return re.sub(r"[^\w.: /-]", "_", name)
