"""Prints the log lines of a run's processes on the front's console.

The user chooses the lowest level. PHASE, between INFO and WARNING, says what a run is doing now. A
sentence that several processes log is printed once.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from agentrl.processes import PHASE

LINE = re.compile(r"\S+ \S+ ([A-Z]+) (agentrl[\w.]*): (.*)")  # as `log_to_stderr` writes it
POLL = 0.5  # seconds between looks


def console_level(*, quiet: bool, verbose: bool) -> int:
    """The lowest level on the console."""
    return logging.WARNING if quiet else logging.INFO if verbose else PHASE


@dataclass(slots=True)
class LogFollower:
    """Prints the lines that are added to these files from now on."""

    console: Console
    level: int
    files: Iterable[Path]
    _read: dict[Path, int] = field(default_factory=dict)  # bytes
    _printed: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.files = list(self.files)
        self._read = {file: file.stat().st_size for file in self.files if file.is_file()}

    async def follow(self) -> None:
        """Until cancelled, and once more then: the last lines are the most important ones."""
        try:
            while True:
                self.look()
                await asyncio.sleep(POLL)
        finally:
            self.look()

    def look(self) -> None:
        for file in self.files:
            if not file.is_file():
                continue
            with file.open("rb") as log:
                log.seek(self._read.get(file, 0))
                added = log.read()
            whole, _, _ = added.rpartition(b"\n")
            self._read[file] = self._read.get(file, 0) + len(whole) + bool(whole)
            for line in whole.decode("utf-8", "replace").split("\n"):
                self._print(file, line)

    def _print(self, file: Path, line: str) -> None:
        found = LINE.fullmatch(line)
        if found is None or logging.getLevelNamesMapping().get(found[1], 0) < self.level:
            return
        level, sentence = found[1].lower(), found[3]
        if level != "phase":
            if (level, sentence) in self._printed:
                return
            self._printed.add((level, sentence))
            sentence = f"{level}: {sentence} ({file.name})"
        self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)
