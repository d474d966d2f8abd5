"""The front's side of a sink: its process is kept alive, and a failure is said once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from agentrl.config import RunConfig
from agentrl.processes import USER_ERROR, Child
from agentrl.telemetry.sinks.follow import DRAIN

PAUSE, LONGEST = 10.0, 600.0  # seconds until a sink that failed is tried again; doubles


@dataclass(slots=True)
class Exporter:
    name: str
    child: Child
    console: Console
    said: bool = False

    async def keep(self) -> None:
        """Start the sink, and again after each failure; returns never but by its end."""
        pause = PAUSE
        while True:
            await self.child.start()
            if not await self.child.wait():
                return
            self.report()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST)

    async def stop(self) -> None:
        """Let the sink write what is left, a bounded time long."""
        if self.child.process is not None and self.child.process.returncode:
            await self.child.start()  # it failed before: the last chance
        await self.child.stop(DRAIN)
        self.report()

    def report(self) -> None:
        """Say that the sink failed, if it did, unless that was said before."""
        code = self.child.process.returncode if self.child.process else 0
        if not code or self.said:
            return
        self.said = True
        sentence = self.child.last_error() if code == USER_ERROR else None
        self.console.print(
            sentence
            or f"metrics sink {self.name}: it ended with code {code} before it had everything; the"
            f" same command gives it the rest (its output: {self.child.log})",
            style="bold",
            highlight=False,
            markup=False,
        )


def exporters(config: RunConfig, run_file: Path, console: Console) -> list[Exporter]:
    """Those of the run file, not started yet."""
    return [
        Exporter(
            name,
            Child(
                f"sink-{name}",
                ["sink", "start", name, str(run_file)],
                Path(config.output, "logs", f"sink-{name}.log"),
                piped=True,
            ),
            console,
        )
        for name in config.metrics.sinks
    ]
